"""Python's garbage collection at the same steps on all processes.

Left alone, each process collects whenever its own counters say so, for some tens of milliseconds, and the others wait
for it in the next collective operation.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from megatune.config.groups.performance import PerformanceSettings


@contextmanager
def collection_by_hand(performance: PerformanceSettings) -> Iterator[None]:
    """With `manual_gc`: no collection but those of `collect_after`, until the block ends."""
    if not performance.manual_gc:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def collect_after(step: int, performance: PerformanceSettings) -> None:
    """Collect where it is this step's turn; steps are counted from 1."""
    if performance.manual_gc and step % performance.manual_gc_interval == 0:
        gc.collect()
