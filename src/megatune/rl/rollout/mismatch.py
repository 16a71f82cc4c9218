"""Whether the rollout engine samples from the weights that the trainer has: one number says it.

A wrong engine (a skipped or half update, a stale output layer) differs in log-probabilities by 0.2 to 1; a right one
by rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatune.errors import ExitCode, Finding, MegatuneError


@dataclass(frozen=True, slots=True)
class Bound:
    """How far log-probabilities of tokens may differ: at most, and on average."""

    max: float
    mean: float


# In 16 bits both sides round each product on their own, and few tokens differ by much more than the rest: the mean
# tells a wrong engine there. Measured with the right weights: fp32 2e-6 at most; bf16 0.017 and fp16 0.002 on average;
# with weights that are off by 2 %: 0.12 in both.
BOUNDS = {"fp32": Bound(1e-4, 1e-5), "fp16": Bound(0.5, 0.01), "bf16": Bound(2.0, 0.05)}


@dataclass(frozen=True, slots=True)
class Gap:
    """|trainer - rollout| over the tokens of some responses.

    Attributes:
        sample: the index of the response with the largest difference.
        token: its index in the response.
    """

    max: float
    mean: float
    tokens: int
    sample: int
    token: int


def log_prob_gap(trainer: Sequence[np.ndarray], rollout: Sequence[np.ndarray]) -> Gap:
    """Measure the difference of log-probabilities.

    Args:
        trainer, rollout: fp32 [r] of each response, at the same temperature. Tokens of which the rollout's is NaN are
            left out: those that other weights sampled.
    """
    differences = [np.abs(ours.astype(np.float64) - theirs) for ours, theirs in zip(trainer, rollout, strict=True)]
    known = [~np.isnan(theirs) for theirs in rollout]
    kept = np.concatenate([each[mask] for each, mask in zip(differences, known, strict=True)] or [np.zeros(0)])
    if not len(kept):
        return Gap(0.0, 0.0, 0, 0, 0)
    # NaN of the trainer is the largest difference of all.
    worst = [
        np.where(mask, np.nan_to_num(each, nan=np.inf), -1.0) for each, mask in zip(differences, known, strict=True)
    ]
    sample = max(range(len(worst)), key=lambda one: worst[one].max(initial=-1.0))
    token = int(worst[sample].argmax())
    return Gap(float(worst[sample][token]), float(kept.mean()), len(kept), sample, token)


def check_gap(gap: Gap, dtype: str, version: int) -> None:
    """Refuse a rollout engine that does not sample from the trainer's weights.

    Args:
        dtype: the less exact one of the two: "fp32", "bf16", "fp16".
        version: of the weights.

    Raises:
        MegatuneError: NOT_FINITE, where the gap is above its bound or not finite.
    """
    bound = BOUNDS[dtype]
    if gap.max <= bound.max and gap.mean <= bound.mean:
        return
    what = (
        f"log-probabilities of the rollout engine and of the trainer differ by {gap.max:.3g} at most and "
        f"{gap.mean:.3g} on average over {gap.tokens} tokens"
    )
    why = (
        f"in {dtype} they may differ by {bound.max:g} and {bound.mean:g}: the engine does not sample from version "
        f"{version} of the weights; the largest difference is at token {gap.token} of response {gap.sample}"
    )
    fix = "resume from the last checkpoint; where it comes again, try `strategy_name: hf_infer` for actor_infer"
    raise MegatuneError(Finding(what, "actor_infer", why, fix), ExitCode.NOT_FINITE)
