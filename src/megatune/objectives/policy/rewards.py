"""What becomes of scores before they are spread over tokens, how much each sample counts, and the returns and
advantages of its tokens.

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
        """Take in the rewards of a step."""
        if not len(rewards):
            return
        total, shift = self.count + len(rewards), rewards.mean() - self.mean
        self.squares += ((rewards - rewards.mean()) ** 2).sum() + shift**2 * self.count * len(rewards) / total
        self.mean, self.count = float(self.mean + shift * len(rewards) / total), total
        self.squares = float(self.squares)

    @property
    def std(self) -> float:
        """0 of fewer than two rewards."""
        return float(np.sqrt(self.squares / max(self.count - 1, 1)))

    def state_dict(self) -> dict[str, float]:
        return asdict(self)


def group_means(values: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return at each sample the mean over its group and the group's size, [n] each."""
    _, place = np.unique(groups, return_inverse=True)
    sizes = np.bincount(place)
    return (np.bincount(place, values) / sizes)[place], sizes[place]


def group_stds(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return at each sample the unbiased standard deviation of its group, [n]; 0 of a sample alone."""
    means, sizes = group_means(values, groups)
    variances, _ = group_means((values - means) ** 2, groups)
    return np.sqrt(variances * sizes / np.maximum(sizes - 1, 1))


def normalized(
    rewards: np.ndarray,
    groups: np.ndarray,
    mean: Norm | None,
    std: Norm | None,
    running: RunningMoments,
) -> np.ndarray:
    """Return (reward - mean) / (std + 1e-6), each over a group, the batch or all steps so far; None leaves it out.

    Args:
        running: has these rewards in it.
    """
    centers = {"batch": rewards.mean(), "group": group_means(rewards, groups)[0], "running": running.mean, None: 0.0}
    found = rewards - centers[mean]
    if std is None:
        return found
    batch = rewards.std(ddof=1) if len(rewards) > 1 else 0.0
    scales = {"batch": batch, "group": group_stds(rewards, groups), "running": running.std}
    return found / (scales[std] + _EPSILON)


def leave_one_out(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return rewards less the mean of the others in the group (RLOO, arXiv:2402.14740), and of a sample alone the
    reward."""
    means, sizes = group_means(rewards, groups)
    return np.where(sizes > 1, (rewards - means) * sizes / np.maximum(sizes - 1, 1), rewards)


def shaped(rewards: np.ndarray, groups: np.ndarray, settings: AlgorithmSettings, running: RunningMoments) -> np.ndarray:
    """Return what an estimator makes of the rewards of one domain.

    GRPO (arXiv:2402.03300) normalizes by group, whatever norm_mean_type and norm_std_type say; RLOO leaves one out;
    REINFORCE++ (arXiv:2501.03262) takes the group's mean where there are groups, and whitens advantages later. Of the
    others the two settings decide: Dr.GRPO (arXiv:2503.20783) is reinforce with the group's mean and no std.
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
    """Return which samples train, bool [n] of each rule in use, by the rule's name.

    max_len_mask leaves out responses that have no end. difficulty_mask leaves out groups that are solved too seldom or
    too often, by their mean score; samples alone are kept. error_max_len_clip leaves out long wrong answers, and scores
    that are neither 0 nor 1.
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
    """Return the weight of each sample in the policy loss, [n]; their mean over the samples that train is 1.

    difficulty_loss_weight gives 0.5 to the easiest and 2 to the hardest; length_loss_weight 1.5 to the shortest of the
    step, 0.5 to the longest. ROLL does this for each micro-batch, so that its size matters; here it is of the step.

    Args:
        used: bool [n], which samples train.
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
    """Return estimates of KL(policy, base) of sampled tokens (joschu.net/blog/kl-approx.html): k1 "kl", its absolute
    value "abs", k2 "mse", or k3, which is cut off at 10 as in ROLL.

    Raises:
        ValueError: "full", which needs the distributions of both models.
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
    """Put each sample's reward, [n], at its last token; 0 elsewhere. One without tokens has nowhere to put it."""
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
        # Those that have a token t come first.
        count = int(np.searchsorted(-lengths, -t))
        places = starts[:count] + t
        found[places] = later[:count] = values[places] + factor * later[:count]
    return found


def generalized_advantages(
    rewards: np.ndarray, values: np.ndarray, tokens: Tokens, gamma: float, lambd: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return advantages (GAE, arXiv:1506.02438) and returns, which are advantages + values; nothing follows the last
    token."""
    following = np.append(values[1:], 0.0)
    following[tokens.stops[tokens.lengths > 0] - 1] = 0.0
    advantages = discounted(rewards + gamma * following - values, tokens, gamma * lambd)
    return advantages, advantages + values


def whitened(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return values with mean 0 and unbiased variance 1 over the tokens that count; as they are where fewer than two
    do."""
    counted = values[mask > 0]
    if len(counted) < 2:
        return values
    return (values - counted.mean()) / np.sqrt(counted.var(ddof=1) + 1e-8)


def share_beyond(values: np.ndarray, limit: float) -> float:
    """Return how many of the values a clip to ± limit changes, 0 of none."""
    return float((np.abs(values) > limit).mean()) if len(values) else 0.0
