"""Terms of the policy loss as pure functions: token losses by ROLL's names, weights for means over tokens or responses,
and the correction of the train–rollout mismatch.

Legend: A advantages, without gradient; r the ratio π / π_old, with gradient; all fp32 of the same shape; b rows, s
tokens per row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Literal

import torch
from torch import Tensor

from megatune.config.rl.algorithm import Aggregation, AlgorithmSettings
from megatune.config.rl.role import PolicyVariant
from megatune.config.values import import_object
from megatune.engine.sequences import MicroBatch, Sequences, sequence_totals
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.objectives.base import tokens_of_documents

# Constants of ROLL's ActorPGWorker.
_CISPO_RANGE = (0.9, 1.1)
_TRUNCATION = (0.0, 1.0)
KL = Literal["k1", "k2", "k3", "abs"]
Range = tuple[float | None, float | None]
_KIMI_TAU = 0.1
_KL_LIMIT = 10.0


@dataclass(frozen=True, slots=True)
class Terms:
    """Inputs of token losses.

    Attributes:
        log_probs: log-probabilities of the policy, with gradient.
        log_ratio: log r, with gradient; 0 at masked tokens.
        advantages: A.
        is_positive: whether the response's score is positive, for topr; otherwise None.
    """

    log_probs: Tensor
    log_ratio: Tensor
    advantages: Tensor
    is_positive: Tensor | None = None


def clipped(terms: Terms, settings: AlgorithmSettings) -> Tensor:
    """PPO (arXiv:1707.06347): -min(r A, clip(r) A), with separate lower and upper bounds (DAPO, arXiv:2503.14476).
    dual_clip_loss limits it to dual_clip · |A| if A < 0 (arXiv:1912.09729)."""
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
    """TOPR (arXiv:2503.14286, equation 8): the supervised loss for responses with a score above 0, truncated ratios for
    others."""
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
    """Return the loss of each token. The variants None and "ppo" use loss_function if it is set, otherwise `clipped`.

    Args:
        ratio: the bounds of r in "tis", "topr" and "cispo"; None for ROLL's defaults.
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
    """Return the token losses of a user's function."""
    found = import_object(path, "loss_function")(terms)
    if not isinstance(found, Tensor) or found.shape != terms.log_probs.shape:
        what = f"loss_function {path} returns {tuple(found.shape) if isinstance(found, Tensor) else type(found)}"
        why = f"expected a tensor of the shape of log_probs, {tuple(terms.log_probs.shape)}"
        raise MegatuneError(Finding(what, why=why), ExitCode.SETTINGS)
    return found


