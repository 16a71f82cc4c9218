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
# Transformers and peft import these where they are installed, for parts that no rank uses. Each takes seconds, and
# bitsandbytes initialises CUDA, after which a process cannot be forked.
_UNUSED = ("bitsandbytes", "sklearn")


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
def quick_imports() -> Iterator[None]:
    """Import inside what a rank needs, in two thirds of the time: optional libraries that none uses look as if they
    were not installed, and the garbage collector does not go over a growing heap in which hardly anything is garbage.
    """
    hidden = [name for name in _UNUSED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: `import` and find_spec do not find it
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()
        for name in hidden:
            del sys.modules[name]
