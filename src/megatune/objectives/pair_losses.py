"""Losses of preference pairs as pure functions of log-probabilities, with their papers. Each returns one value per
pair, independent of the other pairs.

Legend: P pairs; ρ the log-ratio of an answer, log π(y) - log π_ref(y), of policy and reference; Δ = ρ_c - ρ_r, of the
chosen and of the rejected answer; βρ is the answer's reward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True, slots=True)
class Pairs:
    """Log-probabilities of answers, summed over their tokens; all [P], fp32 or wider.

    Attributes:
        chosen, rejected: of the policy.
        reference_chosen, reference_rejected: of the reference; zero for losses without one.
        chosen_tokens, rejected_tokens: numbers of tokens of the answers.
        chosen_likelihood: `chosen` without the token weights of LD-DPO.
    """

    chosen: Tensor
    rejected: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    chosen_likelihood: Tensor

    @property
    def chosen_ratio(self) -> Tensor:
        """ρ_c."""
        return self.chosen - self.reference_chosen

    @property
    def rejected_ratio(self) -> Tensor:
        """ρ_r."""
        return self.rejected - self.reference_rejected

    @property
    def margin(self) -> Tensor:
        """Δ."""
        return self.chosen_ratio - self.rejected_ratio

    @property
    def chosen_mean(self) -> Tensor:
        """Mean log-probability per token of the chosen answer."""
        return self.chosen / self.chosen_tokens.clamp(min=1)

    @property
    def rejected_mean(self) -> Tensor:
        """Mean log-probability per token of the rejected answer."""
        return self.rejected / self.rejected_tokens.clamp(min=1)


@dataclass(frozen=True, slots=True)
class PairLossOptions:
    """Hyperparameters of the losses.

    Attributes:
        beta: β, the strength of the KL constraint to the reference.
        smoothing: ε, the assumed share of pairs with flipped labels.
        gamma: γ, SimPO's margin.
        tau: τ, DiscoPOP's temperature.
        reward_shift: δ, BCO's running mean of rewards.
    """

    beta: float = 0.1
    smoothing: float = 0.0
    gamma: float = 0.5
    tau: float = 0.05
    reward_shift: float = 0.0


def sigmoid(pairs: Pairs, options: PairLossOptions) -> Tensor:
    """DPO (arXiv:2305.18290), with smoothed labels if ε > 0 (cDPO)."""
    return smoothed(options.beta * pairs.margin, options)


def smoothed(scaled: Tensor, options: PairLossOptions) -> Tensor:
    """Return -log σ, with labels that are flipped with probability ε."""
    return -(1 - options.smoothing) * logsigmoid(scaled) - options.smoothing * logsigmoid(-scaled)


def robust(pairs: Pairs, options: PairLossOptions) -> Tensor:
    """DPO, unbiased under labels that are flipped with probability ε (arXiv:2403.00409)."""
    scaled, flipped = options.beta * pairs.margin, options.smoothing
    return (-(1 - flipped) * logsigmoid(scaled) + flipped * logsigmoid(-scaled)) / (1 - 2 * flipped)


def hinge(pairs: Pairs, options: PairLossOptions) -> Tensor:
    """SLiC-HF (arXiv:2305.10425), RSO (arXiv:2309.06657)."""
    return torch.relu(1 - options.beta * pairs.margin)


def ipo(pairs: Pairs, options: PairLossOptions) -> Tensor:
    """IPO (arXiv:2310.12036), with means over tokens, as its authors intended."""
    chosen = pairs.chosen_ratio / pairs.chosen_tokens.clamp(min=1)
    rejected = pairs.rejected_ratio / pairs.rejected_tokens.clamp(min=1)
    return (chosen - rejected - 1 / (2 * options.beta)).square()


def apo_zero(pairs: Pairs, options: PairLossOptions) -> Tensor:
    """APO-zero (arXiv:2408.06266, equation 7): for chosen answers that are better than the model's own."""
    return 1 - torch.sigmoid(options.beta * pairs.chosen_ratio) + torch.sigmoid(options.beta * pairs.rejected_ratio)


def apo_down(pairs: Pairs, options: PairLossOptions) -> Tensor:
    """APO-down (arXiv:2408.06266, equation 8): for chosen answers that are worse than the model's own."""
    return torch.sigmoid(options.beta * pairs.chosen_ratio) + 1 - torch.sigmoid(options.beta * pairs.margin)


