"""A layout, a batch and a way to recompute, whose memory and time are worked out when they are asked for."""

from __future__ import annotations

from functools import cached_property, lru_cache

from megatune.config.pipeline import PipelineChunk, pipeline_chunks
from megatune.plan.case import Case
from megatune.plan.estimate import Estimate
from megatune.plan.memory.estimate import StageMemory, memory_of_stage, stage_memory
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
        architecture = self.case.model.architecture
        sparse = architecture.moe.layers if architecture.moe is not None else (False,) * architecture.num_layers
        parallel = self.case.settings.parallel
        chunks = pipeline_chunks(parallel, architecture.num_layers)
        unlike = _unlike_stages(chunks, parallel.pipeline_model_parallel_size, sparse)
        return max(memory_of_stage(self.case, stage).total for stage in unlike)

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
def _unlike_stages(chunks: tuple[PipelineChunk, ...], pp: int, sparse: tuple[bool, ...]) -> tuple[int, ...]:
    """Stages that hold other things than the one before."""
    held: list[list[tuple[int, int, bool, bool]]] = [[] for _ in range(pp)]
    first = 0
    for index, chunk in enumerate(chunks):
        layers = sparse[first : first + chunk.num_layers]
        held[index % pp].append((len(layers), sum(layers), chunk.embedding, chunk.loss))
        first += chunk.num_layers
    return tuple(stage for stage in range(pp) if stage == 0 or held[stage] != held[stage - 1])
