"""The critic's loss, of values of tokens: the scores of a reward model (stage rm, num_labels 1)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatune.engine.sequences import LocalBatch, MicroBatch
from megatune.engine.step import ObjectiveOutput

# Extras of tokens, `data.batches.TokenValues` fp32 [b, s], 0 at all other tokens, each where its token is predicted:
# the value there is that of the state before the token.
MASK, RETURNS, VALUES = "mask", "returns", "values"


@dataclass(frozen=True, slots=True)
class ValueObjective:
    """Half the squared error of values, a mean over samples of means over their tokens.

    Attributes:
        clip: how far values may move from those of the rollout before the error stops to fall (value_clip).
    """

    clip: float | None = None

    metric_names = ("critic/loss", "critic/value", "critic/vpred", "critic/clipfrac", "critic/error")
    token_extras = (MASK, RETURNS, VALUES)

    def normalizer(self, batch: MicroBatch) -> Tensor:
        """Count samples with a mask: int64 []."""
        ...

    def __call__(self, scores: Tensor, batch: LocalBatch) -> ObjectiveOutput:
        """Compute the loss of scores of tokens, fp32 [b, s / cp]."""
        ...
