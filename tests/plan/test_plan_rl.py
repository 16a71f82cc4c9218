"""Plans of reinforcement learning: against published steps, and what holds of every one of them."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from activation_cases import CASES, REWARD
from measured_memory import measure_log_probs
from transformers import AutoModelForCausalLM

from megatune.cli.main import main
from megatune.config.rl.settings import InferRole, RewardRole
from megatune.config.settings import with_settings
from megatune.errors import ExitCode
from megatune.families import load_architecture
from megatune.plan.catalogue import find_machine, find_model
from megatune.plan.memory.estimate import stage_memory
from megatune.plan.rl.answer import UNCERTAINTY, plan_rl
from megatune.plan.rl.pages import advice
from megatune.plan.rl.question import Lengths
from megatune.plan.rl.roles import (
    OLD_PASS,
    REFERENCE_PASS,
    SAMPLE,
    SCORES,
    SYNC,
    TRAIN,
    engine_memory,
    forward_case,
    forward_memory,
    key_value_bytes,
    memory_of_roles,
    sync_bytes,
    training_case,
)
from megatune.rl.rollout.kv_cache import kv_bytes_per_token, kv_cache_budget

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import itertools

from planner.published_rl import ROWS, error, question_of

COLOCATED = next(row for row in ROWS if row.name == "v0.6 Qwen3-30B-A3B")
APART = next(row for row in ROWS if row.name == "v0.6 Qwen3-30B-A3B, 1 off")
FILE = """
pretrain: Qwen/Qwen2.5-7B
max_steps: 500
rollout_batch_size: 64
num_return_sequences_in_group: 8
prompt_length: 2048
response_length: 4096
adv_estimator: grpo
use_kl_loss: true
kl_loss_coef: 0.001
actor_train:
  device_mapping: list(range(0,8))
  model_args: {dtype: bf16}
  training_args: {learning_rate: 1.0e-6, per_device_train_batch_size: 1, gradient_accumulation_steps: 64}
  data_args: {template: qwen2_5, messages: messages, file_name: [data/a.jsonl], domain_interleave_probs: {math_rule: 1}}
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {tensor_model_parallel_size: 2, sequence_parallel: true, use_distributed_optimizer: true}
actor_infer:
  device_mapping: list(range(0,8))
  generating_args: {temperature: 1.0, top_p: 1.0, top_k: -1}
  model_args: {dtype: bf16}
  strategy_args: {strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.6, tensor_parallel_size: 2}}
reference:
  device_mapping: list(range(0,8))
  model_args: {dtype: bf16}
  strategy_args: {strategy_name: megatron_infer, strategy_config: {tensor_model_parallel_size: 1}}
rewards:
  math_rule:
    worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker
    tag_included: [math]
