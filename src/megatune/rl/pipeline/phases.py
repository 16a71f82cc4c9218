"""Where the seconds of a step go."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Phases:
    """Seconds of a step by phase.

    Args:
        note: told each phase as it begins.
    """

    def __init__(self, note: Callable[[str], None] = lambda phase: None) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._note = note
        self._began = time.monotonic()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the seconds inside."""
        began = time.monotonic()
        self._note(name)
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - began

    @property
    def total(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self._began
