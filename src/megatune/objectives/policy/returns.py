"""Rewards of tokens, and what comes of them: returns, advantages, whitening, penalties by log-probabilities."""

from __future__ import annotations

from typing import Literal

import numpy as np

from megatune.objectives.policy.samples import Tokens

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
