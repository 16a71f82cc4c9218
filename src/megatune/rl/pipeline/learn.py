"""Trains on the scored groups of a step: log-probabilities, values, advantages, updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatune.config.rl.settings import RLSettings
from megatune.objectives.policy.prepare import AlgorithmState, Prepared, prepare
from megatune.objectives.policy.samples import StepSamples
from megatune.rl.cluster.timeline import PhaseTimer
from megatune.rl.pipeline.groups import Group
from megatune.rl.pipeline.roles import PARTS, DeviceScheduler, ModelGroup
from megatune.rl.problems import DIFFICULTY
from megatune.rl.rollout.mismatch import Mismatch, check_mismatch, is_inlier, mismatch_of
from megatune.rl.samples import Response, Rollouts, Sample
from megatune.rl.worker.training import TrainResult


@dataclass(frozen=True, slots=True)
class LearnResult:
    """The results of a step's updates.

    Attributes:
        trained: of the policy; None if it was not trained.
        mismatch: between trainer and rollout engine, over tokens sampled with the weights of this step; None if there
            are none.
        skipped: why the policy was not trained; "" if it was.
    """

    trained: TrainResult | None
    mismatch: Mismatch | None
    metrics: Mapping[str, float]
    skipped: str = ""


class Learner:
    """Trains the models on samples.

    Args:
        models: by role name.
    """

    def __init__(self, settings: RLSettings, scheduler: DeviceScheduler, models: Mapping[str, ModelGroup]) -> None:
        self._settings, self._scheduler = settings, scheduler
        self._policy, self._reference, self._critic = (
            models["actor_train"],
            models.get("reference"),
            models.get("critic"),
        )
        self._teachers = {name: models[role.name] for name, role in settings.teachers.items()}
        self.state = AlgorithmState(settings.algorithm)
        precision = settings.actor_train.settings.precision
        dtypes = {settings.actor_infer.dtype, "bf16" if precision.bf16 else "fp16" if precision.fp16 else "fp32"}
        self.dtype = next(dtype for dtype in ("bf16", "fp16", "fp32") if dtype in dtypes)

    def learn(self, groups: Sequence[Group], step: int, phases: PhaseTimer) -> LearnResult:
        """Train on a step's samples.

        Args:
            step: counted from 0; the weights before its updates are version step + 1.

        Raises:
            MegatuneError: NOT_FINITE, if the rollout engine has other weights than that version, or gradients are not
                finite.
        """
        samples, version = [sample for group in groups for sample in group.samples], step + 1
        rollouts = rollouts_of(samples)
        outputs = self._model_outputs(samples, rollouts, phases)
        fresh = [log_probs_of_version(sample.response, version) for sample in samples]
        mismatch = self._check(samples, fresh, outputs.get("old_log_probs"), version, phases)
        with phases("advantages"):
            prepared = self._prepare(samples, rollouts, outputs, fresh)
        if not prepared.num_tokens:
            return LearnResult(None, mismatch, prepared.metrics, explain_no_tokens(prepared.metrics, len(samples)))
        per_token = {name: values for name, values in outputs.items() if name != "teachers"}
        full = replace(rollouts, per_token={**rollouts.per_token, **prepared.per_token, **per_token})
        metrics, trained, skipped = dict(prepared.metrics), None, "the critic warms up (critic_warmup)"
        if self._critic is not None:
            with phases("critic"):
                self._scheduler.compute(self._critic, *PARTS)
                found = self._critic.call("train", full, step)[0]
                metrics |= {**found.metrics, "critic/grad_norm": found.grad_norm, "critic/lr": found.learning_rate}
        if step >= self._settings.algorithm.critic_warmup:
            with phases("train"):
                self._scheduler.compute(self._policy, *PARTS)
                trained, skipped = self._policy.call("train", full, step)[0], ""
        return LearnResult(trained, mismatch, {**metrics, **(trained.metrics if trained else {})}, skipped)

    def log_probs(self, rollouts: Rollouts) -> list[np.ndarray]:
        """Compute the policy's log-probabilities with its current weights."""
        return self._token_values(self._policy, "log_probs", rollouts)

    def _token_values(self, model: ModelGroup, method: str, rollouts: Rollouts) -> list[np.ndarray]:
        self._scheduler.compute(model, "weights")
        return model.token_values(method, rollouts)

    def save(self, step: int, extra_files: Mapping[str, bytes]) -> Path:
        """Save a checkpoint, and return the policy's folder. The critic comes first, so that a checkpoint of the policy
        implies a complete one."""
        if self._critic is not None:
            self._scheduler.compute(self._critic, *PARTS)
            self._critic.call("save", step, None)
        self._scheduler.compute(self._policy, *PARTS)
        return Path(self._policy.call("save", step, extra_files)[0])

    def _model_outputs(self, samples: Sequence[Sample], rollouts: Rollouts, phases: PhaseTimer) -> dict[str, Any]:
        """Compute the log-probabilities and values that the algorithm needs."""
        algorithm = self._settings.algorithm
        outputs: dict[str, Any] = {}
        if algorithm.enable_reference:
            with phases("reference"):
                if self._reference is not None:
                    found = self._token_values(self._reference, "log_probs", rollouts)
                else:
                    found = self._token_values(self._policy, "reference_log_probs", rollouts)
                outputs["reference_log_probs"] = found
        if self._teachers:
            with phases("teachers"):
                teachers = self._teachers.items()
                outputs["teachers"] = {name: self._teacher_log_probs(group, samples) for name, group in teachers}
        if algorithm.enable_old_logprobs_recompute:
            with phases("old_log_probs"):
                outputs["old_log_probs"] = self.log_probs(rollouts)
        if self._critic is not None:
            with phases("values"):
                outputs["values"] = self._token_values(self._critic, "values", rollouts)
        return outputs

    def _teacher_log_probs(self, teacher: ModelGroup, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Compute a teacher's log-probabilities of the samples with its tags; other samples get an empty array."""
        tags = teacher.role.tag_included
        chosen = [index for index, sample in enumerate(samples) if not tags or sample.problem.tag in tags]
        found = [np.zeros(0, np.float32) for _ in samples]
        if chosen:
            rollouts = rollouts_of([samples[index] for index in chosen])
            for index, values in zip(chosen, self._token_values(teacher, "log_probs", rollouts), strict=True):
                found[index] = values
        return found

    def _check(
        self,
        samples: Sequence[Sample],
        fresh: list[np.ndarray],
        old: list[np.ndarray] | None,
        version: int,
        phases: PhaseTimer,
    ) -> Mismatch | None:
        """Compare the trainer's log-probabilities with the engine's, over tokens sampled with this version."""
        if old is None:
            info = self._policy.info
            assert info is not None
            limit = info.data_parallel_size * self._policy.role.infer_batch_size
            chosen = [index for index, values in enumerate(fresh) if not np.isnan(values).all()][:limit]
            if not chosen:
                return None
            with phases("gap"):
                old = self.log_probs(rollouts_of([samples[index] for index in chosen]))
            fresh = [fresh[index] for index in chosen]
        return self.check_log_probs(old, fresh, version)

    def check_log_probs(self, trainer: list[np.ndarray], rollout: list[np.ndarray], version: int) -> Mismatch | None:
        """Measure the mismatch, and raise if its mean is above the bound; see `mismatch_of`."""
        found = mismatch_of(trainer, rollout, self.dtype)
        if found is not None:
            check_mismatch(found, self.dtype, version, self._settings.run.max_log_prob_gap)
        return found

    def _prepare(
        self, samples: Sequence[Sample], rollouts: Rollouts, outputs: Mapping[str, Any], fresh: list[np.ndarray]
    ) -> Prepared:
        """Compute advantages, masks and weights; outliers of the mismatch are masked."""
        algorithm, longest = self._settings.algorithm, self._settings.rollout.max_response_length
        difficulty = None
        if algorithm.difficulty_loss_weight:
            difficulty = np.array([float(sample.problem.row[DIFFICULTY]) for sample in samples], np.float64)
        step = StepSamples(
            scores=np.array([sample.score for sample in samples], np.float64),
            lengths=np.array([len(sample.response.sampled) for sample in samples], np.int64),
            turns=[np.array([len(turn) for turn in sample.response.turns]) for sample in samples],
            groups=np.array([sample.group for sample in samples], np.int64),
            domains=[sample.problem.domain for sample in samples],
            failed=np.array([not sample.has_score for sample in samples]),
            at_limit=np.array([_is_at_limit(sample.response, longest) for sample in samples]),
            difficulty=difficulty,
            rollout_log_probs=rollouts.per_token["rollout_log_probs"],
            **outputs,
        )
        coefs = {name: group.role.opd_kl_coef for name, group in self._teachers.items()}
        given = {name: coef for name, coef in coefs.items() if coef is not None}
        prepared = prepare(step, algorithm, self.state, given)
        if "old_log_probs" in outputs:
            for mask, trainer, rollout in zip(prepared.mask, outputs["old_log_probs"], fresh, strict=True):
                mask *= is_inlier(trainer, rollout, self.dtype)
        return prepared


def explain_no_tokens(metrics: Mapping[str, float], samples: int) -> str:
    """Explain why no token of a step is trained: the fraction of samples that each mask keeps."""
    masks = {
        name.rpartition("/")[2].removesuffix("_ratio"): share
        for name, share in metrics.items()
        if name.endswith("_mask_ratio") and share < 1
    }
    kept = ", ".join(f"{name} keeps {share:.0%}" for name, share in masks.items() if name != "final_mask")
    why = kept or "no sample has a score, or the filters of train_infer_correction exclude all"
    return f"no token of {samples} samples counts: {why}"


def rollouts_of(samples: Sequence[Sample]) -> Rollouts:
    """Convert samples to the form that the trainer takes."""
    return Rollouts(
        [np.concatenate([sample.problem.prompt_ids, sample.response.response_ids]) for sample in samples],
        [len(sample.problem.prompt_ids) for sample in samples],
        {"rollout_log_probs": [sample.response.log_probs[sample.response.sampled] for sample in samples]},
        {"scores": np.array([sample.score for sample in samples], np.float32)},
        routing_of([sample.response for sample in samples]),
        [sample.response.observed for sample in samples] if any(each.response.observed for each in samples) else [],
        [sample.problem.images for sample in samples] if any(each.problem.images for each in samples) else [],
    )


def routing_of(responses: Sequence[Response]) -> list[np.ndarray] | None:
    """Return the experts of each response; None if the engine has not returned them for all."""
    found = [response.routing for response in responses if response.routing is not None]
    return found if found and len(found) == len(responses) else None


def _is_at_limit(response: Response, longest: int) -> bool:
    return len(response.response_ids) >= longest or response.finish == "length"


def log_probs_of_version(response: Response, version: int) -> np.ndarray:
    """Return the log-probabilities of a response's sampled tokens, fp32, NaN for tokens of other versions."""
    found = np.full(len(response.response_ids), np.nan, np.float32)
    stops = [*(first for first, _ in response.versions), len(found)][1:]
    for (first, own), stop in zip(response.versions, stops, strict=True):
        if own == version:
            found[first:stop] = response.log_probs[first:stop]
    return found[response.sampled]
