"""The critic's loss, of values of tokens: the scores of a reward model (stage rm, num_labels 1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatune.engine.sequences import LocalBatch, MicroBatch
from megatune.engine.step import ObjectiveOutput
from megatune.objectives.policy import aggregation
from megatune.objectives.policy.objective import MASK

# Extras of tokens, `data.batches.TokenValues` fp32 [b, s], 0 at all other tokens, each where its token is predicted:
# the value there is that of the state before the token.
RETURNS, VALUES = "returns", "values"


@dataclass(frozen=True, slots=True)
class ValueObjective:
    """Half the squared error of values, a mean over responses of means over their tokens.

    Attributes:
        clip: how far values may move from those of the rollout before the error stops to fall (value_clip).
    """

    clip: float | None = None

    metric_names = ("critic/loss", "critic/value", "critic/vpred", "critic/clipfrac", "critic/error")
    token_extras = (MASK, RETURNS, VALUES)

    def normalizer(self, batch: MicroBatch) -> Tensor:
        """Count responses with a token that counts: int64 []."""
        mask: Tensor = batch.extras[MASK].on_rank(None, torch.device("cpu"))
        return aggregation.num_responses(mask, batch)

    def __call__(self, scores: Tensor, batch: LocalBatch) -> ObjectiveOutput:
        """Compute the loss of scores of tokens, fp32 [b, s / cp]."""
        mask, returns, old = (batch.extras[name] for name in self.token_extras)
        # What padding is worth may not be finite.
        values = torch.where(mask > 0, scores, 0.0)
        error = losses = (values - returns).square()
        if self.clip is not None:
            near = torch.minimum(torch.maximum(values, old - self.clip), old + self.clip)
            losses = torch.maximum(error, (near - returns).square())
        shares = aggregation.shares(mask, batch.sequences)
        loss, count = 0.5 * (losses * shares).sum(), shares.sum()
        means = {"value": old, "vpred": values, "clipfrac": losses > error, "error": error}
        metrics = {f"critic/{name}": ((value * shares).sum(), count) for name, value in means.items()}
        return ObjectiveOutput(loss, {"critic/loss": (loss, count), **metrics})
