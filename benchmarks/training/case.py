"""What is measured, and what came of it: plain data that processes send each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from training.shapes import Shape

LEARNING_RATE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The work of a step, the same for every engine.

    Attributes:
        name: short, for --only and the table.
        tokens: of a row; a micro-batch is one row.
        micro_batches: of a step.
        document_median: median of the lengths of a row's documents, in tokens; None for one document a row.
        bf16: compute in bf16; fp32 otherwise.
        recompute: all activations of layers are computed again in the backward pass, on every side.
        images: of each document, grids of patches (t, h, w); all of the model is trained.
    """

    name: str
    shape: Shape
    tokens: int
    micro_batches: int
    document_median: int | None
    bf16: bool
    recompute: bool = False
    images: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Engine:
    """One side, with how it is set.

    Attributes:
        options: of megatune settings, by the keys of its YAML; of Transformers the arguments of `theirs.Transformers`.
    """

    name: str
    side: Literal["megatune", "transformers"]
    options: Mapping[str, Any] = field(default_factory=dict)


# What the others are measured against.
TRANSFORMERS = Engine("Transformers", "transformers")


@dataclass(frozen=True, slots=True)
class Ready:
    """An engine is built and warm.

    Attributes:
        description: which kernels it computes with, as it says itself.
        build_seconds: from settings to a model with weights and an optimizer.
        warm_seconds: of each step that is not measured, compiling included.
    """

    description: str
    build_seconds: float
    warm_seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """One step.

    Attributes:
        seconds: of the wall, from before it is queued until the device is done.
        phases: seconds of the device by phase.
        loss: mean over the step's trained tokens.
    """

    index: int
    seconds: float
    phases: Mapping[str, float]
    loss: float


@dataclass(frozen=True, slots=True)
class Closing:
    """What an engine says at its end.

    Attributes:
        peak_bytes: most memory in use during the measured steps; on a CPU of the whole process so far.
        reserved_bytes: most that the allocator took from the GPU; 0 on a CPU.
        forward_parts: seconds of one more forward pass by part of the model.
        profile: of one more step, a table of operators; empty unless asked for.
    """

    peak_bytes: int
    reserved_bytes: int
    forward_parts: Mapping[str, float]
    profile: str


@dataclass(frozen=True, slots=True)
class Failure:
    """An engine could not go on; the reason in one line."""

    reason: str


@dataclass(slots=True)
class Outcome:
    """What one engine did in one visit, as far as it came."""

    case: Case
    engine: Engine
    round: int
    ready: Ready | None = None
    steps: list[Measured] = field(default_factory=list)
    closing: Closing | None = None
    failure: str | None = None
