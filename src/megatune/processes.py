"""Processes: how many a machine has cores and memory for, how they end with the one that started them, and what they
leave out of their start.

Files are written on one machine and run on others. A process that is killed cannot end those that it started.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PARENT_LOOK_SECONDS = 1.0  # between looks whether the parent is there

_PROCESS_BYTES = 2**28  # of Python, its libraries and a tokenizer
# Transformers and peft import these where they are installed, for parts that hardly a process here uses. Each takes
# a second or more, and bitsandbytes initialises CUDA, after which a process cannot be forked.
_UNUSED = ("bitsandbytes", "peft", "scipy", "sklearn")


def usable_processes(asked: int, side_by_side: int = 1) -> tuple[int, str]:
    """Return how many of the processes that are asked for to start, and what bounds them; "" where nothing does.

    Their number changes no result.

    Args:
        side_by_side: how often as many are started on this machine.
    """
    import psutil

    cores = max(1, len(os.sched_getaffinity(0)) // side_by_side)
    fit = max(1, psutil.virtual_memory().available // (_PROCESS_BYTES * side_by_side))
    most = min(cores, fit)
    if asked <= most:
        return asked, ""
    return most, f"the free memory has room for {fit}" if fit < cores else f"there are cores for {cores}"


def when_parent_ends(parent: int, act: Callable[[], object]) -> None:
    """Have a thread call `act` once the process `parent`, which started this one, has ended in whatever way."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_LOOK_SECONDS)
        act()

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def without_collector() -> Iterator[None]:
    """Leave the garbage collector off inside: where many objects are made, hardly a cycle among them, it takes a tenth
    of the time. What is there in the end is left out of later collections, the one when the process ends among them:
    another fifth."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.freeze()
            gc.enable()


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import inside what ranks, actors, infer and serve need: libraries that few use look as if they were not
    installed (whoever does imports them later), and the garbage collector is off."""
    hidden = [name for name in _UNUSED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: `import` and find_spec do not find it
    try:
        with without_collector():
            yield
    finally:
        for name in hidden:
            del sys.modules[name]
