"""What a step makes of its samples before training: masks of outliers and of the longest, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from digits import settings

from megatune.config.rl.settings import RLSettings
from megatune.objectives.policy.prepare import AlgorithmState, prepare
from megatune.objectives.policy.samples import StepSamples
from megatune.rl.pipeline.learn import Learner, LearnResult, explain_no_tokens, rollouts_of
from megatune.rl.pipeline.report import Reports
from megatune.rl.rollout.mismatch import mismatch_of
from megatune.rl.samples import Problem, Response, Sample


def _settings(**algorithm: object) -> RLSettings:
    found = settings(Path("model"), Path("output"), steps=1)
    return replace(found, algorithm=found.algorithm.model_copy(update=algorithm))


def _sample(place: int, tokens: int, finish: str = "stop") -> Sample:
    problem = Problem(str(place), "digits", "digits", [], np.array([1, 2]), {"difficulty": "hard"})
    log_probs = np.full(tokens, -1.0, np.float32)
    response = Response(str(place), np.arange(tokens), log_probs, finish, ((0, 1),))  # type: ignore[arg-type]
    return Sample(problem, 0, response, "x", float(place))


def _learner(found: RLSettings) -> Learner:
    return Learner(found, None, {"actor_train": None})  # type: ignore[arg-type, dict-item]


def test_outliers_of_the_mismatch_and_responses_of_the_greatest_length_do_not_train() -> None:
    found = _settings(max_len_mask=True)
    longest = found.rollout.max_response_length
    samples = [_sample(0, 3), _sample(1, 3), _sample(2, longest)]  # the last one ends exactly at the limit
    rollouts = rollouts_of(samples)
    rollout = rollouts.per_token["rollout_log_probs"]
    old = [each.copy() for each in rollout]
    old[1][2] += 1.0
    fresh = [rollout[0], rollout[1], np.full(longest, np.nan, np.float32)]
    prepared = _learner(found)._prepare(samples, rollouts, {"old_log_probs": old}, fresh)
    assert [mask.tolist() for mask in prepared.mask] == [[1, 1, 1], [1, 1, 0], [0] * longest]


def test_a_difficulty_is_read_where_it_weighs() -> None:
    samples = [_sample(0, 2), _sample(1, 2)]
    rollouts = rollouts_of(samples)
    fresh = rollouts.per_token["rollout_log_probs"]
    assert _learner(_settings())._prepare(samples, rollouts, {}, fresh).num_tokens == 4  # "hard" is no number


def test_a_step_that_trains_nothing_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    found = _settings(max_len_mask=True, enable_old_logprobs_recompute=False)
    samples = [_sample(place, found.rollout.max_response_length, "length") for place in range(2)]
    rollouts = rollouts_of(samples)
    reports = object.__new__(Reports)  # without the files that it writes
    prepared = _learner(found)._prepare(samples, rollouts, {}, rollouts.per_token["rollout_log_probs"])
    assert not prepared.num_tokens
    reports._skipped = 0
    for step in (1, 2, 3):
        reports._report_training(step, LearnResult(None, None, {}, explain_no_tokens(prepared.metrics, 2)))
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "  step 1 has not trained the policy: no token of 2 samples counts: max_len_mask keeps 0%"
    assert printed[-1].startswith("  warning: 3 steps in a row")
    assert len(printed) == 4
    mismatch = mismatch_of([np.array([0.0, 3.0])], [np.zeros(2, np.float32)], "bf16")
    reports._report_training(4, LearnResult(None, mismatch, {}))
    assert "differ much in 1 of 2 tokens, by 3 at most" in capsys.readouterr().out


def test_distillation_says_how_far_the_teacher_is() -> None:
    algorithm = _settings(is_pure_opd=True, adv_estimator="reinforce", gamma=0.0).algorithm
    old = [np.array([-1.0, -2.0], np.float32), np.array([-1.0], np.float32)]
    samples = StepSamples(
        scores=np.zeros(2), lengths=np.array([2, 1]), groups=np.array([0, 1]), domains=["a", "a"],
        at_limit=np.zeros(2, bool), rollout_log_probs=old, old_log_probs=old,
        teachers={"one": [np.array([-2.0, -5.0], np.float32), np.zeros(0, np.float32)]},
    )  # fmt: skip
    found = prepare(samples, algorithm, AlgorithmState(algorithm), {"one": 0.5})
    assert found.metrics["teacher_kl"] == 2.0  # (1 + 3) / 2: of the tokens that it teaches, whatever their weight
