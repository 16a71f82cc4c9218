"""Compute advantages from scores, in the driver, after log-probabilities and before training.

The order is ROLL's: sample masks, normalization and clipping of rewards, token rewards, returns, whitening, clipping,
train-infer correction. Rewards and advantages are computed per domain; the KL coefficient, sample weights and the
correction per step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatune.config.rl.algorithm import AlgorithmSettings
from megatune.config.values import import_object
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.objectives.policy.losses import correct
from megatune.objectives.policy.rewards import (
    RunningMoments,
    clip_fraction,
    discounted,
    generalized_advantages,
    kl_estimates,
    sample_masks,
    sample_weights,
    shaped,
    token_rewards,
    whitened,
)
from megatune.objectives.policy.samples import Prepared, StepSamples, Tokens


class AlgorithmState:
    """State across steps: the coefficient of the KL penalty, and running moments of rewards.

    Args:
        settings: init_kl_coef is the coefficient of the first step.
    """

    def __init__(self, settings: AlgorithmSettings) -> None:
        self.kl_coef = settings.init_kl_coef
        self.running: dict[str, RunningMoments] = {}  # by domain

    def control_kl(self, current: float, num_samples: int, settings: AlgorithmSettings) -> None:
        """Adapt the coefficient to target_kl (arXiv:1909.08593, section 2.2); constant if that is not set."""
        if settings.target_kl is not None:
            error = np.clip(current / settings.target_kl - 1, -0.2, 0.2)
            self.kl_coef *= float(1 + error * num_samples / settings.kl_horizon)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
        running = {domain: moments.state_dict() for domain, moments in self.running.items()}
        return {"kl_coef": self.kl_coef, "running": running}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint."""
        self.kl_coef = state["kl_coef"]
        self.running = {domain: RunningMoments(**moments) for domain, moments in state["running"].items()}


def prepare(
    samples: StepSamples,
    settings: AlgorithmSettings,
    state: AlgorithmState,
    opd_coefs: Mapping[str, float] | None = None,
) -> Prepared:
    """Compute advantages, returns, masks and weights of a step's samples, and update `state`.

    Without old log-probabilities, KL and teacher penalties use those of the rollout engine, and `PolicyObjective`
    applies the train-infer correction.

    Args:
        opd_coefs: weights of the teachers by name (opd_kl_coef); the default is 1.

    Raises:
        ValueError: inputs required by the settings are missing: values, a reference, log-probabilities.
    """
    tokens = Tokens(samples.lengths)
    rewards, used, metrics = _rewards(samples, settings, state)
    mask = used[tokens.sample].astype(np.float64)
    of_tokens, of_kl = _penalized(samples, tokens, token_rewards(rewards, tokens), settings, state)
    penalty, of_teachers = _teachers_penalty(samples, tokens, settings, opd_coefs or {})
    metrics |= of_teachers
    given = None if settings.advantage_function is None else _given(samples, tokens, settings.advantage_function)
    values = None
    if settings.adv_estimator == "gae" and not settings.is_pure_opd:
        values = tokens.join(_needed(samples.values, "values", "adv_estimator: gae"))
    advantages, returns = np.zeros(len(tokens)), np.zeros(len(tokens))
    for _, samples_here in _by_domain(samples):
        here, inside = samples_here[tokens.sample], Tokens(tokens.lengths[samples_here])
        known, own = (None if each is None else each[here] for each in (values, given))
        found = _advantages(of_tokens[here], known, own, penalty[here], mask[here], inside, settings)
        advantages[here], returns[here] = found
    if settings.advantage_clip is not None:
        metrics["critic/advantage_clip_frac"] = clip_fraction(advantages, settings.advantage_clip)
        advantages = np.clip(advantages, -settings.advantage_clip, settings.advantage_clip)
    weights = sample_weights(tokens.lengths, samples.difficulty, used, settings)[tokens.sample]
    weights, mask, of_correction = _corrected(samples, tokens, weights, mask, settings)
    metrics |= of_kl | of_correction
    for name, each in (("advantages", advantages), ("returns", returns), ("values", values)):
        metrics |= {} if each is None else _statistics(f"critic/{name}", each[mask > 0])
    return Prepared(
        advantages=tokens.split(advantages * (mask > 0)),
        returns=tokens.split(returns),
        mask=tokens.split(mask),
        weights=tokens.split(weights),
        metrics=metrics,
    )


