"""The layouts that no other one is both faster and smaller than."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

from megatune.plan.search.candidate import Candidate

# Differences below this are within what an estimate is worth.
_TOLERANCE = 1.02


@dataclass
class Frontier:
    """Candidates by bytes of the fullest rank, ascending; their seconds of a step descend."""

    candidates: list[Candidate] = field(default_factory=list)
    _bytes: list[int] = field(default_factory=list)

    def dominates(self, memory: float, seconds: float) -> bool:
        """Whether one is as small and as fast as this, or misses it by less than 2 %."""
        position = bisect_right(self._bytes, memory * _TOLERANCE)
        return position > 0 and self.candidates[position - 1].seconds <= seconds * _TOLERANCE

    def add(self, candidate: Candidate, shortest: float = 0.0) -> None:
        """Take it in, and leave out what it dominates; nothing where it is dominated itself.

        Args:
            shortest: seconds that it takes at least; they may spare working out its own.
        """
        memory = candidate.bytes
        before = bisect_right(self._bytes, memory)
        fastest = self.candidates[before - 1].seconds if before else math.inf
        if fastest <= shortest or fastest <= candidate.seconds:
            return
        seconds = candidate.seconds
        start = stop = bisect_left(self._bytes, memory)
        while stop < len(self.candidates) and self.candidates[stop].seconds >= seconds:
            stop += 1
        self.candidates[start:stop] = [candidate]
        self._bytes[start:stop] = [memory]

    def thinned(self) -> list[Candidate]:
        """Without those that another one misses by less than 2 %."""
        kept: list[Candidate] = []
        for candidate in reversed(self.candidates):  # the fastest first
            if not kept or candidate.bytes * _TOLERANCE < kept[-1].bytes:
                kept.append(candidate)
        return kept[::-1]
