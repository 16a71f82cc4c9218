"""Losses of single tokens that policy gradients are made of, by ROLL's names.

Legend: A advantages, constants; r the ratio π / π_old with gradient; all fp32 and of one shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatune.config.rl.algorithm import AlgorithmSettings
from megatune.config.rl.role import PolicyVariant

# ROLL's ActorPGWorker can be given no others by a file.
_CISPO_RANGE = (0.9, 1.1)
_TRUNCATION = (0.0, 1.0)
_KIMI_TAU = 0.1
_KL_LIMIT = 10.0


@dataclass(frozen=True, slots=True)
class Terms:
    """What token losses are made of.

    Attributes:
        log_probs: of the policy, with gradient.
        log_ratio: log r, with gradient; 0 where a token does not count.
        advantages: A.
        is_positive: of the response's score, for topr; None elsewhere.
    """

    log_probs: Tensor
    log_ratio: Tensor
    advantages: Tensor
    is_positive: Tensor | None = None


def clipped(terms: Terms, settings: AlgorithmSettings) -> Tensor:
    """PPO (arXiv:1707.06347): -min(r A, clip(r) A), with a bound of its own on either side (DAPO, arXiv:2503.14476).
    dual_clip_loss keeps it below dual_clip · |A| where A < 0 (arXiv:1912.09729)."""
    ratio, advantages = terms.log_ratio.exp(), terms.advantages
    bounded = ratio.clamp(1 - settings.pg_clip_low, 1 + settings.pg_clip_high)
    loss = -torch.minimum(ratio * advantages, bounded * advantages)
    if settings.dual_clip_loss:
        loss = torch.where(advantages < 0, torch.minimum(loss, -settings.dual_clip * advantages), loss)
    return loss


def truncated(terms: Terms, low: float, high: float) -> Tensor:
    """-clip(r) A log π, without gradient through r."""
    weights = terms.log_ratio.detach().exp().clamp(low, high)
    return -weights * terms.advantages * terms.log_probs


def topr(terms: Terms, positive_weight: float, negative_weight: float) -> Tensor:
    """TOPR (arXiv:2503.14286, equation 8): responses with a score above 0 as in supervised training, others with
    truncated ratios."""
    assert terms.is_positive is not None
    plain = -terms.advantages * terms.log_probs
    return torch.where(terms.is_positive, positive_weight * plain, negative_weight * truncated(terms, *_TRUNCATION))


def token_losses(
    variant: PolicyVariant | None,
    terms: Terms,
    settings: AlgorithmSettings,
    positive_weight: float,
    negative_weight: float,
) -> Tensor:
    """Return the loss of each token by its name; None is `clipped`, as "ppo" is."""
    match variant:
        case "vanilla":
            return -terms.advantages * terms.log_probs
        case "tis":
            return truncated(terms, *_TRUNCATION)
        case "cispo":  # MiniMax-M1 (arXiv:2506.13585)
            return truncated(terms, *_CISPO_RANGE)
        case "topr":
            return topr(terms, positive_weight, negative_weight)
        case "kimi15":  # Kimi k1.5 (arXiv:2501.12599, equation 3)
            return -terms.advantages * terms.log_probs + _KIMI_TAU / 2 * terms.log_ratio.square()
    return clipped(terms, settings)


def k3(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Estimate KL(π, π_ref), never below 0, cut off at 10 as in ROLL, where its gradient ends, too.

    The exponent is bounded first: beyond 88 it overflows, and the gradient of the cut-off times infinity is NaN."""
    difference = reference - log_probs
    bounded = difference.clamp(max=_KL_LIMIT)  # e^10 - 11 is far above the limit
    return (torch.expm1(bounded) - difference).clamp(max=_KL_LIMIT)
