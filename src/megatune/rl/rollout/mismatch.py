"""The train–rollout mismatch: the difference between log-probabilities of the rollout engine and of the trainer.

Wrong weights (a skipped or partial update, a stale output layer) shift the mean. With right weights there is only
rounding; in 16 bits it makes a few of a step's millions of tokens outliers, without any error in the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatune.errors import ExitCode, Finding, MegatuneError

# Measured means with right weights, and with weights that are off by 2 %: fp32 2e-6 at most; bf16 0.017, 0.13;
# fp16 0.002, 0.12.
MEAN_BOUNDS = {"fp32": 1e-5, "fp16": 0.01, "bf16": 0.05}
_MAX_LOG_RATIO = 50.0  # its exponential is finite
# A token with a larger difference is an outlier, and is not trained on.
OUTLIERS = {"fp32": 1e-4, "fp16": 0.5, "bf16": 2.0}


@dataclass(frozen=True, slots=True)
class Mismatch:
    """|trainer - rollout| over the tokens of some responses, and the k3 estimate of KL(rollout, trainer) per token.

    Attributes:
        median, p99: quantiles.
        outliers: tokens beyond `OUTLIERS`, or not finite.
    """

    mean: float
    median: float
    p99: float
    max: float
    k3: float
    outliers: int
    tokens: int

    @property
    def metrics(self) -> dict[str, float]:
        """The values by their names in metrics.jsonl."""
        return {
            "log_prob_gap": self.max,
            **{f"log_prob_gap_{name}": getattr(self, name) for name in ("mean", "median", "p99", "k3")},
            "log_prob_gap_outliers": self.outliers / self.tokens,
        }


def mismatch_of(trainer: Sequence[np.ndarray], rollout: Sequence[np.ndarray], dtype: str) -> Mismatch | None:
    """Measure the difference of log-probabilities; return None if there is no token to compare.

    Args:
        trainer, rollout: fp32 [r] per response, at the same temperature. Tokens whose rollout value is NaN, sampled
            with other weights, are excluded.
        dtype: the less precise of the two: "fp32", "bf16", "fp16".
    """
    ours, theirs = (np.concatenate([np.zeros(0), *each]).astype(np.float64) for each in (trainer, rollout))
    log_ratio = (ours - theirs)[~np.isnan(theirs)]
    if not len(log_ratio):
        return None
    distance = np.abs(np.nan_to_num(log_ratio, nan=np.inf))
    k3 = float((np.expm1(np.minimum(log_ratio, _MAX_LOG_RATIO)) - log_ratio).mean())
    return Mismatch(
        mean=float(distance.mean()),
        median=float(np.quantile(distance, 0.5, method="higher")),
        p99=float(np.quantile(distance, 0.99, method="higher")),
        max=float(distance.max()),
        k3=k3,
        outliers=int((distance > OUTLIERS[dtype]).sum()),
        tokens=len(distance),
    )


def is_inlier(trainer: np.ndarray, rollout: np.ndarray, dtype: str) -> np.ndarray:
    """Return which tokens of a response are no outliers, bool [r]; tokens of other weights (NaN) never are."""
    return np.isnan(rollout) | (np.abs(trainer - rollout) <= OUTLIERS[dtype])


def check_mismatch(found: Mismatch, dtype: str, version: int, bound: float | None = None) -> None:
    """Refuse a rollout engine that does not sample from the trainer's weights.

    Args:
        version: version of the weights.
        bound: of the mean; None for that of the dtype.

    Raises:
        MegatuneError: NOT_FINITE, if the mean is above its bound or not finite.
    """
    bound = MEAN_BOUNDS[dtype] if bound is None else bound
    if found.mean <= bound:
        return
    what = (
        f"log-probabilities of the rollout engine and of the trainer differ by {found.mean:.3g} on average over "
        f"{found.tokens:,} tokens (median {found.median:.3g}, 99 % below {found.p99:.3g}, {found.max:.3g} at most)"
    )
    why = f"max_log_prob_gap is {bound:g} in {dtype}: the engine does not sample from version {version} of the weights"
    fix = (
        "resume from the last checkpoint; if it happens again, try `strategy_name: hf_infer` for actor_infer, or a "
        "larger max_log_prob_gap if the two are known to round so differently"
    )
    raise MegatuneError(Finding(what, "actor_infer", why, fix), ExitCode.NOT_FINITE)
