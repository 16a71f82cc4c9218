"""Losses of single tokens that policy gradients are made of, by ROLL's names.

Legend: A advantages, constants; r the ratio π / π_old with gradient; all fp32 and of one shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatune.config.named import named
from megatune.config.rl.algorithm import AlgorithmSettings
from megatune.config.rl.role import PolicyVariant
from megatune.errors import ExitCode, Finding, MegatuneError

# What ROLL's ActorPGWorker has.
_CISPO_RANGE = (0.9, 1.1)
_TRUNCATION = (0.0, 1.0)
KL = Literal["k1", "k2", "k3", "abs"]
Range = tuple[float | None, float | None]
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


def topr(terms: Terms, positive_weight: float, negative_weight: float, low: float, high: float) -> Tensor:
    """TOPR (arXiv:2503.14286, equation 8): responses with a score above 0 as in supervised training, others with
    truncated ratios."""
    assert terms.is_positive is not None
    plain = -terms.advantages * terms.log_probs
    return torch.where(terms.is_positive, positive_weight * plain, negative_weight * truncated(terms, low, high))


def token_losses(
    variant: PolicyVariant | None,
    terms: Terms,
    settings: AlgorithmSettings,
    positive_weight: float,
    negative_weight: float,
    ratio: Range = (None, None),
) -> Tensor:
    """Return the loss of each token by its name; None is that of loss_function, else `clipped`, as "ppo" is.

    Args:
        ratio: the bounds of r in "tis", "topr" and "cispo"; None is ROLL's.
    """
    usual = _CISPO_RANGE if variant == "cispo" else _TRUNCATION
    low, high = (theirs if own is None else own for own, theirs in zip(ratio, usual, strict=True))
    match variant:
        case "vanilla":
            return -terms.advantages * terms.log_probs
        case "tis" | "cispo":  # cispo: MiniMax-M1 (arXiv:2506.13585)
            return truncated(terms, low, high)
        case "topr":
            return topr(terms, positive_weight, negative_weight, low, high)
        case "kimi15":  # Kimi k1.5 (arXiv:2501.12599, equation 3)
            return -terms.advantages * terms.log_probs + _KIMI_TAU / 2 * terms.log_ratio.square()
    return clipped(terms, settings) if settings.loss_function is None else _given(terms, settings.loss_function)


def _given(terms: Terms, path: str) -> Tensor:
    """Return what a user's function says of each token."""
    found = named(path, "loss_function")(terms)
    if not isinstance(found, Tensor) or found.shape != terms.log_probs.shape:
        what = f"loss_function {path} returns {tuple(found.shape) if isinstance(found, Tensor) else type(found)}"
        why = f"expected a tensor of the shape of log_probs, {tuple(terms.log_probs.shape)}"
        raise MegatuneError(Finding(what, why=why), ExitCode.SETTINGS)
    return found


def kl_terms(log_probs: Tensor, reference: Tensor, kind: KL) -> Tensor:
    """Estimate KL(π, π_ref) of each token (joschu.net/blog/kl-approx.html), with gradient.

    k3 is never below 0, and cut off at 10 as in ROLL, where its gradient ends, too. Its exponent is bounded first:
    beyond 88 it overflows, and the gradient of the cut-off times infinity is NaN.
    """
    difference = reference - log_probs
    match kind:
        case "k1":
            return -difference
        case "k2":
            return difference.square() / 2
        case "abs":
            return difference.abs()
    bounded = difference.clamp(max=_KL_LIMIT)  # e^10 - 11 is far above the limit
    return (torch.expm1(bounded) - difference).clamp(max=_KL_LIMIT)
