"""How long this process waits for others, beside what it computes.

On a CPU a collective operation returns when it is done, and its time is waited. On a GPU operations are only launched,
and the host waits where it reads a number: what is left is the host's own time, not its device's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch.distributed import Work

_seconds = 0.0
_is_counting = False


def waited_seconds() -> float:
    """Return how long this process has waited since it began to be watched."""
    return _seconds


@contextmanager
def counted() -> Iterator[None]:
    """Count the time of the block as waited; blocks in it count once."""
    global _seconds, _is_counting
    if _is_counting:
        yield
        return
    _is_counting, began = True, time.monotonic()
    try:
        yield
    finally:
        _is_counting = False
        _seconds += time.monotonic() - began


def watch() -> None:
    """Count what every collective operation of this process waits from here on; once is enough."""
    if hasattr(Work.wait, "__wrapped__"):
        return
    wait = Work.wait

    @wraps(wait)
    def counted_wait(*args: Any, **kwargs: Any) -> Any:
        with counted():
            return wait(*args, **kwargs)

    Work.wait = counted_wait  # type: ignore[method-assign]


class BusyTime:
    """What this process does between one exchange and the next, without waiting for others; in seconds.

    Attributes:
        wall: of the last window that `take` closed, with waiting.
    """

    def __init__(self) -> None:
        watch()
        self.wall = 0.0
        self._held = self._held_wall = 0.0
        self.resume()

    def resume(self) -> None:
        """Go on after a pause."""
        self._began, self._waited = time.monotonic(), waited_seconds()

    def pause(self) -> None:
        """Leave out what comes until `resume`."""
        wall = time.monotonic() - self._began
        self._held_wall += wall
        self._held += wall - (waited_seconds() - self._waited)

    def take(self) -> float:
        """Return how long it was busy since the last call, and begin anew."""
        self.pause()
        busy, self.wall = max(0.0, self._held), self._held_wall
        self._held = self._held_wall = 0.0
        self.resume()
        return busy