def _rewards(
    samples: StepSamples, settings: AlgorithmSettings, state: AlgorithmState
) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
    """Return the rewards for advantage estimators, [n], which samples are trained, bool [n], and metrics."""
    scores, lengths = np.asarray(samples.scores, np.float64), np.asarray(samples.lengths)
    groups, at_limit = np.asarray(samples.groups), np.asarray(samples.at_limit, bool)
    scored = np.ones(len(scores), bool) if samples.failed is None else ~np.asarray(samples.failed, bool)
    rewards, used = np.zeros(len(scores)), scored.copy()
    metrics: dict[str, float] = {}
    for domain, of_domain in _by_domain(samples):
        here = of_domain & scored
        if not here.any():
            continue
        masks = sample_masks(scores[here], lengths[here], groups[here], at_limit[here], settings)
        for name, mask in masks.items():
            metrics[f"{domain}/actor/{name}_ratio"] = float(mask.mean())
            used[here] &= mask
        metrics[f"{domain}/actor/final_mask_ratio"] = float(used[here].mean())
        running = state.running.setdefault(domain, RunningMoments())
        running.add(scores[here])
        rewards[here] = shaped(scores[here], groups[here], settings, running)
    metrics |= {"actor/samples_used": float(used.sum()), "actor/samples_total": float(len(used))}
    if settings.reward_clip:
        metrics["critic/reward_clip_frac"] = clip_fraction(rewards, settings.reward_clip)
        rewards = np.clip(rewards, -settings.reward_clip, settings.reward_clip)
    return rewards, used, metrics | _statistics("critic/rewards", rewards[scored])


def _by_domain(samples: StepSamples) -> list[tuple[str, np.ndarray]]:
    """Return each domain and the mask of its samples, bool [n]."""
    domains = np.asarray(samples.domains)
    return [(domain, domains == domain) for domain in dict.fromkeys(samples.domains)]


