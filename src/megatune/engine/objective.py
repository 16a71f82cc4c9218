"""What an objective is to the engine: token losses go in; a sum, its normalizer and metrics come out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from megatune.engine.sequences import LocalBatch, MicroBatch


@dataclass(frozen=True, slots=True)
class ObjectiveOutput:
    """What an objective computes of one micro-batch on one rank of the last pipeline stage.

    Attributes:
        loss: fp32 [], with gradient: a sum, which the step divides once by the global normalizer.
        metrics: name -> (sum, count), scalars without gradient; what is reported is Σ sums / Σ counts over all
            micro-batches and ranks.
        replicated: whether every context-parallel rank computes the same numbers, of whole documents (True), or each
            the part of its own tokens (False). Replicated numbers count once; gradients are right either way, as each
            rank passes them to its own tokens only.
    """

    loss: Tensor
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    replicated: bool = False


class Objective(Protocol):
    """A loss, from the losses of tokens."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """What `metrics` of every output may hold; ranks without the output layer need to know."""
        ...

    def normalizer(self, batch: MicroBatch) -> Tensor:
        """Return what a whole micro-batch adds to the number that the step's sum is divided by (trained tokens,
        documents, pairs): int64 [], on the host."""
        ...

    def __call__(self, token_losses: Tensor, batch: LocalBatch) -> ObjectiveOutput:
        """Compute the loss.

        Args:
            token_losses: fp32 [b, s / cp], -log p(label), 0 where a token is not trained.
            batch: what this rank holds of the micro-batch; `engine.sequences.document_sums` adds up documents.
        """
        ...
