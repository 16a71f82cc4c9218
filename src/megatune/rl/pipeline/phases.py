"""Where the seconds of a step go."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Phases:
    """Seconds of a step by phase.

    Attributes:
        current: the phase that is under way, or was last.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.current = "begin"
        self._began = time.monotonic()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the seconds inside."""
        began, self.current = time.monotonic(), name
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - began

    @property
    def total(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self._began
