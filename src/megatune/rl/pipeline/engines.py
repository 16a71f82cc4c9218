"""What the driver asks of all rollout engines together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatune.rl.rollout.engine import RolloutEngine
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


class LocalEngines:
    """Engines in this process, by turns."""

    def __init__(self, engines: Sequence[RolloutEngine]) -> None:
        self._engines = list(engines)

    @property
    def number(self) -> int:
        """See `Engines`."""
        return len(self._engines)

    def submit(self, requests: Sequence[Sequence[Request]]) -> None:
        """See `Engines`."""
        for engine, own in zip(self._engines, requests, strict=True):
            engine.submit(own)

    def step(self, *, wait: bool = True) -> list[Response]:
        """See `Engines`."""
        return [response for engine in self._engines for response in engine.step()]

    def settle(self) -> list[Response]:
        """See `Engines`."""
        return []

    def abort(self, ids: Sequence[str] | None = None) -> list[Response]:
        """See `Engines`."""
        return [response for engine in self._engines for response in engine.abort(ids)]
