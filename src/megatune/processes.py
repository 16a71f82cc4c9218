"""Helpers for processes: how many a machine has room for, ending with their parent, and fast imports."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PARENT_POLL_SECONDS = 1.0  # between checks whether the parent is alive

_PROCESS_BYTES = 2**28  # of Python, its libraries and a tokenizer
# Transformers and peft import these if they are installed, for parts that are rarely used here. Each takes a second or
# more, and bitsandbytes initializes CUDA, after which a process cannot be forked.
_UNUSED = ("bitsandbytes", "peft", "scipy", "sklearn")


def usable_processes(asked: int, side_by_side: int = 1) -> tuple[int, str]:
    """Return how many of the requested processes to start, and what limits them; "" if nothing does.

    Args:
        side_by_side: how many callers start as many on this machine.
    """
    import psutil

    cores = max(1, len(os.sched_getaffinity(0)) // side_by_side)
    fit = max(1, psutil.virtual_memory().available // (_PROCESS_BYTES * side_by_side))
    most = min(cores, fit)
    if asked <= most:
        return asked, ""
    return most, f"the free memory has room for {fit}" if fit < cores else f"there are cores for {cores}"


def when_parent_ends(parent: int, act: Callable[[], object]) -> None:
    """Start a thread that calls `act` when the parent process `parent` has ended, even if it was killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_SECONDS)
        act()

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def without_collector() -> Iterator[None]:
    """Turn the garbage collector off in the block: it takes a tenth of the time if many objects without cycles are
    created. The objects are also excluded from later collections, including the one at exit: another fifth."""
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
    """Speed up imports in the block: rarely used libraries look as if they were not installed, so that they are
    imported when needed, and the garbage collector is off."""
    hidden = [name for name in _UNUSED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: `import` and find_spec do not find it
    try:
        with without_collector():
            yield
    finally:
        for name in hidden:
            del sys.modules[name]
