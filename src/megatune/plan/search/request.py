"""What is searched, and what was found."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatune.config.settings import Settings
from megatune.errors import Finding
from megatune.plan.case import Case, PlannedModel
from megatune.plan.estimate import Estimate
from megatune.plan.machine import Machine

# A layout this close to the device's memory may not fit after all: the memory of a step is known to a few percent.
TIGHT = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """What to search for.

    Attributes:
        world_size: processes of the whole run, one a device.
        settings: what is not searched is taken from them.
        global_batch_size: rows of a step, which every layout keeps; None takes that of the settings on this world.
        document_length, image_tokens: as in `Case`.
        keep: how many layouts are ranked.
    """

    model: PlannedModel
    machine: Machine
    world_size: int
    settings: Settings = field(default_factory=Settings)
    global_batch_size: int | None = None
    document_length: float | None = None
    image_tokens: int = 0
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
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A group of layouts that cannot be, for one reason.

    Attributes:
        what: what all of them have in common.
        why: the reason, as the rules give it.
        count: how many layouts of the machine's processes are among them.
        example: the rules' finding about one of them, whose fix is the nearest valid value.
    """

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
