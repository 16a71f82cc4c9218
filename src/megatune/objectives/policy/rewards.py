"""Normalize rewards, mask and weight samples, and compute returns and advantages of tokens.

Legend: n samples of one domain.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from megatune.config.rl.algorithm import AlgorithmSettings, Norm
from megatune.objectives.policy.samples import Tokens

_EPSILON = 1e-6  # added to standard deviations, as ROLL and TRL do


@dataclass(slots=True)
class RunningMoments:
    """Mean and unbiased variance of all rewards so far (Chan's parallel update)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # Σ (x - mean)²

    def add(self, rewards: np.ndarray) -> None:
        """Add the rewards of a step."""
        if not len(rewards):
            return
        total, shift = self.count + len(rewards), rewards.mean() - self.mean
        self.squares += ((rewards - rewards.mean()) ** 2).sum() + shift**2 * self.count * len(rewards) / total
        self.mean, self.count = float(self.mean + shift * len(rewards) / total), total
        self.squares = float(self.squares)

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 0 for fewer than two rewards."""
        return float(np.sqrt(self.squares / max(self.count - 1, 1)))

    def state_dict(self) -> dict[str, float]:
        return asdict(self)


def group_means(values: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each sample the mean over its group and the group's size, [n] each."""
    _, place = np.unique(groups, return_inverse=True)
    sizes = np.bincount(place)
    return (np.bincount(place, values) / sizes)[place], sizes[place]


def group_stds(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return for each sample the unbiased standard deviation of its group, [n]; 0 for groups of one."""
    means, sizes = group_means(values, groups)
    variances, _ = group_means((values - means) ** 2, groups)
    return np.sqrt(variances * sizes / np.maximum(sizes - 1, 1))


def normalized(
    rewards: np.ndarray, groups: np.ndarray, mean: Norm | None, std: Norm | None, running: RunningMoments
) -> np.ndarray:
    """Return (reward - mean) / (std + 1e-6), each over the group, the batch or all steps so far, or omitted if None.

    Args:
        running: running moments, which include these rewards.
    """
    centers = {"batch": rewards.mean(), "group": group_means(rewards, groups)[0], "running": running.mean, None: 0.0}
    found = rewards - centers[mean]
    if std is None:
        return found
    batch = rewards.std(ddof=1) if len(rewards) > 1 else 0.0
    scales = {"batch": batch, "group": group_stds(rewards, groups), "running": running.std}
    return found / (scales[std] + _EPSILON)


def leave_one_out(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return rewards minus the mean of the others in the group (RLOO, arXiv:2402.14740); unchanged for groups of
    one."""
    means, sizes = group_means(rewards, groups)
    return np.where(sizes > 1, (rewards - means) * sizes / np.maximum(sizes - 1, 1), rewards)


def shaped(rewards: np.ndarray, groups: np.ndarray, settings: AlgorithmSettings, running: RunningMoments) -> np.ndarray:
    """Normalize the rewards of one domain as the advantage estimator requires.

    GRPO (arXiv:2402.03300) normalizes by group, regardless of norm_mean_type and norm_std_type; RLOO uses leave-one-out
    means; REINFORCE++ (arXiv:2501.03262) subtracts the group's mean if there are groups, and whitens advantages later.
    Other estimators use the two settings: Dr.GRPO (arXiv:2503.20783) is reinforce with the group's mean and no std.
    """
    match settings.adv_estimator:
        case "grpo":
            return normalized(rewards, groups, "group", "group", running)
        case "rloo":
            return leave_one_out(rewards, groups)
        case "reinforce_plus_plus":
            means, sizes = group_means(rewards, groups)
            return np.where(sizes > 1, rewards - means, rewards)
    return normalized(rewards, groups, settings.norm_mean_type, settings.norm_std_type, running)


def sample_masks(
    scores: np.ndarray, lengths: np.ndarray, groups: np.ndarray, at_limit: np.ndarray, settings: AlgorithmSettings
) -> dict[str, np.ndarray]:
    """Return the masks of samples to train, bool [n], by the names of the enabled rules.

    max_len_mask excludes responses without an end. difficulty_mask excludes groups that are too hard or too easy by
    their mean score; groups of one are kept. error_max_len_clip excludes long wrong answers, and scores other than 0
    and 1.
    """
    masks: dict[str, np.ndarray] = {}
    if settings.max_len_mask:
        masks["max_len_mask"] = ~at_limit
    if settings.difficulty_mask:
        means, sizes = group_means(scores, groups)
        inside = (means > settings.difficulty_low_threshold) & (means < settings.difficulty_high_threshold)
        masks["difficulty_mask"] = inside | (sizes == 1)
    if settings.error_max_len_clip:
        short = lengths < settings.error_max_len_threshold
        masks["error_len_mask"] = ((scores == 0) & short) | (scores == 1)
    return masks


def sample_weights(
    lengths: np.ndarray, difficulty: np.ndarray | None, used: np.ndarray, settings: AlgorithmSettings
) -> np.ndarray:
    """Return the weight of each sample in the policy loss, [n]; their mean over trained samples is 1.

    difficulty_loss_weight assigns 0.5 to the easiest and 2 to the hardest; length_loss_weight 1.5 to the shortest of
    the step, 0.5 to the longest. ROLL does this per micro-batch, so that its results depend on the micro-batch size.

    Args:
        used: bool [n], which samples are trained.
    """
    weights = np.ones(len(lengths))
    if settings.difficulty_loss_weight and difficulty is not None:
        weights = weights * (0.5 + 1.5 * np.clip(difficulty, 0, 1))
    if settings.length_loss_weight and used.any():
        shortest, longest = lengths[used].min(), lengths[used].max()
        share = (lengths - shortest) / max(longest - shortest, 1)
        weights = weights * (1.5 - np.clip(share, 0, 1))
    return weights / weights[used].mean() if used.any() else weights


KL = Literal["kl", "abs", "mse", "full", "k3"]


def kl_estimates(log_probs: np.ndarray, base: np.ndarray, kind: KL) -> np.ndarray:
    """Return estimates of KL(policy, base) for sampled tokens (joschu.net/blog/kl-approx.html): k1 "kl", its absolute
    value "abs", k2 "mse", or k3, which is clamped to 10 as in ROLL.

    Raises:
        ValueError: "full", which would need the distributions of both models.
    """
    difference = log_probs - base
    match kind:
        case "kl":
            return difference
        case "abs":
            return np.abs(difference)
        case "mse":
            return 0.5 * difference**2
        case "k3":
            return np.minimum(np.expm1(np.minimum(-difference, 10.0)) + difference, 10.0)
    raise ValueError(f"kl_penalty: {kind} is not a known estimator")


def token_rewards(rewards: np.ndarray, tokens: Tokens) -> np.ndarray:
    """Put each sample's reward, [n], at its last token, with 0 elsewhere; samples without tokens are ignored."""
    found = np.zeros(len(tokens))
    some = tokens.lengths > 0
    found[tokens.stops[some] - 1] = rewards[some]
    return found


def discounted(values: np.ndarray, tokens: Tokens, factor: float) -> np.ndarray:
    """Return y_t = x_t + factor · y_(t + 1) within each sample."""
    order = np.argsort(-tokens.lengths, kind="stable")
    starts, lengths = tokens.starts[order], tokens.lengths[order]
    found, later = np.empty(len(tokens)), np.zeros(len(order))
    for t in range(int(lengths.max(initial=0)) - 1, -1, -1):
        # Samples are sorted by length, so those with a token t come first.
        count = int(np.searchsorted(-lengths, -t))
        places = starts[:count] + t
        found[places] = later[:count] = values[places] + factor * later[:count]
    return found


def generalized_advantages(
    rewards: np.ndarray, values: np.ndarray, tokens: Tokens, gamma: float, lambd: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return advantages (GAE, arXiv:1506.02438) and returns, which are advantages + values; the value after the last
    token is 0."""
    following = np.append(values[1:], 0.0)
    following[tokens.stops[tokens.lengths > 0] - 1] = 0.0
    advantages = discounted(rewards + gamma * following - values, tokens, gamma * lambd)
    return advantages, advantages + values


def whitened(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Normalize values to mean 0 and unbiased variance 1 over unmasked tokens; unchanged if there are fewer than
    two."""
    counted = values[mask > 0]
    if len(counted) < 2:
        return values
    return (values - counted.mean()) / np.sqrt(counted.var(ddof=1) + 1e-8)


def clip_fraction(values: np.ndarray, limit: float) -> float:
    """Return the share of values that clipping to ± limit changes; 0 if there are none."""
    return float((np.abs(values) > limit).mean()) if len(values) else 0.0
