"""Train-infer correction: weights and filters for what the rollout engine and the trainer see differently.

In torch, for the driver's step and for the objective: without a pass that recomputes old log-probabilities they are
only known in training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from megatune.config.rl.algorithm import AlgorithmSettings

# "segment" is a stretch of the model's own tokens: a response without tools is one, and so it is "geometric" here.
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


def metric_names(settings: AlgorithmSettings) -> tuple[str, ...]:
    """Name what `correct` measures."""
    clip = ("actor/is_weight_clipfrac",) * settings.train_infer_correction.is_weight.enabled
    final = ("actor/train_infer_final_mask_mean",) * bool(settings.train_infer_correction.active)
    return ("actor/train_infer_log_prob_gap", *_NAMES, *clip, *final)


@torch.no_grad()
def correct(
    old: Tensor, rollout: Tensor, mask: Tensor, totals: Callable[[Tensor], Tensor], settings: AlgorithmSettings
) -> Correction:
    """Compare log-probabilities of the trainer with those of the rollout engine.

    Ratios are π_old / π_rollout of tokens, the geometric mean over a response, or the product; differences are of
    probabilities, likewise. Weights are ratios cut off at upper_bound (truncated importance sampling).

    Args:
        old, rollout: of tokens, of one shape; any number where the mask is 0.
        mask: 1 at tokens of responses.
        totals: from values of tokens to the sum over its response at each token.
    """
    counted = mask > 0
    log_ratio = torch.where(counted, old - rollout, 0.0)
    difference = torch.where(counted, old.exp() - rollout.exp(), 0.0)
    sizes = totals(counted.to(log_ratio.dtype)).clamp(min=1)
    log_sums, sums = totals(log_ratio), totals(difference)
    ratios = {"token": log_ratio, "geometric": log_sums / sizes, "sequence": log_sums, "segment": log_sums / sizes}
    ratios = {level: values.exp() for level, values in ratios.items()}
    differences = {"token": difference, "geometric": sums / sizes, "sequence": sums, "segment": sums / sizes}
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