def kl_terms(log_probs: Tensor, reference: Tensor, kind: KL) -> Tensor:
    """Estimate KL(π, π_ref) of each token (joschu.net/blog/kl-approx.html), with gradient.

    k3 is at least 0, and clamped to 10 as in ROLL, with a gradient of 0 there. Its exponent is clamped first: beyond 88
    it overflows, and the gradient of 0 times infinity would be NaN.
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


def shares(mask: Tensor, sequences: Sequences) -> Tensor:
    """Return 1 / (number of unmasked tokens of the response) for each of this rank's tokens, fp32 [b, s / cp]; 0 for
    masked tokens. They add up to the number of responses with an unmasked token."""
    return mask / sequence_totals(mask, sequences).clamp(min=1).to(mask.dtype)


def token_weights(mode: Aggregation, mask: Tensor, sequences: Sequences, norm: float) -> Tensor:
    """Return the weights of token losses, fp32 [b, s / cp]; the step divides the weighted sum by the normalizer.

    Args:
        norm: the weight of a token in seq-mean-token-sum-norm.
    """
    if mode == "seq-mean-token-mean":
        return shares(mask, sequences)
    return norm * mask if mode == "seq-mean-token-sum-norm" else mask


def normalizer(mode: Aggregation, mask: Tensor, batch: MicroBatch) -> Tensor:
    """Return what a whole micro-batch adds to the divisor, int64 []: the number of unmasked tokens, of responses with
    an unmasked token, or, for seq-mean-token-sum-norm, of responses.

    Args:
        mask: [b, s], on the host.
    """
    match mode:
        case "token-mean":
            return (mask > 0).sum()
        case "seq-mean-token-sum-norm":
            return torch.tensor(sum(length > 0 for length in batch.lengths))
    return num_responses(mask, batch)


def num_responses(mask: Tensor, batch: MicroBatch) -> Tensor:
    """Count the documents of a whole micro-batch with an unmasked token: int64 []."""
    return (tokens_of_documents(mask > 0, batch) > 0).sum()


LEVELS = ("token", "geometric", "sequence", "segment")
_NAMES = tuple(f"actor/train_infer_{what}_{level}_mean" for what in ("ratio", "diff") for level in LEVELS)


@dataclass(frozen=True, slots=True)
class Correction:
    """The correction of the train–rollout mismatch, for every token.

    Attributes:
        weights: importance weights of the policy loss, without gradient; 1 if is_weight is off.
        keep: bool, whether all filters accept the token.
        metrics: name -> (sum, count).
    """

    weights: Tensor
    keep: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]]


def correction_metrics(settings: AlgorithmSettings) -> tuple[str, ...]:
    """Return the names of the metrics of `correct`."""
    clip = ("actor/is_weight_clipfrac",) * settings.train_infer_correction.is_weight.enabled
    final = ("actor/train_infer_final_mask_mean",) * bool(settings.train_infer_correction.active)
    return ("actor/train_infer_log_prob_gap", *_NAMES, *clip, *final)


@torch.no_grad()
def correct(
    old: Tensor,
    rollout: Tensor,
    mask: Tensor,
    totals: Callable[[Tensor], Tensor],
    segment_totals: Callable[[Tensor], Tensor],
    settings: AlgorithmSettings,
) -> Correction:
    """Compare the log-probabilities of the trainer with those of the rollout engine.

    Ratios are π_old / π_rollout of tokens, their geometric mean over a response ("geometric") or over a turn of the
    model ("segment"), or their product over a response ("sequence"). Differences of probabilities have the same levels,
    with means and sums. Weights are ratios clamped to upper_bound (truncated importance sampling).

    Args:
        old, rollout: log-probabilities of tokens, of the same shape; any value where the mask is 0.
        mask: 1 at tokens of responses.
        totals: sums values over each token's response.
        segment_totals: sums values over each token's turn.
    """
    counted = mask > 0
    sizes = totals(counted.to(old.dtype)).clamp(min=1)
    segment_sizes = segment_totals(counted.to(old.dtype)).clamp(min=1)

    def levels(values: Tensor) -> dict[str, Tensor]:
        sums = totals(values)
        of_segments = segment_totals(values) / segment_sizes
        return {"token": values, "geometric": sums / sizes, "sequence": sums, "segment": of_segments}

    log_ratio = torch.where(counted, old - rollout, 0.0)
    ratios = {level: values.exp() for level, values in levels(log_ratio).items()}
    differences = levels(torch.where(counted, old.exp() - rollout.exp(), 0.0))
    shares = counted / sizes  # sums to 1 over each response
    count, num_tokens = shares.sum(), counted.sum()
    metrics = {"actor/train_infer_log_prob_gap": (log_ratio.abs().sum(), num_tokens)}
    for name, values in zip(_NAMES, (*ratios.values(), *differences.values()), strict=True):
        metrics[name] = (torch.where(counted, values * shares, 0.0).sum(), count)
    chosen = settings.train_infer_correction.is_weight
    weights = torch.ones_like(log_ratio)
    if chosen.enabled:
        ratio = ratios[chosen.weight_type]
        bound = inf if chosen.upper_bound is None else chosen.upper_bound
        weights = ratio.clamp(max=bound)
        metrics["actor/is_weight_clipfrac"] = ((counted & (ratio > bound)).sum(), num_tokens)
    keep = torch.ones_like(counted)
    for each in settings.train_infer_correction.active:
        if each.ratio_enabled:
            keep &= _between(ratios[each.agg_type], each.ratio_low, each.ratio_high)
        if each.diff_enabled:
            keep &= _between(differences[each.agg_type], each.diff_low, each.diff_high)
    if settings.train_infer_correction.active:
        metrics["actor/train_infer_final_mask_mean"] = ((keep & counted).sum(), num_tokens)
    return Correction(weights, keep, metrics)


def _between(values: Tensor, low: float, high: float) -> Tensor:
    return (values >= low) & (values <= high)
