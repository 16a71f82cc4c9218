"""Steps that are far slower than their neighbours, and ranks that make the others wait; named while a run goes on."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatune.training.callbacks.base import Notice

_WARM_UP = 2  # steps of a process that say nothing
_WINDOW = 32  # steps that tell what is usual
_JUDGED_FROM = 8  # of them, for a step; a rank is judged from twice as many on
# A step is slow that takes so many times the usual; a rank, that is busy for so many times as long as its peers while
# they wait for so large a part of a step; less than these seconds are worth no line.
_SLOW_STEP, _SLOW_RANK, _NOTABLE = 2.0, 1.3, 0.1
_LEAST_OF_STEP, _LEAST_OF_RANK = 1.0, 0.05
_SHARE = 0.5  # of what a slow step took longer, that the rank has to explain
_PAUSE_SECONDS = 60.0  # between two lines on slow steps


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs. Ranks of one pipeline stage have the same to do."""

    host: str
    stage: int


class Pace:
    """Judges the steps of a process.

    Args:
        places: of all ranks.
        now: seconds of a clock.
    """

    def __init__(self, places: Sequence[Place], now: Callable[[], float] = time.monotonic) -> None:
        self._places, self._now = places, now
        self._num_steps = 0
        self._walls: deque[float] = deque(maxlen=_WINDOW)
        self._busy: list[deque[float]] = [deque(maxlen=_WINDOW) for _ in places]
        self._named: set[int] = set()
        self._next_line, self._left_out = 0.0, 0

    def notices(self, step: int, wall: float, busy: Sequence[float]) -> list[Notice]:
        """Return what to say of a step.

        Args:
            step: counted from 1.
            wall: seconds that it took, without evaluation and saving.
            busy: of these, how long each rank did not wait for others.
        """
        self._num_steps += 1
        if self._num_steps <= _WARM_UP:
            return []
        found = [self._slow_step(step, wall, busy)] if len(self._walls) >= _JUDGED_FROM else []
        self._walls.append(wall)
        for known, seconds in zip(self._busy, busy, strict=True):
            known.append(seconds)
        if len(self._walls) >= 2 * _JUDGED_FROM:
            found.append(self._slow_rank(step))
        return [notice for notice in found if notice is not None]

    def _slow_step(self, step: int, wall: float, busy: Sequence[float]) -> Notice | None:
        usual = statistics.median(self._walls)
        if wall < max(_SLOW_STEP * usual, usual + _LEAST_OF_STEP):
            return None
        if self._now() < self._next_line:
            self._left_out += 1
            return None
        longer = [seconds - statistics.median(known) for seconds, known in zip(busy, self._busy, strict=True)]
        rank = max(range(len(busy)), key=longer.__getitem__)
        is_explained = longer[rank] >= _SHARE * (wall - usual)
        why = "no rank was busy for longer than usual: communication between them or their devices were slow"
        if is_explained and len(busy) == 1:
            why = "it was computing, or waiting for its data or a disk"
        elif is_explained:
            why = f"{self._name(rank)} was busy for {busy[rank]:.2f} s, and the others waited for it"
        more = f"; {self._left_out} more since the last such line" if self._left_out else ""
        self._next_line, self._left_out = self._now() + _PAUSE_SECONDS, 0
        values = {"slow_step_seconds": wall, "usual_seconds": usual, "slow_rank": rank if is_explained else None}
        return Notice(step, f"step {step} took {wall:.2f} s, {usual:.2f} s are usual: {why}{more}", values)

    def _slow_rank(self, step: int) -> Notice | None:
        usual = [statistics.median(known) for known in self._busy]
        rank = max(range(len(usual)), key=usual.__getitem__)
        stage = self._places[rank].stage
        peers = [each for other, each in enumerate(usual) if other != rank and self._places[other].stage == stage]
        if rank in self._named or not peers:
            return None
        theirs, wall = statistics.median(peers), statistics.median(self._walls)
        if usual[rank] < _SLOW_RANK * theirs or usual[rank] - theirs < max(_NOTABLE * wall, _LEAST_OF_RANK):
            return None
        self._named.add(rank)
        text = f"{self._name(rank)} makes the others wait: it is busy for {usual[rank]:.2f} s of a step of {wall:.2f} s"
        text += f", those with the same work for {theirs:.2f} s; `megatune doctor` measures machines and links"
        values = {"slow_rank": rank, "slow_rank_seconds": usual[rank], "peers_seconds": theirs}
        return Notice(step, text, values)

    def _name(self, rank: int) -> str:
        return f"rank {rank} on host {self._places[rank].host}"
