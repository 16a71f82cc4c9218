"""Preference training: losses of pairs of answers, from the losses of their tokens.

Documents of a micro-batch come in pairs, a chosen answer and then a rejected one. Legend: D documents, P pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatune.engine.sequences import LocalBatch, MicroBatch, document_sums
from megatune.engine.step import ObjectiveOutput
from megatune.objectives.pair_losses import (
    SEPARABLE,
    WITHOUT_REFERENCE,
    Pairs,
    Shape,
    negative_log_likelihood,
)

# Extra values of a micro-batch: log-probabilities of the reference, fp32 [D]; weights of tokens, fp32 [b, s].
REFERENCE, TOKEN_WEIGHTS = "reference_log_probs", "answer_token_weights"
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")
LOG_PROBS = ("logps/chosen", "logps/rejected")


@dataclass(frozen=True, slots=True)
class Preference:
    """A weighted sum of losses of pairs, divided once by the global number of pairs.

    Every context-parallel rank computes the whole loss, from the same sums.

    Attributes:
        losses: weights of the losses, by their names in `pair_losses`.
        likelihood: weight of the chosen answer's negative log-likelihood, a mean over its tokens.
    """

    losses: Mapping[str, float]
    shape: Shape = field(default_factory=Shape)
    likelihood: float = 0.0

    @property
    def has_reference(self) -> bool:
        """Whether any of the losses compares the policy with a reference."""
        return not set(self.losses) <= set(WITHOUT_REFERENCE)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Rewards and log-probabilities; of several terms, each term by itself."""
        return *REWARDS, *LOG_PROBS, *self._terms

    @property
    def _terms(self) -> tuple[str, ...]:
        names = [f"loss/{name}" for name in self.losses] + ["nll_loss"] * bool(self.likelihood)
        return tuple(names) if len(names) > 1 else ()

    def normalizer(self, batch: MicroBatch) -> Tensor:
        """Count the pairs of which both answers have a trained token."""
        return (answer_tokens(batch)[: len(batch.lengths) // 2 * 2].view(-1, 2) > 0).all(1).sum()

    def __call__(self, token_losses: Tensor, batch: LocalBatch) -> ObjectiveOutput:
        pairs, valid = pairs_of(token_losses, batch)
        terms = {f"loss/{name}": weight * SEPARABLE[name](pairs, self.shape) for name, weight in self.losses.items()}
        if self.likelihood:
            terms["nll_loss"] = self.likelihood * negative_log_likelihood(pairs, self.shape)
        # `where`, not a product: what padding is worth may not be finite.
        loss = torch.where(valid, torch.stack(list(terms.values())).sum(0), 0.0).sum()
        values = {**self._rewards(pairs), "logps/chosen": pairs.chosen, "logps/rejected": pairs.rejected}
        values |= {name: terms[name] for name in self._terms}
        count = valid.sum()
        metrics = {name: (torch.where(valid, value.detach(), 0.0).sum(), count) for name, value in values.items()}
        return ObjectiveOutput(loss, metrics, replicated=True)

    def _rewards(self, pairs: Pairs) -> dict[str, Tensor]:
        """Return rewards as TRL logs them: of losses without a reference of log-probabilities, or their means."""
        if self.has_reference:
            chosen, rejected = pairs.chosen_ratio, pairs.rejected_ratio
        elif "cpo" in self.losses:
            chosen, rejected = pairs.chosen, pairs.rejected
        else:
            chosen, rejected = pairs.chosen_mean, pairs.rejected_mean
        chosen, rejected = self.shape.beta * chosen, self.shape.beta * rejected
        return dict(zip(REWARDS, (chosen, rejected, (chosen > rejected).float(), chosen - rejected), strict=True))


def pairs_of(token_losses: Tensor, batch: LocalBatch) -> tuple[Pairs, Tensor]:
    """Add up the tokens of every answer, over all context-parallel ranks.

    Args:
        token_losses: fp32 [b, s / cp], -log p(label).

    Returns:
        The pairs, and whether both answers of each have a trained token, bool [P].
    """
    weights = batch.extras.get(TOKEN_WEIGHTS)
    weighted = token_losses if weights is None else token_losses * weights
    log_probs = _in_pairs(-document_sums(weighted, batch.sequences))
    tokens = _in_pairs(document_sums((batch.labels >= 0).to(token_losses.dtype), batch.sequences))
    reference = batch.extras.get(REFERENCE)
    reference = torch.zeros_like(log_probs) if reference is None else _in_pairs(reference)
    pairs = Pairs(*log_probs.unbind(1), *reference.unbind(1), *tokens.unbind(1))
    return pairs, (tokens > 0).all(1)


def _in_pairs(values: Tensor) -> Tensor:
    """Return values of documents [D] as [P, 2], without padding behind the last pair."""
    return values[: len(values) // 2 * 2].view(-1, 2)


def answer_tokens(batch: MicroBatch) -> Tensor:
    """Count the trained tokens of every document of a whole micro-batch: int64 [D], on the host."""
    trained = (batch.labels >= 0).long()
    if batch.cu_seqlens is None:
        return trained.sum(1)
    sums = torch.cat((trained.new_zeros(1), trained[0].cumsum(0)))
    return sums[batch.cu_seqlens.long()].diff()
