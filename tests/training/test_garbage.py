"""Garbage is collected when told to, and only then."""

import gc

import pytest

from megatune.config.groups.performance import PerformanceSettings
from megatune.training.garbage import collect_after, collection_by_hand


def test_by_hand_nothing_else_collects():
    performance = PerformanceSettings(manual_gc=True, manual_gc_interval=2)
    found = []

    def note(phase: str, info: dict[str, int]) -> None:
        found.append(phase)

    with collection_by_hand(performance):
        assert not gc.isenabled()
        gc.callbacks.append(note)
        for step in range(1, 6):
            collect_after(step, performance)
        gc.callbacks.remove(note)
    assert gc.isenabled()
    assert found.count("start") == 2  # after steps 2 and 4


def test_left_alone_python_collects_as_it_likes():
    with collection_by_hand(PerformanceSettings()):
        assert gc.isenabled()
        gc.callbacks.append(fail := lambda phase, info: pytest.fail("collected"))
        collect_after(50, PerformanceSettings())
        gc.callbacks.remove(fail)
