"""Losses of preference pairs: preference training, from the losses of tokens, and reward models, from their scores.

Documents of a micro-batch are pairs: chosen, rejected, chosen, rejected ... Legend: D documents, P pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatune.data.batches import SCORED
from megatune.data.rows import MARGIN
from megatune.engine.sequences import LocalBatch, MicroBatch, sequence_sums
from megatune.engine.step import ObjectiveOutput, StepTotals
from megatune.objectives.base import ComparedObjective, StartLosses, TrainingObjective, sums_where, tokens_of_documents
from megatune.objectives.pair_losses import (
    PAIR_LOSSES,
    WITHOUT_REFERENCE,
    PairLossOptions,
    Pairs,
    negative_log_likelihood,
    odds_ratio,
)

# Extras of a micro-batch: log-probabilities of the reference, fp32 [D]; weights of tokens, fp32 [b, s].
REFERENCE, TOKEN_WEIGHTS = "reference_log_probs", "answer_token_weights"
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")
LOG_PROBS = ("logps/chosen", "logps/rejected")


@dataclass(slots=True)
class Preference(ComparedObjective):
    """A weighted sum of losses of pairs, divided by the global number of pairs.

    Every context-parallel rank computes the whole loss, from the same sums. If BCO with weight w (LLaMA-Factory's
    pref_bco_weight) is combined with another loss, the weights are w / (1 + w) and 1 / (1 + w).

    BCO's δ is the mean reward of all answers of previous steps, so it does not depend on the order of micro-batches. It
    is 0 in the first step, as all rewards are.

    Attributes:
        losses: weights of the losses, by their names in `pair_losses`.
        likelihood: weight of the chosen answer's negative log-likelihood, a mean over its tokens.
        reward_sum, reward_pairs: for BCO, the sum over trained pairs of the mean reward of their answers, and the
            number of pairs.
    """

    losses: Mapping[str, float]
    options: PairLossOptions = field(default_factory=PairLossOptions)
    likelihood: float = 0.0
    reward_sum: float = 0.0
    reward_pairs: float = 0.0

    @property
    def has_reference(self) -> bool:
        """Whether any of the losses compares the policy with a reference."""
        return not set(self.losses) <= set(WITHOUT_REFERENCE)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Rewards and log-probabilities; if the loss has several terms, also each unweighted term."""
        return *REWARDS, *LOG_PROBS, *self._term_names

    @property
    def _term_names(self) -> tuple[str, ...]:
        names = [f"loss/{name}" for name in self.losses]
        names += ["odds_ratio_loss"] * ("orpo" in self.losses)
        names += ["nll_loss"] * ("orpo" in self.losses or bool(self.likelihood))
        return tuple(names) if len(names) > 1 else ()

    def normalizer(self, batch: MicroBatch) -> Tensor:
        return num_pairs(batch)

    @property
    def _has_running_reward(self) -> bool:
        return "bco_pair" in self.losses

    def after_step(self, totals: StepTotals) -> None:
        if self._has_running_reward and totals.normalizer:
            self.reward_sum += totals.normalizer * sum(totals.metrics[name] for name in REWARDS[:2]) / 2
            self.reward_pairs += totals.normalizer
            self._shift()

    def state_dict(self) -> dict[str, float]:
        sums = {"reward_sum": self.reward_sum, "reward_pairs": self.reward_pairs}
        return sums if self._has_running_reward else {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        if self._has_running_reward and state:
            self.reward_sum, self.reward_pairs = state["reward_sum"], state["reward_pairs"]
            self._shift()

    def _shift(self) -> None:
        self.options = replace(self.options, reward_shift=self.reward_sum / max(self.reward_pairs, 1))

    def __call__(self, output: Tensor, batch: LocalBatch) -> ObjectiveOutput:
        assert not self.has_reference or REFERENCE in batch.extras, "no log-probabilities of the reference"
        pairs, valid = pairs_of(output, batch)
        losses = {name: PAIR_LOSSES[name](pairs, self.options) for name in self.losses}
        likelihood = negative_log_likelihood(pairs, self.options)
        loss = torch.stack([weight * losses[name] for name, weight in self.losses.items()]).sum(0)
        if self.likelihood:
            loss = loss + self.likelihood * likelihood
        terms = {f"loss/{name}": found for name, found in losses.items()}
        terms |= {"nll_loss": likelihood, "odds_ratio_loss": odds_ratio(pairs, self.options)}
        values = {**self._rewards(pairs), "logps/chosen": pairs.chosen, "logps/rejected": pairs.rejected, **terms}
        metrics = sums_where(valid, {name: values[name] for name in self.metric_names})
        return ObjectiveOutput(torch.where(valid, loss, 0.0).sum(), metrics, replicated=True)

    def _rewards(self, pairs: Pairs) -> dict[str, Tensor]:
        """Return rewards as TRL logs them; for losses without a reference, log-probabilities or their means."""
        if self.has_reference:
            chosen, rejected = pairs.chosen_ratio, pairs.rejected_ratio
        elif "cpo" in self.losses:
            chosen, rejected = pairs.chosen, pairs.rejected
        else:
            chosen, rejected = pairs.chosen_mean, pairs.rejected_mean
        chosen, rejected = self.options.beta * chosen, self.options.beta * rejected
        return dict(zip(REWARDS, (chosen, rejected, (chosen > rejected).float(), chosen - rejected), strict=True))

    def describe(self) -> str:
        own = {"the chosen answer's own loss": self.likelihood} if self.likelihood else {}
        terms = {**self.losses, **own}
        names = [name if weight == 1 else f"{weight:.4g} × {name}" for name, weight in terms.items()]
        return f"{' + '.join(names)} of pairs, beta {self.options.beta:g}"

    @property
    def reward_scale(self) -> float:
        return self.options.beta

    def start_losses(self, totals: StepTotals, tolerances: Sequence[float], bound: float) -> StartLosses:
        found = StartLosses([], [])
        for name, weight in self.losses.items():
            if name in WITHOUT_REFERENCE:
                continue
            value = totals.metrics.get(f"loss/{name}", totals.loss / weight)
            expected = self._loss_of(name, 0.0, 0.0)
            ends = (self._loss_of(name, side * tolerances[0], -side * tolerances[1]) for side in (-1, 1))
            found.values.append(f"{value:.6f}")
            if abs(value - expected) > max(abs(end - expected) for end in ends):
                text = f"{name} is {value:.6f}, and {expected:.6f} where policy and reference are the same"
                found.wrong.append(text)
        return found

    def _loss_of(self, name: str, chosen: float, rejected: float) -> float:
        """Return the loss of a pair with these log-ratios, before the first step."""
        one = torch.ones(1, dtype=torch.float64)
        policy = chosen * one, rejected * one
        return float(PAIR_LOSSES[name](Pairs(*policy, 0 * one, 0 * one, one, one, policy[0]), self.options))


def pairs_of(token_losses: Tensor, batch: LocalBatch) -> tuple[Pairs, Tensor]:
    """Sum the tokens of every answer, over all context-parallel ranks.

    Sums are computed in fp64, since answers may have thousands of tokens, and the loss depends on differences of sums.

    Args:
        token_losses: fp32 [b, s / cp], -log p(label).

    Returns:
        The pairs, and whether both answers of each have a trained token, bool [P].
    """

    def sums(values: Tensor) -> Tensor:
        return in_pairs(sequence_sums(values.double(), batch.sequences).to(token_losses.dtype))

    weights = batch.extras.get(TOKEN_WEIGHTS)
    likelihood = sums(-token_losses)
    log_probs = likelihood if weights is None else sums(-token_losses * weights)
    tokens = sums(batch.labels >= 0)
    reference = batch.extras.get(REFERENCE)
    reference = torch.zeros_like(log_probs) if reference is None else in_pairs(reference)
    columns = torch.cat((log_probs, reference, tokens, likelihood[:, :1]), 1).unbind(1)
    return Pairs(*columns), (tokens > 0).all(1)


def in_pairs(values: Tensor) -> Tensor:
    """Return values of documents [D, ...] as [P, 2, ...], without the padding after the last pair."""
    return values[: len(values) // 2 * 2].unflatten(0, (-1, 2))


def num_pairs(batch: MicroBatch) -> Tensor:
    """Count the pairs of a whole micro-batch with a trained token in both answers: int64 [], on the host."""
    return (in_pairs(tokens_of_documents(batch.labels >= 0, batch)) > 0).all(1).sum()


# As in TRL's RewardTrainer; the others are named as in preference training.
_METRICS = ("accuracy", "margin", "mean_reward", *REWARDS[:2])


@dataclass(frozen=True, slots=True)
class Reward(TrainingObjective):
    """-log σ(r_c - r_r - margin) + c (r_c + r_r)², summed over pairs and divided by their global number.

    The score r of an answer is read at its token with SCORED; the margin of a pair is that of its chosen answer, by
    default 0. Every context-parallel rank computes the whole loss, from the same scores.

    Attributes:
        centering: c, which keeps the mean of a pair's scores near 0 (arXiv:2312.09244).
    """

    centering: float = 0.0

    @property
    def metric_names(self) -> tuple[str, ...]:
        return _METRICS

    def normalizer(self, batch: MicroBatch) -> Tensor:
        return num_pairs(batch)

    def __call__(self, output: Tensor, batch: LocalBatch) -> ObjectiveOutput:
        is_scored = batch.extras[SCORED]
        chosen, rejected = in_pairs(sequence_sums(torch.where(is_scored, output, 0.0), batch.sequences)).unbind(1)
        valid = (in_pairs(sequence_sums(is_scored.float(), batch.sequences)) > 0).all(1)
        difference = chosen - rejected
        margin = in_pairs(batch.extras[MARGIN])[:, 0] if MARGIN in batch.extras else 0.0
        loss = self.centering * (chosen + rejected).square() - logsigmoid(difference - margin)
        values = ((difference > 0).float(), difference, (chosen + rejected) / 2, chosen, rejected)
        metrics = sums_where(valid, dict(zip(_METRICS, values, strict=True)))
        return ObjectiveOutput(torch.where(valid, loss, 0.0).sum(), metrics, replicated=True)

    def describe(self) -> str:
        centered = f" + {self.centering:g} × their squared sum" if self.centering else ""
        return f"Bradley-Terry of the scores of pairs{centered}"