def sppo_hard(pairs: Pairs, options: PairLossOptions) -> Tensor:
    """SPPO with certain preferences (arXiv:2405.00675, equation 4.7)."""
    half = 0.5 / options.beta
    return (pairs.chosen_ratio - half).square() + (pairs.rejected_ratio + half).square()


def nca_pair(pairs: Pairs, options: PairLossOptions) -> Tensor:
    """NCA (arXiv:2402.05369)."""
    chosen, rejected = options.beta * pairs.chosen_ratio, options.beta * pairs.rejected_ratio
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def exo_pair(pairs: Pairs, options: PairLossOptions) -> Tensor:
    """EXO (arXiv:2402.00856, equation 16): the reverse KL divergence to labels smoothed by ε > 0."""
    scaled = options.beta * pairs.margin
    chosen, rejected = logsigmoid(scaled), logsigmoid(-scaled)
    labels = math.log1p(-options.smoothing), math.log(options.smoothing)
    return chosen.exp() * (chosen - labels[0]) + rejected.exp() * (rejected - labels[1])


def discopop(pairs: Pairs, options: PairLossOptions) -> Tensor:
    """DiscoPOP (arXiv:2406.08414, equation 5)."""
    scaled = options.beta * pairs.margin
    share = torch.sigmoid(scaled / options.tau)
    # exp(-x) · σ(x / τ), in log space: the one factor overflows while the other vanishes.
    exponential = torch.exp(logsigmoid(scaled / options.tau) - scaled)
    return -logsigmoid(scaled) * (1 - share) + exponential


def bco_pair(pairs: Pairs, options: PairLossOptions) -> Tensor:
    """BCO (arXiv:2404.04656): a binary classifier of answers, with rewards shifted by δ."""
    chosen = options.beta * pairs.chosen_ratio - options.reward_shift
    rejected = options.beta * pairs.rejected_ratio - options.reward_shift
    return -logsigmoid(chosen) - logsigmoid(-rejected)


def simpo(pairs: Pairs, options: PairLossOptions) -> Tensor:
    """SimPO (arXiv:2405.14734), with smoothed labels if ε > 0; it has no reference."""
    return smoothed(options.beta * (pairs.chosen_mean - pairs.rejected_mean) - options.gamma, options)


def cpo(pairs: Pairs, options: PairLossOptions) -> Tensor:
    """The preference term of CPO (arXiv:2401.08417), without a reference; pref_ftx adds the other term."""
    return smoothed(options.beta * (pairs.chosen - pairs.rejected), options)


def orpo(pairs: Pairs, options: PairLossOptions) -> Tensor:
    """ORPO (arXiv:2403.07691, equation 6), without a reference."""
    return negative_log_likelihood(pairs, options) + options.beta * odds_ratio(pairs, options)


def odds_ratio(pairs: Pairs, options: PairLossOptions) -> Tensor:
    """The second term of ORPO (equation 7), without β."""
    return -logsigmoid(log_odds(pairs.chosen_mean) - log_odds(pairs.rejected_mean))


def log_odds(mean: Tensor) -> Tensor:
    """Return log p - log(1 - p) of a mean log-probability; finite even if p rounds to 1."""
    smallest = torch.finfo(mean.dtype).eps
    return mean - torch.log(-torch.expm1(mean.clamp(max=-smallest)))


def negative_log_likelihood(pairs: Pairs, options: PairLossOptions) -> Tensor:
    """Mean negative log-likelihood of the chosen answer's tokens: the term of pref_ftx, and the first term of ORPO."""
    return -pairs.chosen_likelihood / pairs.chosen_tokens.clamp(min=1)


PairLoss = Callable[[Pairs, PairLossOptions], Tensor]
PAIR_LOSSES: dict[str, PairLoss] = {
    "sigmoid": sigmoid, "robust": robust, "hinge": hinge, "ipo": ipo, "apo_zero": apo_zero, "apo_down": apo_down,
    "sppo_hard": sppo_hard, "nca_pair": nca_pair, "exo_pair": exo_pair, "discopop": discopop, "bco_pair": bco_pair,
    "simpo": simpo, "cpo": cpo, "orpo": orpo,
}  # fmt: skip
WITHOUT_REFERENCE = ("simpo", "cpo", "orpo")
