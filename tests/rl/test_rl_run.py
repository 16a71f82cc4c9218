"""Whole runs on one process: what is learnt, resumed, written down and replayed; a rollout engine that is behind."""

from __future__ import annotations

import contextlib
import io
import json
import resource
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from digits import RESPONSE, make_model, settings
from local_roles import read, run, run_a_step, run_file

from megatune.config.dialects.roll import read_roll
from megatune.config.rl.role import RouterReplay, Validation
from megatune.config.rl.rollout import Generating, PromptData
from megatune.config.rl.run import CheckpointCopies, RolloutMock
from megatune.config.rl.settings import ModelRole, RLSettings
from megatune.errors import ExitCode, MegatuneError
from megatune.rl.pipeline.collector import Collector
from megatune.rl.pipeline.run import _run_with_callbacks
from megatune.rl.pipeline.startup import check_resume
from megatune.rl.rewards.pool import RewardPool
from megatune.rl.rollout.builtin import BuiltinEngine
from megatune.rl.samples import Sample
from megatune.rl.worker.policy import PolicyWorker
from megatune.training.storage.store import list_checkpoints

LIMIT = 120.0
_GAE = {"adv_estimator": "gae", "norm_mean_type": None, "norm_std_type": None}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("digits"))


def _settings(model: Path, output: Path, steps: int, **run_part: Any) -> RLSettings:
    found = settings(model, output, steps=steps)
    return replace(found, run=found.run.model_copy(update={"logging_steps": 1, **run_part}))


def _seldom_updated(*args: Any, **run_part: Any) -> RLSettings:
    """Weights go to the engine at steps 0 and 3, and after checkpoints."""
    found = _settings(*args, **run_part)
    return replace(found, actor_train=found.actor_train.model_copy(update={"model_update_frequency": 3}))


