"""What a policy's loss is made of, as pure functions: losses of single tokens, by ROLL's names; their weights, by which
they are means over tokens or responses; and the correction of differences between the trainer and the rollout engine.

Legend: A advantages, constants; r the ratio π / π_old with gradient; all fp32 and of one shape; b rows, s tokens of a
row.
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
    found = import_object(path, "loss_function")(terms)
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


def shares(mask: Tensor, sequences: Sequences) -> Tensor:
    """Return what each of this rank's tokens is of its response's tokens that count, fp32 [b, s / cp]; 0 where the mask
    is. They add up to the number of responses with a token that counts."""
    return mask / sequence_totals(mask, sequences).clamp(min=1).to(mask.dtype)


def token_weights(mode: Aggregation, mask: Tensor, sequences: Sequences, norm: float) -> Tensor:
    """Return weights of token losses, fp32 [b, s / cp], whose sum the step divides by the mode's normalizer.

    Args:
        norm: of seq-mean-token-sum-norm: the weight of a token.
    """
    if mode == "seq-mean-token-mean":
        return shares(mask, sequences)
    return norm * mask if mode == "seq-mean-token-sum-norm" else mask


def normalizer(mode: Aggregation, mask: Tensor, batch: MicroBatch) -> Tensor:
    """Count what a whole micro-batch adds to the divisor, int64 []: tokens that count, responses with such a token, or,
    of seq-mean-token-sum-norm, responses.

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
    """Count the documents of a whole micro-batch with a token that counts: int64 []."""
    return (tokens_of_documents(mask > 0, batch) > 0).sum()


LEVELS = ("token", "geometric", "sequence", "segment")
_NAMES = tuple(f"actor/train_infer_{what}_{level}_mean" for what in ("ratio", "diff") for level in LEVELS)


@dataclass(frozen=True, slots=True)
class Correction:
    """Of every token.

    Attributes:
        weights: of the policy loss, fp, without gradient; 1 where is_weight is off.
        keep: bool, what all filters let pass.
        metrics: name -> (sum, count).
    """

    weights: Tensor
    keep: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]]


def correction_metrics(settings: AlgorithmSettings) -> tuple[str, ...]:
    """Name what `correct` measures."""
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
    """Compare log-probabilities of the trainer with those of the rollout engine.

    Ratios are π_old / π_rollout of tokens, their geometric mean over a response ("geometric") or over a turn of the
    model ("segment"), or their product; differences are of probabilities, likewise. Weights are ratios cut off at
    upper_bound (truncated importance sampling).

    Args:
        old, rollout: of tokens, of one shape; any number where the mask is 0.
        mask: 1 at tokens of responses.
        totals: from values of tokens to the sum over its response at each token.
        segment_totals: the same, over the token's turn.
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
    shares = counted / sizes  # add up to 1 in each response
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
