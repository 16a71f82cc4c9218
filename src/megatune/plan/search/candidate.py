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
from megatune.plan.uncertainty import memory_bound, time_uncertainty

# A run that begins is warned when its plan comes this close to the device's memory.
TIGHT = 0.95
# Differences below this are within what an estimate is worth.
_TOLERANCE = 1.02
# Where all that fits is tight, the smallest is recommended of those that take at most this share more time.
_WORTH_ROOM = 0.5
# Two layouts of one model share most of what a plan is off by: an assumption, as few published runs differ in nothing
# but their layout. This share of a plan's uncertainty is taken for that of a difference, and these for its limits.
_OF_DIFFERENCES, _LEAST_DIFFERENCE, _MOST_DIFFERENCE = 0.2, 0.05, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """What to search for.

    Attributes:
        world_size: processes of the whole run, one a device.
        settings: what is not searched is taken from them.
        global_batch_size: rows of a step, which every layout keeps; None takes that of the settings on this world.
        document_length, image_tokens, largest_picture, lengths: as in `Case`.
        keep: how many layouts are ranked.
        written: settings, "group.name", that a user wrote: of what costs nothing these stay as they are.
        free: whether what costs nothing is turned on; see `search.free`.
        below: seconds; slower layouts are of no interest, nor is a frontier, if that is finite.
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
    written: frozenset[str] = frozenset()
    free: bool = True
    below: float = math.inf

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
        ranked: layouts that fit, each micro-batch of one once, with its best virtual stages and recomputation. Those
            that fit at the upper end of what is known come before those that are tight, and the fastest first, but
            for the `num_equal` first ones.
        num_equal: how many of the ranked are as fast as the fastest, as far as is known: the simplest of these first.
        frontier: layouts that no other one is both faster and smaller than by more than 3 %, the smallest first.
        too_large: the nearest misses, each with the least memory its layout can do with, the smallest first.
        refused: what cannot be, the largest group first.
        num_considered: valid layouts and batches that were evaluated, by an estimate or by a bound.
        policy: what was left out without judging it, in sentences.
    """

    ranked: tuple[Estimate, ...]
    num_equal: int
    frontier: tuple[Estimate, ...]
    too_large: tuple[Estimate, ...]
    refused: tuple[Refusal, ...]
    num_considered: int
    policy: tuple[str, ...]

    @property
    def best(self) -> Estimate | None:
        """The first of those that fit; None where none does."""
        return self.ranked[0] if self.ranked else None

    @property
    def recommended(self) -> Estimate | None:
        """The first of those that fit; where all are tight, the smallest of those that are not far slower."""
        if (best := self.best) is None or not is_tight(best):
            return best
        slowest = (1 + _WORTH_ROOM) * min(each.time.total for each in self.ranked)
        near = (each for each in (*self.ranked, *self.frontier) if each.time.total <= slowest)
        return min(near, key=lambda each: each.fullest.total, default=best)


def safe_bytes(case: Case) -> int:
    """Return what a rank may be planned to hold, so that nine of ten runs of the model's class fit."""
    return int(case.machine.device.memory / (1 + memory_bound(case)))


def is_tight(estimate: Estimate) -> bool:
    """Return whether the fullest rank does not fit at the upper end of what is known of its class of models."""
    return estimate.fullest.total > safe_bytes(estimate.case)


def equal_within(case: Case) -> float:
    """Return the share of a step's time by which a layout may be slower than another and still be taken for equal."""
    return min(max(_OF_DIFFERENCES * time_uncertainty(case), _LEAST_DIFFERENCE), _MOST_DIFFERENCE)


def num_kinds(case: Case) -> int:
    """Count the kinds of parallelism of a layout that split a model, virtual stages among them."""
    parallel = case.settings.parallel
    sizes = parallel.sizes(case.world_size)
    return sum(size > 1 for name, size in sizes.items() if name != "dp")


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
        return self.bytes > safe_bytes(self.case)

    @cached_property
    def rank_key(self) -> tuple[bool, float, int]:
        """Whether it is tight; seconds of a step to four digits; bytes."""
        return self.is_tight, float(f"{self.seconds:.4g}"), self.bytes

    @cached_property
    def num_kinds(self) -> int:
        return num_kinds(self.case)

    def equals(self, fastest: Candidate) -> bool:
        """Return whether it is as surely in memory as the fastest, and as fast as far as is known."""
        longest = (1 + equal_within(self.case)) * fastest.seconds
        return self.is_tight == fastest.is_tight and self.seconds <= longest

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