def _statistics(name: str, values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {}
    return {f"{name}/{kind}": float(getattr(values, kind)()) for kind in ("mean", "max", "min")}


def _penalized(
    samples: StepSamples, tokens: Tokens, rewards: np.ndarray, settings: AlgorithmSettings, state: AlgorithmState
) -> tuple[np.ndarray, dict[str, float]]:
    """Return token rewards minus the KL penalty, clipped, and metrics; adapt the coefficient for the next step."""
    metrics: dict[str, float] = {}
    if samples.reference_log_probs is None:
        if settings.add_token_level_kl:
            raise ValueError("add_token_level_kl: there are no log-probabilities of a reference")
    else:
        policy = tokens.join(_policy(samples, "the KL penalty"))
        estimates = kl_estimates(policy, tokens.join(samples.reference_log_probs), settings.kl_penalty)
        current = float(tokens.means(estimates, np.ones(len(tokens))).mean())
        used = state.kl_coef if settings.add_token_level_kl else 0.0
        metrics |= {"critic/kl": current, "critic/kl_coef": used}
        rewards = rewards - used * estimates
        state.control_kl(current, len(tokens.lengths), settings)
    if settings.reward_clip:
        metrics["critic/token_reward_clip_frac"] = clip_fraction(rewards, settings.reward_clip)
        rewards = np.clip(rewards, -settings.reward_clip, settings.reward_clip)
    return rewards, metrics


def _advantages(
    rewards: np.ndarray,
    values: np.ndarray | None,
    given: np.ndarray | None,
    penalty: np.ndarray,
    mask: np.ndarray,
    tokens: Tokens,
    settings: AlgorithmSettings,
) -> tuple[np.ndarray, np.ndarray]:
    """Return advantages and returns of the tokens of one domain.

    Args:
        given: the advantages returned by advantage_function.
    """
    if settings.is_pure_opd:
        advantages = returns = -penalty
    else:
        if settings.whiten_rewards:
            rewards = whitened(rewards, mask)
        rewards = rewards * mask
        if given is not None:
            advantages = returns = given
        elif values is not None:
            advantages, returns = generalized_advantages(rewards, values, tokens, settings.gamma, settings.lambd)
        else:
            advantages = returns = discounted(rewards, tokens, settings.gamma)
        advantages = advantages - penalty
    if settings.whiten_advantages or settings.adv_estimator == "reinforce_plus_plus":
        advantages = whitened(advantages, mask)
    return advantages * mask, returns


def _given(samples: StepSamples, tokens: Tokens, path: str) -> np.ndarray:
    """Return the advantages of a user's function, fp64 [tokens]."""
    found = import_object(path, "advantage_function")(samples)
    try:
        of_samples = [np.asarray(each, np.float64) for each in found]
        pairs = zip(of_samples, tokens.lengths, strict=True)
        joined = tokens.join([np.broadcast_to(each, length) if not each.ndim else each for each, length in pairs])
        if not np.isfinite(joined).all():
            raise ValueError("an advantage is not a finite number")
    except (TypeError, ValueError) as error:
        why = f"expected a number, or an array with a value per token, for each of the {len(tokens.lengths)} samples"
        raise MegatuneError(Finding(f"advantage_function {path}: {error}", why=why), ExitCode.SETTINGS) from error
    return joined


def _teachers_penalty(
    samples: StepSamples, tokens: Tokens, settings: AlgorithmSettings, coefs: Mapping[str, float]
) -> tuple[np.ndarray, dict[str, float]]:
    """Return Σ coefficient · KL(policy, teacher) of each token for on-policy distillation (0 if it is off), and the
    metric of the mean KL without coefficients, over the tokens with a teacher."""
    total, distance, taught = np.zeros(len(tokens)), 0.0, 0
    if settings.distils or not (settings.is_pure_opd or settings.use_opd):
        return total, {}
    if not samples.teachers:
        raise ValueError("on-policy distillation: there are no log-probabilities of a teacher")
    policy = _policy(samples, "on-policy distillation")
    for name, of_teacher in samples.teachers.items():
        pairs = zip(policy, of_teacher, strict=True)
        # An empty array means that the teacher does not teach this sample: no penalty.
        found = [kl_estimates(own, other if len(other) else own, settings.kl_penalty) for own, other in pairs]
        penalty = tokens.join(found)
        total += coefs.get(name, 1.0) * penalty
        distance, taught = distance + float(penalty.sum()), taught + sum(map(len, of_teacher))
    return total, {"teacher_kl": distance / max(taught, 1)}


def _corrected(
    samples: StepSamples, tokens: Tokens, weights: np.ndarray, mask: np.ndarray, settings: AlgorithmSettings
) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
    """Apply the train-infer correction to weights and mask of tokens, if both log-probabilities are available."""
    if samples.old_log_probs is None or samples.rollout_log_probs is None:
        return weights, mask, {}
    old, rollout = (torch.from_numpy(tokens.join(each)) for each in (samples.old_log_probs, samples.rollout_log_probs))

    turns = tokens if samples.turns is None else Tokens(np.concatenate([np.zeros(0, np.int64), *samples.turns]))

    def totals(values: Tensor, parts: Tokens) -> Tensor:
        return torch.from_numpy(parts.sums(values.numpy())[parts.sample])

    of_responses, of_turns = partial(totals, parts=tokens), partial(totals, parts=turns)
    found = correct(old, rollout, torch.ones_like(old), of_responses, of_turns, settings)
    metrics = {name: float(total / max(float(count), 1.0)) for name, (total, count) in found.metrics.items()}
    return weights * found.weights.numpy(), mask * found.keep.numpy(), metrics


def _policy(samples: StepSamples, purpose: str) -> Sequence[np.ndarray]:
    """Return the policy's log-probabilities: the trainer's, or else those of the rollout engine."""
    return _needed(samples.old_log_probs or samples.rollout_log_probs, "log-probabilities of the policy", purpose)


def _needed(values: Any, what: str, purpose: str) -> Any:
    if values is None:
        raise ValueError(f"{purpose}: there are no {what}")
    return values