"""


def test_two_of_three_published_steps_lie_within_what_every_plan_says() -> None:
    errors = [error(row)[1] for row in ROWS]
    inside = [1 / (1 + UNCERTAINTY) <= 1 + each <= 1 + UNCERTAINTY for each in errors]
    assert sum(inside) >= 2 / 3 * len(errors)
    assert statistics.median(map(abs, errors)) < 0.3
    assert max(errors) < 0  # as the plan says: all took longer


def test_a_judge_on_devices_of_a_trainer_leaves_them_while_it_trains() -> None:
    question = question_of(APART)
    settings = question.settings
    where = settings.actor_train.device_mapping
    judge = settings.actor_infer.model_copy(update={"name": "reward_model", "device_mapping": where})
    models = {**question.models, "reward_model": question.models["actor_infer"]}
    beside = tuple(device + 1000 for device in judge.devices)
    shared, alone = (
        next(
            role.by_stage[0]
            for role in memory_of_roles(replace(question, settings=replace(settings, reward_model=each), models=models))
            if role.role == "reward_model"
        )
        for each in (judge, judge.model_copy(update={"device_mapping": [*beside]}))
    )
    assert shared.parts[TRAIN].keys() == {"framework"}
    assert shared.parts[SAMPLE]["weights"] == shared.offloaded > 0
    assert alone.parts[TRAIN] == alone.parts[SAMPLE] == shared.parts[SAMPLE]


def test_a_reward_model_has_the_devices_while_it_scores() -> None:
    question = question_of(COLOCATED)
    settings, reference = question.settings, question.settings.reference
    assert reference is not None
    model = reference.model_copy(update={"name": "rewards.help"})
    rewards = {"help": RewardRole("help", "reward_model", model=model)}
    scored = replace(question.models["reference"], architecture=REWARD)
    models = {**question.models, "rewards.help": scored}
    question = replace(question, settings=replace(settings, rewards=rewards), models=models)
    (held,) = (role.by_stage[0] for role in memory_of_roles(question) if role.role == "rewards.help")
    assert held.parts[SCORES]["weights"] == held.offloaded > 0
    assert held.parts[SAMPLE] == held.parts[TRAIN] == held.parts[REFERENCE_PASS]
    assert "weights" not in held.parts[SAMPLE]
    seconds = plan_rl(question).seconds.phases
    assert list(seconds).index(SCORES) == list(seconds).index(SAMPLE) + 1
    assert 0 < seconds[SCORES] < seconds[REFERENCE_PASS]  # of two layers


def test_layouts_of_published_steps_are_found_to_fit() -> None:
    fits = [plan_rl(question_of(row)).fits for row in ROWS]
    assert sum(fits) >= len(ROWS) - 2


@pytest.mark.parametrize("mean", [300.0, 1000.0, 2000.0, 3900.0])
def test_lengths_have_the_mean_that_was_asked_for(mean: float) -> None:
    lengths = Lengths(512, 4096, 100, mean)
    assert sum(share * width for _, share, width in lengths.steps()) == pytest.approx(mean, rel=0.01)
    assert lengths.mean_longest(1) == pytest.approx(100 + mean, rel=0.01)
    assert 100 + mean < lengths.mean_longest(8) < 100 + 4096
    assert lengths.share_cut == pytest.approx(1 - mean * lengths.hazard)  # of ∫ exp(-h t) dt


def test_the_cache_is_what_the_share_of_the_device_leaves() -> None:
    question = question_of(COLOCATED)
    model, machine, infer = question.models["actor_infer"], question.machine, question.settings.actor_infer
    # 48 layers of 4 heads of 128 keys and as many values, 2 bytes each, on two devices.
    assert key_value_bytes(model.architecture, 2) == 48 * 2 * 4 * 128 * 2
    held = engine_memory(infer, model, machine, question.lengths, samples=2048, max_running=10**6)
    graphs = 2**30
    assert held.total - graphs == pytest.approx(0.6 * machine.device.memory, rel=1e-6)
    assert held.cached_tokens == held.cache // (48 * 2 * 4 * 128 * 2 // 2)
    assert held.sequences == int(held.cached_tokens // question.lengths.mean) < 2048 / infer.num_engines
    latent = find_model("DeepSeek-V3").architecture
    assert key_value_bytes(latent, 2) == 61 * (512 + 64) * 2


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "deepseek_v3"])
def test_the_built_in_engine_keeps_what_is_planned_of_a_token(model_dir, family: str) -> None:
    """Of latent attention the latent, not the keys and values of every head."""
    folder = model_dir(family)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert kv_bytes_per_token(model) == key_value_bytes(load_architecture(folder), 4)


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Llama-3.1-8B"])
def test_the_built_in_engine_takes_the_cache_that_is_planned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, lengths, model = find_machine("h200"), Lengths(1024, 7168, 512, 2048), find_model(name)
    role = InferRole(device_mapping=[0], model_name_or_path=name, engine="builtin")
    planned = engine_memory(role, model, machine, lengths, samples=10**6, max_running=10**6)
    free = machine.device.memory - planned.weights - planned.framework
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, machine.device.memory))
    of_sample = lengths.longest * key_value_bytes(model.architecture, 2)
    assert planned.sequences == kv_cache_budget(torch.device("cuda")) // of_sample
    assert planned.cache == planned.sequences * of_sample


def test_roles_take_turns_only_where_they_share_devices() -> None:
    shared, apart = plan_rl(question_of(COLOCATED)), plan_rl(question_of(APART))
    (group,) = shared.groups
    of = {held.role: held for held in group.held}
    assert set(of["actor_train"].parts[SAMPLE]) == set(of["actor_infer"].parts[TRAIN]) == {"framework"}
    assert {"weights", "activations"} <= set(of["actor_train"].parts[OLD_PASS])
    assert "gradients" not in of["actor_train"].parts[OLD_PASS]
    assert set(of["actor_infer"].parts[SYNC]) == {"weights", "framework", "buckets"}  # the cache wakes after it
    assert shared.host_bytes > 0
    # The reference takes turns with the trainer, the engines with nobody.
    engines, *trainers = apart.groups
    assert engines.total(TRAIN) == engines.total(SAMPLE) < engines.total(SYNC)
    assert {held.role for each in trainers for held in each.held} == {"actor_train", "reference"}
    assert apart.seconds.overlaps
    assert not shared.seconds.overlaps
    assert apart.seconds.total == max(apart.seconds.rollout_side, apart.seconds.trainer_side)
    assert shared.seconds.total == sum(shared.seconds.phases.values())


def test_a_bucket_is_no_larger_than_all_that_is_sent() -> None:
    question = question_of(COLOCATED)
    for megabytes, nbytes in ((1024, 2**30), (10**6, sync_bytes(question))):
        run = question.settings.run.model_copy(update={"model_update_buffer_size_mb": megabytes})
        found = memory_of_roles(replace(question, settings=replace(question.settings, run=run)))
        held = {role.role: role.by_stage[0].parts[SYNC].get("buckets") for role in found}
        assert held == {"actor_train": 3 * nbytes, "reference": None, "actor_infer": nbytes}


def test_training_is_planned_as_megatune_train_plans_it() -> None:
    question = question_of(COLOCATED)
    case = training_case(question, question.settings.actor_train, longest=True)
    group, train = plan_rl(question).groups[0], stage_memory(case)[0]
    (held,) = (each for each in group.held if each.role == "actor_train")
    assert held.total(TRAIN) == train.total
    forward = forward_memory(forward_case(question, question.settings.reference, longest=True))[0]  # type: ignore[arg-type]
    assert forward.gradients == forward.optimizer_state == 0
    assert train.weights == pytest.approx(forward.weights, rel=1e-3)
    assert forward.activations < train.activations / 5  # twice the tokens, but nothing is kept


def test_the_advice_makes_it_fit() -> None:
    row = replace(COLOCATED, share=0.97)
    found = plan_rl(question_of(row))
    assert not found.fits
    assert found.fullest[1] in (SAMPLE, SYNC)
    is_enough, (text,) = advice(found)
    assert is_enough
    share = float(text.split("gpu_memory_utilization: ")[1].split(":")[0])
    after = plan_rl(question_of(replace(row, share=share)))
    assert max(each.total(found.fullest[1]) for each in after.groups) <= after.question.machine.device.memory
    tight = plan_rl(question_of(replace(COLOCATED, share=0.35)))  # weights alone take more
    assert not tight.has_cache
    assert "gpu_memory_utilization" in advice(tight)[1][0]


def test_what_training_may_save_is_planned_with_all_other_phases() -> None:
    """Training fits with more recomputation, and the rollouts still do not fit."""
    question = question_of(replace(COLOCATED, share=0.97))
    batch = {"batch.per_device_train_batch_size": 16}
    role = question.settings.actor_train
    role = role.model_copy(update={"settings": with_settings(role.settings, batch), "packed_tokens_train": None})
    found = plan_rl(replace(question, settings=question.settings.with_role(role)))
    assert found.fullest[1] == TRAIN
    is_enough, texts = advice(found)
    assert not is_enough
    assert all(text.startswith("actor_train: ") for text in texts)


def test_fewer_rows_at_once_are_advised_where_a_forward_pass_does_not_fit() -> None:
    question = question_of(ROWS[0])
    assert question.settings.reference is not None
    changes = {"packed_tokens_forward": None, "infer_batch_size": 512}
    reference = question.settings.reference.model_copy(update=changes)
    found = plan_rl(replace(question, settings=replace(question.settings, reference=reference)))
    assert found.fullest[1] == REFERENCE_PASS
    is_enough, (text,) = advice(found)
    assert is_enough
    size = int(text.split("infer_batch_size: ")[1].split(":")[0])
    fewer = replace(question.settings, reference=reference.model_copy(update={"infer_batch_size": size}))
    assert plan_rl(replace(question, settings=fewer)).fits


def test_more_sequences_at_once_cost_less_each_until_the_cache_is_full() -> None:
    totals = [plan_rl(question_of(replace(COLOCATED, group=group))).seconds.rollout for group in (8, 16, 32, 128)]
    assert all(a.decode < b.decode < 2 * a.decode for a, b in itertools.pairwise(totals[:3]))
    assert totals[3].full > 0
    assert totals[3].decode > 2.5 * totals[2].decode


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rlvr.yaml"
    path.write_text(FILE)
    return path


def test_a_file_is_planned(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(file), "--gpu", "h100", "--response_tokens", "1500"]) == ExitCode.DONE
    said = capsys.readouterr().out
    for words in ("actor_infer", "It fits", REFERENCE_PASS, "rollout", "sync", "tp2 dp4", "vllm, 4 engines of 2"):
        assert words in said
    command = [
        "plan",
        str(file),
        "--gpu",
        "a100-40g",
        "--json",
        "actor_train.training_args.gradient_accumulation_steps=32",
    ]
    assert main(command) == ExitCode.OUT_OF_MEMORY
    document = json.loads(capsys.readouterr().out)
    assert document["fullest"]["phase"] == TRAIN
    assert main([word for word in command if word != "--json"]) == ExitCode.OUT_OF_MEMORY
    assert "What helps most" in capsys.readouterr().out
    assert document["seconds"]["total"] == pytest.approx(
        math.fsum(value for name, value in document["seconds"].items() if name != "total")
    )


def test_a_teacher_lies_beside_the_policy(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = FILE.partition("reference:")[0].replace("use_kl_loss: true\nkl_loss_coef: 0.001", "is_pure_opd: true")
    file.write_text(text.replace(", domain_interleave_probs: {math_rule: 1}", "").replace("grpo", "reinforce"))
    engine = "strategy_config: {tensor_model_parallel_size: 2, sequence_parallel: true}"
    apart = [
        *("teacher.device_mapping=list(range(0,8))", "teacher.model_args.dtype=bf16", "teacher.infer_batch_size=1"),
        f"teacher.strategy_args={{strategy_name: megatron_infer, {engine}}}",
    ]

    def planned(size: int, *words: str) -> tuple[dict[str, Any], dict[str, float]]:
        model = f"teacher.model_args.model_name_or_path=Qwen/Qwen2.5-{size}B"
        main(["plan", str(file), "--gpu", "h200", "--json", model, *words])
        document = json.loads(capsys.readouterr().out)
        return document["devices"][0]["roles"]["actor_train"], document["seconds"]

    (small, fast), (large, slow) = (planned(size, "opd_loss=jsd") for size in (7, 32))
    assert small["phases"][TRAIN]["teacher_weights"] == small["phases"][TRAIN]["weights"]
    for phase in (SYNC, TRAIN):
        grown = large["phases"][phase]["teacher_weights"] - small["phases"][phase]["teacher_weights"]
        assert large["offloaded"] - small["offloaded"] == grown > 20e9
    assert "teacher_weights" not in large["phases"][SAMPLE]
    # Of an update a rank keeps 64 samples of at most 6,144 tokens, half of each with sequence parallelism.
    states = [held["phases"][TRAIN]["teacher_states"] for held in (small, large)]
    assert states == [64 * 6144 // 2 * hidden * 2 for hidden in (3584, 5120)]
    alone, of_gradient = planned(32, "opd_loss=policy_gradient", *apart)
    assert "teacher_weights" not in alone["phases"][TRAIN]
    for name, held in alone["phases"][TRAIN].items():
        assert large["phases"][TRAIN][name] == held, name
    assert slow[TRAIN] - of_gradient[TRAIN] == pytest.approx(of_gradient[REFERENCE_PASS], rel=0.02)
    assert fast[TRAIN] < slow[TRAIN]
    assert {REFERENCE_PASS, OLD_PASS}.isdisjoint(slow)


def test_what_says_nothing_to_such_a_file_is_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", str(file), "--gpu", "h100", "--gpus", "4", "--response_tokens", "5000", "--flag", "3"]
    assert main(command) == ExitCode.SETTINGS
    said = capsys.readouterr().err
    assert all(words in said for words in ("--gpus with", "--response_tokens 5000", "'--flag'", "3 problems"))
    assert main(["plan", "Qwen2.5-7B", "--gpu", "h100", "--gpus", "8", "--prompt_tokens", "9"]) == ExitCode.SETTINGS


def test_planning_a_file_imports_no_torch(file: Path) -> None:
    program = (
        "import sys; from megatune.cli.main import main; "
        f"code = main(['plan', {str(file)!r}, '--gpu', 'h100']); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_cpu_is_planned_with_the_built_in_engine(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [
        "pretrain=Qwen/Qwen2.5-0.5B", "response_length=64", "prompt_length=64", "rollout_batch_size=8",
        "actor_train.device_mapping=[0, 1]", "reference.device_mapping=[0, 1]", "actor_infer.device_mapping=[0]",
        "actor_train.training_args.gradient_accumulation_steps=4", "actor_infer.strategy_args.strategy_name=builtin",
        "actor_infer.strategy_args.strategy_config=null",
    ]  # fmt: skip
    assert main(["plan", str(file), *small]) in (ExitCode.DONE, ExitCode.OUT_OF_MEMORY)
    said = capsys.readouterr().out
    assert "2 processes on this machine's CPU" in said
    assert "builtin, 1 engine of 1" in said


def test_machines_are_the_catalogue_s(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(file), "--gpu", "h200", "--gpus_per_node", "4"]) == ExitCode.DONE
    assert "2 nodes of 4" in capsys.readouterr().out
    assert find_machine("h200").device.memory > find_machine("h100").device.memory


_FORWARD = [
    "dense: tp2 pp2 sp, bf16",
    "experts: ep2, fp32",
    "dense: packed, 2 rows, bf16",
    "reward model: tp2 sp, bf16",
]


@pytest.mark.parametrize("name", _FORWARD)
def test_forward_passes_hold_what_is_planned(pool, name: str) -> None:
    """At least, and a little more: a layer is planned as if it freed nothing on the way."""
    one = CASES[name]
    peaks = pool.run(one.layout.world_size, measure_log_probs, one.architecture, one.settings)
    stages = forward_memory(one.case)
    ranks = one.layout.world_size // len(stages)
    for stage, held in enumerate(stages):
        measured = max(peaks[stage * ranks : (stage + 1) * ranks])
        planned = held.activations + held.logits_and_loss + held.communication
        assert 0.98 <= planned / measured <= 1.3, f"stage {stage}: {planned / measured:.2f}"
