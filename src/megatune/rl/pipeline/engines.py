"""What the driver asks of all rollout engines together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatune.rl.samples import Request, Response


class Engines(Protocol):
    """Engines with the same weights."""

    @property
    def number(self) -> int:
        """How many there are."""
        ...

    def submit(self, requests: Sequence[Sequence[Request]]) -> None:
        """Take requests, by engine."""
        ...

    def step(self, *, wait: bool = True) -> list[Response]:
        """Let all engines sample on for a moment, and return what was finished; nothing yet, where they are at it and
        nobody waits."""
        ...

    def settle(self) -> list[Response]:
        """Wait until no engine is at a step, and return what was finished."""
        ...

    def abort(self, ids: Sequence[str] | None = None) -> list[Response]:
        """End requests (None: all), and return what they have so far."""
        ...
