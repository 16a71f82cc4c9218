"""Losses of preference pairs, as pure functions of log-probabilities; each names its paper.

A loss here is a sum over pairs: what one adds does not depend on the others.

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
        chosen_likelihood: `chosen` where every token weighs the same, as it need not there (LD-DPO).
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
        """Log-probability of a token of the chosen answer, on average."""
        return self.chosen / self.chosen_tokens.clamp(min=1)

    @property
    def rejected_mean(self) -> Tensor:
        """Log-probability of a token of the rejected answer, on average."""
        return self.rejected / self.rejected_tokens.clamp(min=1)


@dataclass(frozen=True, slots=True)
class Shape:
    """Numbers that shape losses.

    Attributes:
        beta: β, how far the policy may go from the reference.
        smoothing: ε, the share of pairs whose labels are taken to be wrong.
        gamma: γ, SimPO's margin.
        tau: τ, DiscoPOP's temperature.
        reward_shift: δ, BCO's running mean of rewards.
    """

    beta: float = 0.1
    smoothing: float = 0.0
    gamma: float = 0.5
    tau: float = 0.05
    reward_shift: float = 0.0


def sigmoid(pairs: Pairs, shape: Shape) -> Tensor:
    """DPO (arXiv:2305.18290), with smoothed labels where ε > 0 (cDPO)."""
    return smoothed(shape.beta * pairs.margin, shape)


def smoothed(scaled: Tensor, shape: Shape) -> Tensor:
    """Return -log σ, with labels that are wrong with probability ε."""
    return -(1 - shape.smoothing) * logsigmoid(scaled) - shape.smoothing * logsigmoid(-scaled)


def robust(pairs: Pairs, shape: Shape) -> Tensor:
    """DPO, unbiased under labels that are flipped with probability ε (arXiv:2403.00409)."""
    scaled, flipped = shape.beta * pairs.margin, shape.smoothing
    return (-(1 - flipped) * logsigmoid(scaled) + flipped * logsigmoid(-scaled)) / (1 - 2 * flipped)


def hinge(pairs: Pairs, shape: Shape) -> Tensor:
    """SLiC-HF (arXiv:2305.10425), RSO (arXiv:2309.06657)."""
    return torch.relu(1 - shape.beta * pairs.margin)


def ipo(pairs: Pairs, shape: Shape) -> Tensor:
    """IPO (arXiv:2310.12036), of means over tokens, as its authors mean it."""
    chosen = pairs.chosen_ratio / pairs.chosen_tokens.clamp(min=1)
    rejected = pairs.rejected_ratio / pairs.rejected_tokens.clamp(min=1)
    return (chosen - rejected - 1 / (2 * shape.beta)).square()


def apo_zero(pairs: Pairs, shape: Shape) -> Tensor:
    """APO-zero (arXiv:2408.06266, equation 7): chosen answers are better than the model's own."""
    return 1 - torch.sigmoid(shape.beta * pairs.chosen_ratio) + torch.sigmoid(shape.beta * pairs.rejected_ratio)


def apo_down(pairs: Pairs, shape: Shape) -> Tensor:
    """APO-down (arXiv:2408.06266, equation 8): chosen answers are worse than the model's own."""
    return torch.sigmoid(shape.beta * pairs.chosen_ratio) + 1 - torch.sigmoid(shape.beta * pairs.margin)


def sppo_hard(pairs: Pairs, shape: Shape) -> Tensor:
    """SPPO with certain preferences (arXiv:2405.00675, equation 4.7)."""
    half = 0.5 / shape.beta
    return (pairs.chosen_ratio - half).square() + (pairs.rejected_ratio + half).square()


def nca_pair(pairs: Pairs, shape: Shape) -> Tensor:
    """NCA (arXiv:2402.05369)."""
    chosen, rejected = shape.beta * pairs.chosen_ratio, shape.beta * pairs.rejected_ratio
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def exo_pair(pairs: Pairs, shape: Shape) -> Tensor:
    """EXO (arXiv:2402.00856, equation 16): the reverse KL divergence to labels smoothed by ε > 0."""
    scaled = shape.beta * pairs.margin
    chosen, rejected = logsigmoid(scaled), logsigmoid(-scaled)
    labels = math.log1p(-shape.smoothing), math.log(shape.smoothing)
    return chosen.exp() * (chosen - labels[0]) + rejected.exp() * (rejected - labels[1])


def discopop(pairs: Pairs, shape: Shape) -> Tensor:
    """DiscoPOP (arXiv:2406.08414, equation 5)."""
    scaled = shape.beta * pairs.margin
    share = torch.sigmoid(scaled / shape.tau)
    # exp(-x) · σ(x / τ): the one overflows where the other vanishes.
    exponential = torch.exp(logsigmoid(scaled / shape.tau) - scaled)
    return -logsigmoid(scaled) * (1 - share) + exponential


def bco_pair(pairs: Pairs, shape: Shape) -> Tensor:
    """BCO (arXiv:2404.04656): answers are classified by whether their rewards are above δ."""
    chosen = shape.beta * pairs.chosen_ratio - shape.reward_shift
    rejected = shape.beta * pairs.rejected_ratio - shape.reward_shift
    return -logsigmoid(chosen) - logsigmoid(-rejected)


def simpo(pairs: Pairs, shape: Shape) -> Tensor:
    """SimPO (arXiv:2405.14734), with smoothed labels where ε > 0; it has no reference."""
    return smoothed(shape.beta * (pairs.chosen_mean - pairs.rejected_mean) - shape.gamma, shape)


def cpo(pairs: Pairs, shape: Shape) -> Tensor:
    """CPO's preference term (arXiv:2401.08417); it has no reference, and pref_ftx adds its other term."""
    return smoothed(shape.beta * (pairs.chosen - pairs.rejected), shape)


def orpo(pairs: Pairs, shape: Shape) -> Tensor:
    """ORPO (arXiv:2403.07691, equation 6); it has no reference. Its first term is of the answer alone."""
    return negative_log_likelihood(pairs, shape) + shape.beta * odds_ratio(pairs, shape)


def odds_ratio(pairs: Pairs, shape: Shape) -> Tensor:
    """ORPO's second term (equation 7), before β."""
    return -logsigmoid(log_odds(pairs.chosen_mean) - log_odds(pairs.rejected_mean))


def log_odds(mean: Tensor) -> Tensor:
    """Return log p - log(1 - p) of a mean log-probability; finite also where p is 1 to the last digit."""
    smallest = torch.finfo(mean.dtype).eps
    return mean - torch.log(-torch.expm1(mean.clamp(max=-smallest)))


def negative_log_likelihood(pairs: Pairs, shape: Shape) -> Tensor:
    """Mean over the chosen answer's tokens: what pref_ftx weighs, and ORPO's first term."""
    return -pairs.chosen_likelihood / pairs.chosen_tokens.clamp(min=1)


PairLoss = Callable[[Pairs, Shape], Tensor]
# Sums over pairs, by name.
SEPARABLE: dict[str, PairLoss] = {
    "sigmoid": sigmoid, "robust": robust, "hinge": hinge, "ipo": ipo, "apo_zero": apo_zero, "apo_down": apo_down,
    "sppo_hard": sppo_hard, "nca_pair": nca_pair, "exo_pair": exo_pair, "discopop": discopop, "bco_pair": bco_pair,
    "simpo": simpo, "cpo": cpo, "orpo": orpo,
}  # fmt: skip
# Those that compare answers without a reference.
WITHOUT_REFERENCE = ("simpo", "cpo", "orpo")
