"""Seconds of work: as a clock has them, and of CPU, of this process and of all that it starts; and their memory."""

from __future__ import annotations

import resource
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

INTERVAL = 0.25  # seconds between two looks at the processes; what one does after the last look is not in `busiest`


class Clock:
    """Counts from its making on.

    Args:
        memory: look at the memory of the processes, too, which takes milliseconds for each.
    """

    def __init__(self, *, memory: bool = False) -> None:
        self._memory, self._held, self._mapped = memory, 0, 0
        self._of_others: dict[int, float] = {}  # CPU seconds by process
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._began, self._before = time.perf_counter(), _cpu_seconds()
        self._watcher.start()

    def read(self) -> dict[str, float]:
        """Stop, and return seconds; CPU seconds of all processes, user and system; those of the busiest process;
        and, in GiB, the most that all processes held at once, without and with the pages of files, which a system takes
        back at need."""
        seconds = time.perf_counter() - self._began
        self._stopped.set()
        self._watcher.join()
        own, others = (after - before for after, before in zip(_cpu_seconds(), self._before, strict=True))
        busiest = max([own, *self._of_others.values()])
        memory = {"held": self._held / 2**20, "mapped": self._mapped / 2**20}
        return {"seconds": seconds, "cpu": own + others, "busiest": busiest, **memory}

    def _watch(self) -> None:
        here = psutil.Process()
        while not self._stopped.wait(INTERVAL):
            held = mapped = 0
            for process in (here, *here.children(recursive=True)):
                with suppress(psutil.NoSuchProcess, OSError):
                    if process != here:
                        times = process.cpu_times()
                        self._of_others[process.pid] = times.user + times.system
                    kibibytes = _memory_of(process.pid) if self._memory else {}
                    held += kibibytes.get("Pss_Anon", 0) + kibibytes.get("Pss_Shmem", 0)
                    mapped += kibibytes.get("Pss", 0)
            self._held, self._mapped = max(self._held, held), max(self._mapped, mapped)


def _memory_of(pid: int) -> dict[str, int]:
    """KiB of memory by kind; of a page that several processes share each has its part."""
    _, *lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return {name.rstrip(":"): int(size) for name, size, _ in map(str.split, lines)}


def _cpu_seconds() -> tuple[float, float]:
    own, others = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime, others.ru_utime + others.ru_stime
