"""A layout, a batch and a way to recompute, whose memory and time are worked out when they are asked for."""

from __future__ import annotations

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
