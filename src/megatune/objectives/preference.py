"""Preference training: losses of pairs of answers, from the losses of their tokens.

Documents of a micro-batch come in pairs, a chosen answer and then a rejected one. Legend: D documents, P pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatune.engine.sequences import LocalBatch, MicroBatch, document_sums
from megatune.engine.step import ObjectiveOutput, StepTotals
from megatune.objectives.joint_losses import JOINT, expanded
from megatune.objectives.pair_losses import (
    SEPARABLE,
    WITHOUT_REFERENCE,
    Pairs,
    Shape,
    negative_log_likelihood,
    odds_ratio,
)

# Extra values of a micro-batch: log-probabilities of the reference, fp32 [D]; weights of tokens, fp32 [b, s]; what
# `joint_losses.expansion` found, for each document, fp32 [D, J, 2].
REFERENCE, TOKEN_WEIGHTS, EXPANSION = "reference_log_probs", "answer_token_weights", "joint_losses"
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")
LOG_PROBS = ("logps/chosen", "logps/rejected")


@dataclass(frozen=True, slots=True)
class Preference:
    """A weighted sum of losses of pairs, divided once by the global number of pairs.

    Every context-parallel rank computes the whole loss, from the same sums. Of BCO and another loss with weight w
    (LLaMA-Factory's pref_bco_weight) weights are w / (1 + w) and 1 / (1 + w).

    Attributes:
        losses: weights of the losses, by their names in `pair_losses` and `joint_losses`.
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
    def joint(self) -> tuple[str, ...]:
        """Losses for which micro-batches need EXPANSION."""
        return tuple(name for name in self.losses if name in JOINT)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Rewards and log-probabilities; where the loss has several terms, each by itself, before its weight."""
        return *REWARDS, *LOG_PROBS, *self._term_names

    @property
    def _term_names(self) -> tuple[str, ...]:
        names = [f"loss/{name}" for name in self.losses]
        names += ["odds_ratio_loss"] * ("orpo" in self.losses)
        names += ["nll_loss"] * ("orpo" in self.losses or bool(self.likelihood))
        return tuple(names) if len(names) > 1 else ()

    def normalizer(self, batch: MicroBatch) -> Tensor:
        """Count the pairs of which both answers have a trained token."""
        return (in_pairs(answer_tokens(batch)) > 0).all(1).sum()

    def __call__(self, token_losses: Tensor, batch: LocalBatch) -> ObjectiveOutput:
        assert not self.has_reference or REFERENCE in batch.extras, "no log-probabilities of the reference"
        pairs, valid = pairs_of(token_losses, batch)
        losses = self._losses(pairs, batch)
        likelihood = negative_log_likelihood(pairs, self.shape)
        loss = torch.stack([weight * losses[name] for name, weight in self.losses.items()]).sum(0)
        if self.likelihood:
            loss = loss + self.likelihood * likelihood
        terms = {f"loss/{name}": found for name, found in losses.items()}
        terms |= {"nll_loss": likelihood, "odds_ratio_loss": odds_ratio(pairs, self.shape)}
        values = {**self._rewards(pairs), "logps/chosen": pairs.chosen, "logps/rejected": pairs.rejected, **terms}
        count = valid.sum()
        # `where`, not a product: what padding is worth may not be finite.
        metrics = {name: (torch.where(valid, values[name].detach(), 0.0).sum(), count) for name in self.metric_names}
        return ObjectiveOutput(torch.where(valid, loss, 0.0).sum(), metrics, replicated=True)

    def _losses(self, pairs: Pairs, batch: LocalBatch) -> dict[str, Tensor]:
        """Return each loss of each pair, [P], before its weight."""
        found = {name: SEPARABLE[name](pairs, self.shape) for name in self.losses if name in SEPARABLE}
        if self.joint:
            columns = expanded(pairs, in_pairs(batch.extras[EXPANSION])).unbind(1)
            found |= dict(zip(self.joint, columns, strict=True))
        return found

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


@dataclass(slots=True)
class RunningReward:
    """The mean reward of all answers trained on so far, δ of BCO.

    It is of whole steps before the one that uses it, so that no micro-batch's place matters, and 0 before the first,
    where all rewards are. Equal on all ranks; a resume needs both numbers.

    Attributes:
        total: sum over pairs of the mean reward of their answers.
        pairs: how many.
    """

    total: float = 0.0
    pairs: float = 0.0

    @property
    def mean(self) -> float:
        """δ."""
        return self.total / max(self.pairs, 1)

    def add(self, totals: StepTotals) -> None:
        """Take in a step of `Preference`."""
        if totals.normalizer:
            self.total += totals.normalizer * sum(totals.metrics[name] for name in REWARDS[:2]) / 2
            self.pairs += totals.normalizer

    def of_next_step(self, objective: Preference) -> Preference:
        """Return the objective with δ."""
        return replace(objective, shape=replace(objective.shape, reward_shift=self.mean))


def pairs_of(token_losses: Tensor, batch: LocalBatch) -> tuple[Pairs, Tensor]:
    """Add up the tokens of every answer, over all context-parallel ranks.

    Sums are made in fp64, as answers may have thousands of tokens, and differences of sums are what counts.

    Args:
        token_losses: fp32 [b, s / cp], -log p(label).

    Returns:
        The pairs, and whether both answers of each have a trained token, bool [P].
    """

    def sums(values: Tensor) -> Tensor:
        return in_pairs(document_sums(values.double(), batch.sequences).to(token_losses.dtype))

    weights = batch.extras.get(TOKEN_WEIGHTS)
    likelihood = sums(-token_losses)
    log_probs = likelihood if weights is None else sums(-token_losses * weights)
    tokens = sums(batch.labels >= 0)
    reference = batch.extras.get(REFERENCE)
    reference = torch.zeros_like(log_probs) if reference is None else in_pairs(reference)
    columns = torch.cat((log_probs, reference, tokens, likelihood[:, :1]), 1).unbind(1)
    return Pairs(*columns), (tokens > 0).all(1)


def in_pairs(values: Tensor) -> Tensor:
    """Return values of documents [D, ...] as [P, 2, ...], without padding behind the last pair."""
    return values[: len(values) // 2 * 2].unflatten(0, (-1, 2))


def answer_tokens(batch: MicroBatch) -> Tensor:
    """Count the trained tokens of every document of a whole micro-batch: int64 [D], on the host."""
    trained = (batch.labels >= 0).long()
    if batch.cu_seqlens is None:
        return trained.sum(1)
    sums = torch.cat((trained.new_zeros(1), trained[0].cumsum(0)))
    return sums[batch.cu_seqlens.long()].diff()
