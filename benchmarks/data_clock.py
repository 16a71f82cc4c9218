"""Seconds of work: as a clock has them, and of CPU, with the processes that were started and have ended."""

from __future__ import annotations

import resource
import time


class Clock:
    """Counts from its making on."""

    def __init__(self) -> None:
        self._began, self._before = time.perf_counter(), _cpu_seconds()

    def read(self) -> dict[str, float]:
        """Seconds; CPU seconds of all processes, user and system; and those of this process or of all others, the
        larger."""
        seconds = time.perf_counter() - self._began
        own, others = (after - before for after, before in zip(_cpu_seconds(), self._before, strict=True))
        return {"seconds": seconds, "cpu": own + others, "busiest": max(own, others)}


def _cpu_seconds() -> tuple[float, float]:
    own, others = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime, others.ru_utime + others.ru_stime
