"""What is searched and what was found, layouts whose memory and time are computed when asked for, and the frontier."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from megatune.architecture import Architecture
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.settings import ParallelSettings, Settings
from megatune.errors import Finding
from megatune.plan.case import Case, PlannedModel
from megatune.plan.estimate import Estimate
from megatune.plan.machine import Machine
from megatune.plan.memory.estimate import StageMemory, fullest_bytes, stage_memory
from megatune.plan.memory.tensors import stage_chunks
from megatune.plan.rows import RowLengths
from megatune.plan.time import StepTime, step_time

# A layout this close to the device's memory may not fit after all: the memory of a step is known to a few percent.
TIGHT = 0.95
# A tight layout is ranked before one that is not only where it is faster by more than this.
_WORTH_BEING_TIGHT = 1.01
# Differences below this are within what an estimate is worth.
_TOLERANCE = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """What to search for.

    Attributes:
        world_size: processes of the whole run, one a device.
        settings: what is not searched is taken from them.
        global_batch_size: rows of a step, which every layout keeps; None takes that of the settings on this world.
        document_length, image_tokens, largest_picture, lengths: as in `Case`.
        keep: how many layouts are ranked.
    """

    model: PlannedModel
    machine: Machine
    world_size: int
    settings: Settings = field(default_factory=Settings)
    global_batch_size: int | None = None
    document_length: float | None = None
    image_tokens: int | None = None
    largest_picture: int | None = None
    lengths: RowLengths | None = None
    keep: int = 20

    @property
    def rows(self) -> int:
        """Rows of a step: the global batch that was asked for, or the settings' own on this world."""
        if self.global_batch_size is not None:
            return self.global_batch_size
        batch = self.settings.batch
        replicas = max(self.world_size // self.settings.parallel.model_parallel_size, 1)
        return batch.per_device_train_batch_size * batch.gradient_accumulation_steps * replicas

    def case(self, settings: Settings) -> Case:
        """Return the request's case with these settings."""
        return Case(
            model=self.model,
            settings=settings,
            world_size=self.world_size,
            machine=self.machine,
            document_length=self.document_length,
            image_tokens=self.image_tokens,
            largest_picture=self.largest_picture,
            lengths=self.lengths,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Layouts that cannot be: what they have in common, why, as the rules say, how many of the machine's processes they
    are, and the rules' finding about one of them, whose fix is the nearest valid value."""

    what: str
    why: str
    count: int
    example: Finding


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What was found.

    Attributes:
        ranked: layouts that fit, the fastest first, each micro-batch of one once, with its best virtual stages and
            recomputation; one that is tight comes after those less than 1 % slower.
        frontier: layouts that no other one is both faster and smaller than by more than 3 %, the smallest first.
        too_large: the nearest misses, each with the least memory its layout can do with, the smallest first.
        refused: what cannot be, the largest group first.
        num_considered: valid layouts and batches that were judged, by an estimate or by a bound.
        policy: what was left out without judging it, in sentences.
    """

    ranked: tuple[Estimate, ...]
    frontier: tuple[Estimate, ...]
    too_large: tuple[Estimate, ...]
    refused: tuple[Refusal, ...]
    num_considered: int
    policy: tuple[str, ...]

    @property
    def best(self) -> Estimate | None:
        """The first of those that fit; None where none does."""
        return self.ranked[0] if self.ranked else None


def is_tight(estimate: Estimate) -> bool:
    """Return whether the fullest rank comes within 5 % of the device's memory, or above it."""
    return estimate.fullest.total > TIGHT * estimate.case.machine.device.memory


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
        settings = self.case.settings
        unlike = _unlike_stages(settings.parallel, self.case.model.architecture, settings.finetuning)
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
def _unlike_stages(
    parallel: ParallelSettings, architecture: Architecture, trainable: FinetuningSettings
) -> tuple[int, ...]:
    """Stages that hold other things than the one before."""
    held = [
        [(sorted(chunk.layers), chunk.embedding, chunk.loss) for chunk in stage]
        for stage in stage_chunks(parallel, architecture, trainable)
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
        """Add a candidate that none dominates, and remove what it dominates. It takes at least the seconds `shortest`,
        which may spare computing its own."""
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
