"""How many helper processes a machine has cores and memory for: files are written on one machine and run on others."""

from __future__ import annotations

import os

_PROCESS_BYTES = 2**28  # of Python, its libraries and a tokenizer


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
