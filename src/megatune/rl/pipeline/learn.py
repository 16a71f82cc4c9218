"""One step's updates, from scored groups: log-probabilities, values, advantages, training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatune.config.rl.settings import RLSettings
from megatune.objectives.policy.prepare import AlgorithmState, Prepared, prepare
from megatune.objectives.policy.samples import StepSamples
from megatune.rl.cluster.timeline import Phases
from megatune.rl.pipeline.groups import Group
from megatune.rl.pipeline.roles import PARTS, DeviceScheduler, ModelGroup
from megatune.rl.problems import DIFFICULTY
from megatune.rl.rollout.mismatch import Mismatch, check_mismatch, is_inlier, mismatch_of
from megatune.rl.samples import Response, Rollouts, Sample
from megatune.rl.worker.training import Trained


@dataclass(frozen=True, slots=True)
class Learned:
    """What a step's updates came to.

    Attributes:
        trained: of the policy; None where it was left out.
        mismatch: of trainer and rollout engine, over tokens that the weights of this step sampled; None without any.
        skipped: why the policy was not trained; "" where it was.
    """

    trained: Trained | None
    mismatch: Mismatch | None
    metrics: Mapping[str, float]
    skipped: str = ""


class Learner:
    """Learns from samples.

    Args:
        teachers: by name.
    """

    def __init__(
        self,
        settings: RLSettings,
        scheduler: DeviceScheduler,
        policy: ModelGroup,
        reference: ModelGroup | None,
        critic: ModelGroup | None,
        teachers: Mapping[str, ModelGroup],
    ) -> None:
        self._settings, self._scheduler = settings, scheduler
        self._policy, self._reference, self._critic, self._teachers = policy, reference, critic, teachers
        self.state = AlgorithmState(settings.algorithm)
        precision = settings.actor_train.settings.precision
        dtypes = {settings.actor_infer.dtype, "bf16" if precision.bf16 else "fp16" if precision.fp16 else "fp32"}
        self.dtype = next(dtype for dtype in ("bf16", "fp16", "fp32") if dtype in dtypes)

    def learn(self, groups: Sequence[Group], step: int, phases: Phases) -> Learned:
        """Train on a step's samples.

        Args:
            step: counted from 0; the weights before its updates are of version step + 1.

        Raises:
            MegatuneError: NOT_FINITE, where the rollout engine has other weights than that version, or gradients are
                not finite.
        """
        samples, version = [sample for group in groups for sample in group.samples], step + 1
        rollouts = rollouts_of(samples)
        known = self._known(samples, rollouts, phases)
        fresh = [sampled_by(sample.response, version) for sample in samples]
        mismatch = self._check(samples, fresh, known.get("old_log_probs"), version, phases)
        with phases("advantages"):
            prepared = self._prepared(samples, rollouts, known, fresh)
        if not prepared.num_tokens:
            return Learned(None, mismatch, prepared.metrics, why_nothing(prepared.metrics, len(samples)))
        of_tokens = {name: values for name, values in known.items() if name != "teachers"}
        full = replace(rollouts, per_token={**rollouts.per_token, **prepared.per_token, **of_tokens})
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
        return Learned(trained, mismatch, {**metrics, **(trained.metrics if trained else {})}, skipped)

    def log_probs(self, rollouts: Rollouts) -> list[np.ndarray]:
        """Compute the policy's log-probabilities, of the weights as they are."""
        return self._ask(self._policy, "log_probs", rollouts)

    def _ask(self, model: ModelGroup, method: str, rollouts: Rollouts) -> list[np.ndarray]:
        self._scheduler.compute(model, "weights")
        return model.ask(method, rollouts)

    def save(self, model: ModelGroup, step: int, beside: Mapping[str, bytes] | None = None) -> Path:
        """Save a checkpoint of a model that is trained, and return where it is."""
        self._scheduler.compute(model, *PARTS)
        return Path(model.call("save", step, beside)[0])

    def _known(self, samples: Sequence[Sample], rollouts: Rollouts, phases: Phases) -> dict[str, Any]:
        """Compute what the algorithm needs of the models."""
        algorithm = self._settings.algorithm
        known: dict[str, Any] = {}
        if algorithm.enable_reference:
            with phases("reference"):
                if self._reference is not None:
                    found = self._ask(self._reference, "log_probs", rollouts)
                else:
                    found = self._ask(self._policy, "reference_log_probs", rollouts)
                known["reference_log_probs"] = found
        if self._teachers:
            with phases("teachers"):
                known["teachers"] = {name: self._taught(group, samples) for name, group in self._teachers.items()}
        if algorithm.enable_old_logprobs_recompute:
            with phases("old_log_probs"):
                known["old_log_probs"] = self.log_probs(rollouts)
        if self._critic is not None:
            with phases("values"):
                known["values"] = self._ask(self._critic, "values", rollouts)
        return known

    def _taught(self, teacher: ModelGroup, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Ask a teacher about the samples of its tags; an empty array stands for each of the others."""
        tags = teacher.role.tag_included
        places = [place for place, sample in enumerate(samples) if not tags or sample.problem.tag in tags]
        found = [np.zeros(0, np.float32) for _ in samples]
        if places:
            own = rollouts_of([samples[place] for place in places])
            for place, values in zip(places, self._ask(teacher, "log_probs", own), strict=True):
                found[place] = values
        return found

    def _check(
        self,
        samples: Sequence[Sample],
        fresh: list[np.ndarray],
        old: list[np.ndarray] | None,
        version: int,
        phases: Phases,
    ) -> Mismatch | None:
        """Compare the trainer's log-probabilities with the engine's, over tokens that this version sampled."""
        if old is None:
            ready = self._policy.ready
            assert ready is not None
            most = ready.data_parallel_size * self._policy.role.infer_batch_size
            places = [place for place, values in enumerate(fresh) if not np.isnan(values).all()][:most]
            if not places:
                return None
            with phases("gap"):
                old = self.log_probs(rollouts_of([samples[place] for place in places]))
            fresh = [fresh[place] for place in places]
        return self.checked(old, fresh, version)

    def checked(self, trainer: list[np.ndarray], rollout: list[np.ndarray], version: int) -> Mismatch | None:
        """Measure the mismatch, and refuse one whose mean is above its bound; see `mismatch_of`."""
        found = mismatch_of(trainer, rollout, self.dtype)
        if found is not None:
            check_mismatch(found, self.dtype, version, self._settings.run.max_log_prob_gap)
        return found

    def _prepared(
        self, samples: Sequence[Sample], rollouts: Rollouts, known: Mapping[str, Any], fresh: list[np.ndarray]
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
            **known,
        )
        coefs = {name: group.role.opd_kl_coef for name, group in self._teachers.items()}
        given = {name: coef for name, coef in coefs.items() if coef is not None}
        prepared = prepare(step, algorithm, self.state, given)
        if "old_log_probs" in known:
            for mask, trainer, rollout in zip(prepared.mask, known["old_log_probs"], fresh, strict=True):
                mask *= is_inlier(trainer, rollout, self.dtype)
        return prepared


def why_nothing(metrics: Mapping[str, float], samples: int) -> str:
    """Say why no token of a step counts: which share of the samples each mask has left."""
    masks = {
        name.rpartition("/")[2].removesuffix("_ratio"): share
        for name, share in metrics.items()
        if name.endswith("_mask_ratio") and share < 1
    }
    kept = ", ".join(f"{name} keeps {share:.0%}" for name, share in masks.items() if name != "final_mask")
    return f"no token of {samples} samples counts: {kept or 'no sample has a score, or filters of the correction'}"


def rollouts_of(samples: Sequence[Sample]) -> Rollouts:
    """Return samples as the trainer takes them."""
    return Rollouts(
        [np.concatenate([sample.problem.prompt_ids, sample.response.response_ids]) for sample in samples],
        [len(sample.problem.prompt_ids) for sample in samples],
        {"rollout_log_probs": [sample.response.log_probs[sample.response.sampled] for sample in samples]},
        {"scores": np.array([sample.score for sample in samples], np.float32)},
        routing_of([sample.response for sample in samples]),
        [sample.response.observed for sample in samples] if any(each.response.observed for each in samples) else [],
        [sample.problem.shown for sample in samples] if any(each.problem.shown for each in samples) else [],
    )


def routing_of(responses: Sequence[Response]) -> list[np.ndarray] | None:
    """Return the experts of each response; None where the engine has not returned those of all."""
    found = [response.routing for response in responses if response.routing is not None]
    return found if found and len(found) == len(responses) else None


def _is_at_limit(response: Response, longest: int) -> bool:
    return len(response.response_ids) >= longest or response.finish == "length"


def sampled_by(response: Response, version: int) -> np.ndarray:
    """Return log-probabilities of a response's sampled tokens, fp32, NaN for those that other weights sampled."""
    found = np.full(len(response.response_ids), np.nan, np.float32)
    stops = [*(first for first, _ in response.versions), len(found)][1:]
    for (first, own), stop in zip(response.versions, stops, strict=True):
        if own == version:
            found[first:stop] = response.log_probs[first:stop]
    return found[response.sampled]