def _records(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def _curve(output: Path) -> list[tuple[float, ...]]:
    """What no clock changes, by step."""
    names = ("step", "reward", "loss", "grad_norm", "actor/entropy", "response_length")
    return [tuple(record[name] for name in names) for record in _records(output) if "reward" in record]


def test_a_run_resumes_exactly_and_is_replayed(pool, model, tmp_path):
    whole, parts, again = (tmp_path / name for name in ("whole", "parts", "again"))
    recorded = {"rollout_mock": RolloutMock(enable=True, mode="dump", dump_dir=str(tmp_path / "rollouts"))}
    dumped = {"rollout_dump_dir": str(tmp_path / "dump"), "max_ckpt_to_keep": 1}
    pool.run(1, run, _seldom_updated(model, whole, 4, save_steps=2, **recorded, **dumped), model, limit=LIMIT)
    pool.run(1, run, _seldom_updated(model, parts, 2), model, limit=LIMIT)
    pool.run(1, run, _seldom_updated(model, parts, 4, resume_from_checkpoint=True), model, limit=LIMIT)
    assert [step for step, *_ in _curve(whole)] == [1, 2, 3, 4]
    assert _curve(parts) == _curve(whole)
    weights = [(each / "model.safetensors").read_bytes() for each in (whole, parts)]
    assert weights[0] == weights[1]
    # With no step left, the model is in the new folder nevertheless.
    there = {"resume_from_checkpoint": str(whole / "checkpoint-4")}
    pool.run(1, run, _seldom_updated(model, tmp_path / "elsewhere", 4, **there), model, limit=LIMIT)
    assert (tmp_path / "elsewhere/model.safetensors").read_bytes() == weights[0]
    lines = [json.loads(line) for line in (tmp_path / "dump" / "step-000004.jsonl").read_text().splitlines()]
    assert len(lines) == 80
    assert sum(line["score"] for line in lines) / 80 == pytest.approx(_curve(whole)[-1][1])
    # A damaged checkpoint is passed over, and replaced.
    (parts / "checkpoint-4/model.safetensors").write_bytes(weights[0][:-1])
    pool.run(1, run, _seldom_updated(model, parts, 4, save_steps=2, resume_from_checkpoint=True), model, limit=LIMIT)
    assert (parts / "checkpoint-4/model.safetensors").read_bytes() == weights[0]
    mocked = {"rollout_mock": RolloutMock(enable=True, mode="mock", dump_dir=str(tmp_path / "rollouts"))}
    pool.run(1, run, _seldom_updated(model, again, 4, **mocked), model, limit=LIMIT)
    assert _curve(again) == _curve(whole)
    assert (again / "model.safetensors").read_bytes() == weights[0]


def _with_critic(model: Path, output: Path, steps: int, **changes: Any) -> RLSettings:
    found = _settings(model, output, steps, **changes)
    engine = found.actor_train.settings
    own = engine.model_copy(update={"run": engine.run.model_copy(update={"output_dir": str(output / "critic")})})
    return replace(
        found,
        critic=ModelRole(name="critic", device_mapping=[0], settings=own, training=True, infer_batch_size=80),
        algorithm=found.algorithm.model_copy(update=_GAE),
    )


def test_a_run_with_a_critic_resumes_exactly(pool, model, tmp_path):
    of = partial(_with_critic, model)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pool.run(1, run, of(whole, 3, save_steps=2), model, limit=LIMIT)
    pool.run(1, run, of(parts, 2), model, limit=LIMIT)
    pool.run(1, run, of(parts, 3, resume_from_checkpoint=True), model, limit=LIMIT)
    assert _curve(parts) == _curve(whole)
    for name in ("model.safetensors", "critic/checkpoint-3/model.safetensors"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes()
    path = parts / "critic/checkpoint-3/model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(AssertionError, match="critic/checkpoint-3"):
        pool.run(1, run, of(parts, 4, resume_from_checkpoint=True), model, limit=LIMIT)


def test_a_synchronous_run_carries_responses_to_its_next_steps(pool, model, tmp_path):
    """Also over a resume: a response of two versions of the weights agrees with the trainer where that can be said."""

    def of(steps: int, **changes: Any) -> RLSettings:
        found = _settings(model, tmp_path, steps, **changes)
        carried = {"is_use_additional_prompts": True, "max_additional_running_prompts": 4, "partial_rollout_steps": 1}
        return replace(found, rollout=found.rollout.model_copy(update=carried))

    pool.run(1, run, of(3), model, limit=LIMIT)
    pool.run(1, run, of(6, resume_from_checkpoint=True), model, limit=LIMIT)
    steps = [record for record in _records(tmp_path) if "reward" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert [record["staleness"] > 0 for record in steps] == [False] + [True] * 5
    assert all(record["staleness"] <= 1 and record["log_prob_gap_mean"] < 1e-5 for record in steps)


def _regenerated(found: RLSettings, model: Path) -> list[tuple[int, int]]:
    """On one rank: of each step the version that responses may not be too old for, and the engines'."""
    with mock.patch.object(Collector, "regenerate_stale") as asked:
        run(found, model)
    return [call.args for call in asked.call_args_list]


def test_responses_become_too_old_in_steps_without_an_update_of_the_weights_too(pool, model, tmp_path):
    found = pool.run(1, _regenerated, _seldom_updated(model, tmp_path, 5), model, limit=LIMIT)
    assert found == [[(1, 1), (2, 1), (3, 1), (4, 4), (5, 4)]]


def test_an_asynchronous_run_replays_experts(pool, tmp_path):
    """Also of the few tokens that tell whether an engine has the weights."""
    model = make_model(tmp_path / "model", has_experts=True)
    found = _settings(model, tmp_path / "out", 3)
    found = replace(
        found,
        rollout=found.rollout.model_copy(update={"async_generation_ratio": 1.0}),
        actor_train=found.actor_train.model_copy(update={"router_replay": RouterReplay(mode="R3")}),
        actor_infer=found.actor_infer.model_copy(update={"device_mapping": [1], "return_routing": True}),
    )
    pool.run(1, run, found, model, limit=LIMIT)
    steps = [record for record in _records(tmp_path / "out") if "reward" in record]
    assert [record["staleness"] for record in steps] == [0, 1, 1]
    assert steps[0]["log_prob_gap_mean"] < 1e-5


def test_an_asynchronous_run_samples_greedily(pool, model, tmp_path):
    """The tokens that tell whether an engine has the weights, too: the trainer's temperature is 1 then."""
    found = _settings(model, tmp_path, 2)
    greedy = found.actor_infer.generating_args.model_copy(update={"do_sample": False, "temperature": 0.5})
    found = replace(
        found,
        rollout=found.rollout.model_copy(update={"async_generation_ratio": 1.0}),
        actor_infer=found.actor_infer.model_copy(update={"device_mapping": [1], "generating_args": greedy}),
    )
    pool.run(1, run, found, model, limit=LIMIT)
    steps = [record for record in _records(tmp_path) if "reward" in record]
    assert [record["staleness"] for record in steps] == [0, 1]
    assert steps[0]["log_prob_gap_mean"] < 1e-5


def test_a_reference_on_the_same_device_validation_and_several_updates_a_step(pool, model, tmp_path):
    found = _settings(model, tmp_path, 2, eval_steps=2)
    engine = found.actor_train.settings
    small = engine.model_copy(update={"batch": engine.batch.model_copy(update={"gradient_accumulation_steps": 2})})
    found = replace(
        found,
        actor_train=found.actor_train.model_copy(update={"settings": small}),
        reference=ModelRole(name="reference", device_mapping=[0], settings=engine, infer_batch_size=16),
        algorithm=found.algorithm.model_copy(
            update={
                "enable_reference": True,
                "enable_old_logprobs_recompute": True,
                "use_kl_loss": True,
                "kl_loss_coef": 0.01,
            }
        ),
        validation=Validation(generating_args=Generating(temperature=1.0, top_p=1.0, top_k=0, num_return_sequences=4)),
    )
    pool.run(1, run, found, model, limit=LIMIT)
    records = _records(tmp_path)
    evaluations = [record for record in records if "eval_accuracy" in record]
    assert [record["step"] for record in evaluations] == [0, 2]
    assert {"eval_pass@2", "eval_pass@4", "eval_reward"} <= evaluations[0].keys()
    first, second = (record for record in records if "reward" in record)
    assert first["actor/kl_loss"] == pytest.approx(0, abs=1e-9) or first["actor/kl_loss"] < second["actor/kl_loss"]
    assert second["actor/kl_loss"] > 0
    assert second["log_prob_gap"] < 1e-5
    assert {"seconds/reference", "seconds/old_log_probs", "seconds/rollout", "seconds/sync"} <= second.keys()


def test_a_critic_warms_up_and_weights_are_carried_every_other_step(pool, model, tmp_path):
    """And checkpoints are copied to a second place, and validation has lengths of its own."""
    found = _settings(
        model,
        tmp_path / "out",
        3,
        eval_steps=9,
        checkpoint_config=CheckpointCopies(output_dir=str(tmp_path / "copies")),
    )
    engine = found.actor_train.settings
    own = engine.model_copy(update={"run": engine.run.model_copy(update={"output_dir": str(tmp_path / "out/critic")})})
    algorithm = found.algorithm.model_copy(update={**_GAE, "critic_warmup": 1})
    found = replace(
        found,
        actor_train=found.actor_train.model_copy(update={"model_update_frequency": 2}),
        critic=ModelRole(name="critic", device_mapping=[0], settings=own, training=True, infer_batch_size=80),
        algorithm=algorithm,
        rollout=found.rollout.model_copy(update={"val_prompt_length": 2, "val_sequence_length": 32}),
        validation=Validation(generating_args=Generating(temperature=1.0, top_p=1.0, top_k=0)),
    )
    pool.run(1, run, found, model, limit=LIMIT)
    records = _records(tmp_path / "out")
    steps = [record for record in records if "reward" in record]
    assert ["seconds/train" in record for record in steps] == [False, True, True]
    assert [record["grad_norm"] > 0 for record in steps] == [False, True, True]
    assert all(record["critic/grad_norm"] > 0 for record in steps)
    assert ["seconds/sync" in record for record in steps] == [True, False, True]
    assert [record["staleness"] for record in steps] == [0, 1, 0]
    assert all(record["response_length"] <= RESPONSE for record in steps)
    lengths = [record["eval_response_length"] for record in records if "eval_response_length" in record]
    assert len(lengths) == 2
    assert min(lengths) > RESPONSE
    copied, saved = (folder / "checkpoint-3/model.safetensors" for folder in (tmp_path / "copies", tmp_path / "out"))
    assert copied.read_bytes() == saved.read_bytes()


def test_a_run_s_template_is_before_that_of_its_files(model, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"tag": "digits", "messages": [{"role": "user", "content": "1="}]}) + "\n")
    found = settings(model, tmp_path)
    data = PromptData(
        file_name=[str(rows)], messages="messages", template="base", domain_interleave_probs={"digits": 1.0}
    )
    rollout = found.rollout.model_copy(update={"prompt_length": 99, "global_template": "chatml"})
    found = replace(found, data=data, rollout=rollout)
    (problem,) = read(found, model)[0].all()
    assert problem.prompt == "<|im_start|>user\n1=<|im_end|>\n<|im_start|>assistant\n"


def _run_with_rewards_that_fail(settings: RLSettings, model: Path) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said, mock.patch.object(RewardPool, "score", _fail):
        run(settings, model)
    return said.getvalue()


async def _fail(pool: RewardPool, sample: Sample) -> None:
    sample.details = {"error": "no answer"}


def test_a_validation_says_why_rewards_failed(pool, model, tmp_path):
    found = replace(_settings(model, tmp_path, 1), validation=Validation(generating_args=Generating(temperature=1.0)))
    (said,) = pool.run(1, _run_with_rewards_that_fail, found, model, limit=LIMIT)
    assert "the reward of digits failed for 10 samples, which count as wrong; problem 0: no answer" in said
    assert "the reward of digits failed for 80 samples, which are left out; problem" in said


def test_a_run_that_is_interrupted_says_so(tmp_path):
    driver = mock.Mock(run=mock.Mock(side_effect=KeyboardInterrupt), progress=mock.Mock(step=3))
    reports = mock.Mock()
    with pytest.raises(KeyboardInterrupt):
        _run_with_callbacks(driver, reports, _settings(tmp_path, tmp_path, 4))
    (summary,) = reports.callbacks.on_train_end.call_args.args
    assert (summary.outcome, summary.step) == ("interrupted", 3)


def _run_on_a_full_disk(settings: RLSettings, model: Path) -> int:
    """Have no room for a file as large as the model where it is saved; memory that weights travel through is none."""
    save, (soft, hard) = PolicyWorker.save, resource.getrlimit(resource.RLIMIT_FSIZE)

    def full(*arguments: Any, **named: Any) -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        return save(*arguments, **named)

    try:
        with (
            mock.patch.object(PolicyWorker, "save", full),
            pytest.raises(MegatuneError, match=r"checkpoint-2(.|\n)*File too large") as caught,
        ):
            run(settings, model)
        return int(caught.value.exit_code)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_at_a_checkpoint(pool, model, tmp_path):
    once = replace(_settings(model, tmp_path, 1, eval_steps=0), validation=Validation())
    pool.run(1, run, once, model, limit=LIMIT)
    assert not any("eval_reward" in record for record in _records(tmp_path))
    with pytest.raises(MegatuneError, match="has checkpoint-1 of an earlier run"):  # before anything is started
        check_resume(once)
    with pytest.raises(MegatuneError, match="no folder 'none'"):
        check_resume(_settings(model, tmp_path, 2, resume_from_checkpoint="none"))
    kept = {path: path.read_bytes() for path in (tmp_path / "checkpoint-1").rglob("*") if path.is_file()}
    again = _settings(model, tmp_path, 2, resume_from_checkpoint=True)
    assert pool.run(1, _run_on_a_full_disk, again, model, limit=LIMIT) == [ExitCode.CANNOT_WRITE]
    assert {path: path.read_bytes() for path in kept} == kept
    assert not (tmp_path / "checkpoint-2").exists()


def test_a_disk_that_is_full_between_the_checkpoints_of_critic_and_policy(pool, model, tmp_path):
    of = partial(_with_critic, model, tmp_path, max_ckpt_to_keep=1)
    pool.run(1, run, of(1), model, limit=LIMIT)
    again = of(2, resume_from_checkpoint=True)
    assert pool.run(1, _run_on_a_full_disk, again, model, limit=LIMIT) == [ExitCode.CANNOT_WRITE]
    pool.run(1, run, again, model, limit=LIMIT)
    folders = [[each.name for each in list_checkpoints(folder)] for folder in (tmp_path, tmp_path / "critic")]
    assert folders == [["checkpoint-2"], ["checkpoint-1", "checkpoint-2"]]


def _run_behind(settings: RLSettings, model: Path) -> int:
    """Lose every update but the first."""
    finish = BuiltinEngine._finish

    def lose(self: BuiltinEngine, version: int, *, whole: bool) -> None:
        finish(self, version, whole=whole and version == 1)

    with mock.patch.object(BuiltinEngine, "_finish", lose):
        return run(settings, model)


def _distilled(folder: Path, model: Path, loss: str, rate: float) -> Path:
    """Write a file of four steps, and a teacher."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{digit}=", "domain": "x"}) + "\n" for digit in range(10)))
    teacher = str(make_model(folder / "teacher", seed=1))

    def role(strategy: str, **more: Any) -> dict[str, Any]:
        parts = {"device_mapping": [0], "strategy_args": {"strategy_name": strategy}, "model_args": {"dtype": "fp32"}}
        return {**parts, **more}

    training = {"learning_rate": rate, "per_device_train_batch_size": 16}
    data = {"prompt": "prompt", "file_name": [str(rows)]}
    sampling = {"top_p": 1.0, "top_k": 0, "temperature": 1.0}
    file = {"pretrain": str(model), "output_dir": str(folder / "out"), "max_steps": 4, "is_pure_opd": True}
    file |= {"rollout_batch_size": 8, "num_return_sequences_in_group": 2, "prompt_length": 2, "response_length": 8}
    file["student_train"] = role("megatron_train", training_args=training, data_args=data)
    file["student_infer"] = role("builtin", generating_args=sampling)
    file["teacher"] = role("hf_infer", model_args={"dtype": "fp32", "model_name_or_path": teacher})
    if loss == "jsd":
        file |= {"opd_loss": "jsd", "teacher": {"model_args": {"model_name_or_path": teacher}}}
    (folder / "run.yaml").write_text(json.dumps(file))
    return folder / "run.yaml"


@pytest.mark.parametrize(
    ("loss", "distance", "rate"),
    [("policy_gradient", "teacher_kl", 1e-2), ("jsd", "teacher_divergence", 1e-3)],
)
def test_a_distillation_has_no_rewards_and_says_how_far_the_teacher_is(pool, model, tmp_path, loss, distance, rate):
    file = _distilled(tmp_path, model, loss, rate)
    pool.run(1, run_file, read_roll(file).require_valid(), limit=LIMIT)
    records = _records(tmp_path / "out")
    assert not any({"reward", "accuracy"} & record.keys() for record in records)
    distances = [record[distance] for record in records]
    assert len(distances) == 4
    assert 0 < distances[-1] < distances[0]


@pytest.mark.parametrize(("loss", "change"), [("policy_gradient", "swapped"), ("jsd", "swapped"), ("jsd", "renamed")])
def test_a_teacher_of_another_tokenizer_is_refused(model, tmp_path, loss, change):
    settings = read_roll(_distilled(tmp_path, model, loss, 1e-3)).require_valid()
    tokenizer = tmp_path / "teacher/tokenizer.json"
    content = json.loads(tokenizer.read_text())
    known = content["model"]["vocab"]
    if change == "swapped":
        known["1"], known["2"] = known["2"], known["1"]
    else:
        known["1."] = known.pop("1")
    tokenizer.write_text(json.dumps(content))
    with pytest.raises(MegatuneError, match="has another tokenizer than the policy") as caught:
        read(settings, model)
    other = {"swapped": "'2'", "renamed": "'1.'"}[change]
    assert str(caught.value.findings[0].why).endswith(f" of the policy is '1', and of the teacher {other}")


def test_an_engine_that_is_behind_ends_the_run(pool, model, tmp_path):
    found = _settings(model, tmp_path, 6)
    kept = found.actor_infer.model_copy(update={"sleep_level": 1})  # so that it has older weights to sample from
    with pytest.raises(AssertionError, match="does not sample from version"):
        pool.run(1, _run_behind, replace(found, actor_infer=kept), model, limit=LIMIT)


def test_a_run_that_is_stopped_says_what_resumes_it(pool, model, tmp_path):
    for asked, said in ((False, "the same command with resume_from_checkpoint=true"), (True, "the same command")):
        own = _settings(model, tmp_path, 3, resume_from_checkpoint=asked)
        ((code, printed),) = pool.run(1, run_a_step, own, model, limit=LIMIT)
        assert code == ExitCode.STOPPED
        assert f"stopped on request after step {1 + asked}; {said} resumes from there" in printed
