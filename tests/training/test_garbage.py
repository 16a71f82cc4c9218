"""Garbage is collected when told to, and only then."""

import gc
from pathlib import Path

import pytest
from runs import metrics, settings_of, train

from megatune.config.groups.performance import PerformanceSettings
from megatune.config.settings import Settings
from megatune.demo.checkpoint import make_checkpoint
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


def count_collections_by_hand(settings: Settings, run_dir: Path) -> int:
    """On a rank: how often a whole run collects while Python is not to by itself."""
    found = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and not gc.isenabled():
            found.append(info["generation"])

    gc.callbacks.append(note)
    try:
        assert train(settings, run_dir) == 0
    finally:
        gc.callbacks.remove(note)
    return len(found)


def test_a_run_of_experts_collects_by_hand_and_logs_how_busy_they_are(pool, tmp_path):
    model = make_checkpoint("qwen3_moe", tmp_path / "model")
    changes = {"max_steps": 6, "save_strategy": "no", "moe_aux_loss_coeff": 1e-3, "moe_z_loss_coeff": 1e-3}
    settings = settings_of(model, tmp_path / "out", manual_gc=True, manual_gc_interval=2, **changes)
    assert pool.run(1, count_collections_by_hand, settings, tmp_path) == [3]
    for line in metrics(tmp_path / "out").values():
        assert 1 <= line["load_balancing_loss"] < 8  # of eight experts: all alike, or one that gets everything
        assert line["z_loss"] > 0
