"""Layouts whose memory and time are computed when they are asked for, and the frontier of the best."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from megatune.architecture import Architecture
from megatune.config.settings import ParallelSettings
from megatune.plan.case import Case
from megatune.plan.estimate import Estimate
from megatune.plan.memory.estimate import StageMemory, fullest_bytes, stage_memory
from megatune.plan.memory.tensors import stage_chunks
from megatune.plan.search.request import TIGHT
from megatune.plan.time import StepTime, step_time

# A tight layout is ranked before one that is not only where it is faster by more than this.
_WORTH_BEING_TIGHT = 1.01
# Differences below this are within what an estimate is worth.
_TOLERANCE = 1.02


class Candidate:
    """An `Estimate` in the making: most candidates are ruled out by one of its two halves."""

    def __init__(self, case: Case) -> None:
        self.case = case

    @cached_property
    def stages(self) -> tuple[StageMemory, ...]:
        return stage_memory(self.case)

    @cached_property
    def time(self) -> StepTime:
        return step_time(self.case)

    @cached_property
    def bytes(self) -> int:
        """Of the fullest rank. Of stages that hold the same one after the other, the first one holds it for most
        micro-batches."""
        unlike = _unlike_stages(self.case.settings.parallel, self.case.model.architecture)
        return fullest_bytes(self.case, unlike)

    @property
    def seconds(self) -> float:
        return self.time.total

    @property
    def fits(self) -> bool:
        return self.bytes <= self.case.machine.device.memory

    @property
    def is_tight(self) -> bool:
        return self.bytes > TIGHT * self.case.machine.device.memory

    @cached_property
    def rank_key(self) -> tuple[float, int]:
        """Seconds of a step to four digits, 1 % more where the layout is tight; then bytes."""
        seconds = self.seconds * (_WORTH_BEING_TIGHT if self.is_tight else 1.0)
        return float(f"{seconds:.4g}"), self.bytes

    def estimate(self) -> Estimate:
        return Estimate(self.case, self.stages, self.time)


@lru_cache(maxsize=1024)
def _unlike_stages(parallel: ParallelSettings, architecture: Architecture) -> tuple[int, ...]:
    """Stages that hold other things than the one before."""
    held = [
        [(len(chunk.layers), sum(chunk.layers), chunk.embedding, chunk.loss) for chunk in stage]
        for stage in stage_chunks(parallel, architecture)
    ]
    return tuple(stage for stage in range(len(held)) if stage == 0 or held[stage] != held[stage - 1])


@dataclass
class Frontier:
    """Candidates by bytes of the fullest rank, ascending; their seconds of a step descend."""

    candidates: list[Candidate] = field(default_factory=list)
    _bytes: list[int] = field(default_factory=list)

    def dominates(self, memory: float, seconds: float) -> bool:
        """Return whether one is as small and as fast as this, or misses it by less than 2 %."""
        position = bisect_right(self._bytes, memory * _TOLERANCE)
        return position > 0 and self.candidates[position - 1].seconds <= seconds * _TOLERANCE

    def add(self, candidate: Candidate, shortest: float = 0.0) -> None:
        """Add a candidate that none dominates, and remove what it dominates.

        Args:
            shortest: seconds that it takes at least; they may spare computing its own.
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
        """Leave out those that another one misses by less than 2 %."""
        kept: list[Candidate] = []
        for candidate in reversed(self.candidates):  # the fastest first
            if not kept or candidate.bytes * _TOLERANCE < kept[-1].bytes:
                kept.append(candidate)
        return kept[::-1]
