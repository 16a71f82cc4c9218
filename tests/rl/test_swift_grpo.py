"""`megatron rlhf --rlhf_type grpo`: what its flags mean, the loss that they ask for beside ms-swift's, and a run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from local_roles import run_file
from megatron.core import parallel_state
from pool import RankPool
from pool_launch import CommandLine
from test_reward_models import with_score
from torch import Tensor

from megatune.cli.rehearse import run as rehearse
from megatune.config.dialects.roll import ReadRL, read_keys
from megatune.config.dialects.swift import read_swift, swift_lines
from megatune.config.dialects.swift_rl import rollout_keys
from megatune.config.rl.settings import RLSettings
from megatune.demo.checkpoint import make_checkpoint
from megatune.engine.sequences import LocalBatch, Sequences
from megatune.errors import MegatuneError
from megatune.objectives.policy.objective import PolicyObjective
from megatune.rl.problem_files import count_rows, find_prompts
from megatune.rl.reading import read_file

ROOT = Path(__file__).parents[2]
CONFIG = {"max_position_embeddings": 1024, "num_hidden_layers": 4, "dtype": "bfloat16"}
NEEDED = "--rlhf_type grpo --model m --reward_funcs format --num_generations 4 --global_batch_size 16 --output_dir out"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "sums.jsonl"
    lines = [{"messages": [{"role": "user", "content": f"{n}+1="}], "solution": str(n + 1)} for n in range(24)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(rows: Path, flags: str, *, epochs: bool = False, more: Any = None, **env: str) -> tuple[ReadRL, list[str]]:
    words = f"{NEEDED} --dataset {rows} {'' if epochs else '--train_iters 6'} {flags}".split()
    run = read_swift("rlhf", words, env=env, config=CONFIG | (more or {}), on_cpu="--use_vllm" not in flags)
    keys = rollout_keys(run, find_prompts, count_rows)
    return read_keys(keys, "the command line"), [*swift_lines(run, run.loaded.for_world(None)), *keys.lines]


def found(read: ReadRL, dotted: str) -> Any:
    value: Any = read.require_valid()
    for part in dotted.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


WEIGHT = "algorithm.train_infer_correction.is_weight"
MEANINGS = [
    ("", "rollout.rollout_batch_size", 4),
    ("", "rollout.num_return_sequences_in_group", 4),
    ("", "rollout.prompt_length", 512),  # 1024 positions less 512 tokens of a response
    ("--max_length 100 --max_completion_length 20", "rollout.max_sequence_length", 120),
    ("", "run.max_steps", 6),
    ("--steps_per_generation 2", "run.max_steps", 3),
    ("--steps_per_generation 2", "rollout.rollout_batch_size", 8),
    ("--generation_batch_size 48", "rollout.rollout_batch_size", 12),
    ("--steps_per_generation 2", "algorithm.enable_old_logprobs_recompute", True),
    ("--save_steps 0.3", "run.save_steps", 2),
    ("", "algorithm.adv_estimator", "grpo"),
    ("--scale_rewards none", "algorithm.adv_estimator", "reinforce"),
    ("--scale_rewards none", "algorithm.norm_std_type", None),
    ("--scale_rewards batch", "algorithm.norm_std_type", "batch"),
    ("--advantage_estimator rloo --beta 0", "algorithm.adv_estimator", "rloo"),
    ("", "algorithm.kl_loss_coef", 0.04),
    ("--beta 0", "reference", None),
    ("--ref_model other", "reference.settings.model.model_name_or_path", "other"),
    ("--epsilon 0.1 --epsilon_high 0.3", "algorithm.pg_clip_high", 0.3),
    ("--epsilon 0.1", "algorithm.pg_clip_high", 0.1),
    ("--delta 4", "algorithm.dual_clip", 4.0),
    ("--loss_type dapo", "algorithm.loss_agg_mode", "token-mean"),
    ("--importance_sampling_level sequence", "algorithm.importance_sampling", "seq"),
    ("--rollout_importance_sampling_mode sequence_truncate", f"{WEIGHT}.weight_type", "geometric"),
    ("--rollout_importance_sampling_mode token_truncate", f"{WEIGHT}.upper_bound", 2),
    ("--dynamic_sample true", "rewards.grpo.group_filter.type", "std_filter"),
    ("--overlong_filter true", "algorithm.max_len_mask", True),
    ("--reward_funcs format accuracy --reward_weights 1 2", "rewards.grpo.arguments.reward_weights", [1.0, 2.0]),
    ("--reward_funcs soft_overlong --soft_cache_length 8", "rewards.grpo.arguments.soft_max_length", 512),
    ("--reward_model r", "rewards.grpo.kind", "swift"),
    ("--reward_model r", "rewards.grpo.model.settings.model.model_name_or_path", "r"),
    ("--reward_model r", "rewards.grpo.model.settings.precision.bf16", True),
    ("--reward_model r --reward_weights 1 0.5", "rewards.grpo.score_weight", 0.5),
    ("--reward_model r --reward_weights 3 0.5", "rewards.grpo.arguments.reward_weights", [3.0]),
    ("--temperature 0.7", "actor_infer.generating_args.temperature", 0.7),
    ("", "actor_infer.generating_args.temperature", 0.9),
    ("--tuner_type lora --lora_rank 4", "actor_train.settings.finetuning.lora_rank", 4),
    ("--tuner_type lora --quantization_bit 4", "actor_train.settings.finetuning.quantization_bit", 4),
    ("--tuner_type lora --quantization_bit 4 --double_quantization false",
     "actor_train.settings.finetuning.double_quantization", False),
    ("--tuner_type lora", "reference", None),
    ("--tuner_type lora", "actor_train.settings.checkpoint.merge_lora", True),
    ("--tuner_type lora --merge_lora false", "actor_train.settings.checkpoint.merge_lora", False),
    ("--tensor_model_parallel_size 2", "actor_train.settings.parallel.tensor_model_parallel_size", 2),
    ("--micro_batch_size 2", "actor_train.samples_per_update", 16),
    ("--lr 3e-6 --lr_warmup_fraction 0.1", "actor_train.settings.optimizer.warmup_ratio", 0.1),
    ("--max_grad_norm 0.5", "algorithm.max_grad_norm", 0.5),
    ("--use_vllm true --vllm_gpu_memory_utilization 0.4", "actor_infer.config.gpu_memory_utilization", 0.4),
    ('--use_vllm true --vllm_limit_mm_per_prompt {"image":2}', "actor_infer.config.limit_mm_per_prompt", {"image": 2}),
    ("--use_vllm true --vllm_mm_processor_cache_gb 0", "actor_infer.config.mm_processor_cache_gb", 0.0),
    ("--use_vllm true --vllm_tensor_parallel_size 2", "actor_infer.devices_per_engine", 2),
    ("--use_vllm false", "actor_infer.engine", "builtin"),
    ("--system Think.", "data.default_system", "Think."),
    ("--save_interval 4 --no_save_optim true", "data.conversation_rules", "ms_swift_3"),
]  # fmt: skip


SEES = {"vision_config": {}, "model_type": "qwen2_5_vl"}


@pytest.mark.parametrize(
    ("flags", "dotted", "value"),
    [
        ("", "actor_train.settings.finetuning.freeze_vision_tower", True),
        ("--freeze_vit false --freeze_aligner false", "actor_train.settings.finetuning.freeze_vision_tower", False),
        ("--tuner_type lora", "actor_train.settings.finetuning.freeze_vision_tower", True),
        ("", "data.image_max_pixels", 1568 * 28**2),
        ("", "data.image_min_pixels", 4 * 28**2),
    ],
)
def test_flags_of_pictures_mean(rows, flags, dotted, value):
    assert found(read(rows, flags, more=SEES, MAX_PIXELS=str(1568 * 28**2))[0], dotted) == value


@pytest.mark.parametrize("flags", ["--freeze_vit false", "--tuner_type lora --freeze_vit false --freeze_aligner false"])
def test_an_encoder_that_is_trained_in_part_is_refused(rows, flags):
    said = "\n".join(map(str, read(rows, flags, more=SEES)[0].findings))
    assert "freeze_vit" in said
    assert "freeze_aligner" in said


@pytest.mark.parametrize(("flags", "dotted", "expected"), MEANINGS)
def test_what_flags_mean(rows: Path, flags: str, dotted: str, expected: Any) -> None:
    assert found(read(rows, flags, NPROC_PER_NODE="2")[0], dotted) == expected


def test_validation_has_its_own_rows(rows: Path) -> None:
    read_rl = read(rows, f"--val_dataset {rows} --num_generations_eval 2 --eval_steps 3 --temperature 0.8")[0]
    assert found(read_rl, "validation.data_args.file_name") == [str(rows)]
    assert found(read_rl, "validation.generating_args.num_return_sequences") == 2
    assert found(read_rl, "validation.generating_args.temperature") == 0.8
    assert found(read_rl, "run.eval_steps") == 3


def test_epochs_are_steps_of_the_rows(rows: Path) -> None:
    assert found(read(rows, "--num_train_epochs 2", epochs=True)[0], "run.max_steps") == 12


REFUSED = [
    ("--loss_type sapo", "loss_type: sapo is not supported"),
    ("--advantage_estimator reinforce_plus_plus", "advantage_estimator: reinforce_plus_plus is not supported"),
    ("--advantage_estimator rloo", "kl_in_reward: true is not supported"),
    ("--scale_rewards gdpo", "scale_rewards: gdpo is not supported"),
    ("--max_completion_length 2000", "max_completion_length: 2000 is not supported"),
    ("--num_iterations 2", "num_iterations: 2 is not supported"),
    ("--num_generations 1", "num_generations: 1 is not supported"),
    ("--generation_batch_size 0", "generation_batch_size is 0"),
    ("--beta high", "beta: high is not supported"),
    ("--num_generations 5", "16 responses of a generation are not a multiple of num_generations 5"),
    ("--reward_weights 1 2", "reward_weights: [1, 2] is not supported"),
    ("--reward_model r --reward_weights 1", "reward_weights: [1] is not supported"),
    ("--reward_model r s", "reward_model: [r, s] is not supported"),
    ("--reward_model r --reward_model_plugin genrm", "reward_model_plugin: [genrm] is not supported"),
    ("--reward_model r --dynamic_sample true", "rewards.grpo has a reward model and query_filter_config"),
    ("--reward_funcs soft_overlong", "soft_cache_length: null is not supported"),
    ("--external_plugins nowhere.py", "external_plugins: [nowhere.py] is not supported"),
    ("--vllm_mode server", "vllm_mode: server is not supported"),
    ("--rollout_importance_sampling_mode token_mask", "rollout_importance_sampling_mode: token_mask is not supported"),
    ("--teacher_model t", "teacher_model: t is not supported"),
    ("--multi_turn_scheduler gym", "multi_turn_scheduler: gym is not supported"),
    ("--tau_pos 2", "tau_pos: 2 is not supported"),
    ("--tuner_type lora --use_rslora true", "use_rslora: true is not supported"),
    ("--repetition_penalty 1.1", "repetition_penalty: 1.1 is not supported"),
    ("--dataset_shuffle false", "dataset_shuffle: false is not supported"),
    ("--delta 1.1", "delta: 1.1 is not supported"),
    ('--rope_scaling {"type":"yarn","factor":2.0}', "rope_scaling: {type: yarn, factor: 2.0} is not supported"),
    ("--top_p 2", "top_p is 2"),
    ("--beta -1", "beta: -1 is not supported"),
    ("--steps_per_generation 0", "steps_per_generation is 0"),
    ("--vllm_gpu_memory_utilization 3", "vllm_gpu_memory_utilization is 3"),
    ("--reward_funcs repetition --repetition_n_grams 0", "repetition_n_grams is 0"),
    ("--recompute_method uniform", "--recompute_method uniform with --recompute_granularity selective"),
]


@pytest.mark.parametrize(("flags", "what"), REFUSED)
def test_what_is_refused(rows: Path, flags: str, what: str) -> None:
    assert [finding.what for finding in read(rows, flags)[0].findings] == [what]


FIXES = [
    ("--temperature -1", "write --temperature 0.9, the default"),
    ("--temperature 0", "write --temperature 0.9, the default"),
    ("--top_k -5", "write --top_k -1"),
    ("--epsilon 0", "write --epsilon 0.2, the default"),
    ("--epsilon_high -3", "remove --epsilon_high, or give it a number, above 0"),
    ("--rollout_importance_sampling_threshold -2", "write --rollout_importance_sampling_threshold 2.0, the default"),
    ("--delta 3 --epsilon_high 5", "write --delta 7"),
    ("--lr -1", "write --lr 1e-05"),
    ("--optimizer muon --optimizer_cpu_offload true", "write --optimizer adam, or remove --optimizer_cpu_offload"),
]


@pytest.mark.parametrize(("flags", "fix"), FIXES)
def test_fixes_are_flags_with_the_defaults_of_ms_swift(rows: Path, flags: str, fix: str) -> None:
    assert [finding.fix for finding in read(rows, flags)[0].findings] == [fix]


def test_complete_groups_fill_every_process(rows: Path) -> None:
    """The batch is a multiple of both; a batch that the processes do not divide is reported alone."""
    (finding,) = read(rows, "--num_generations 8 --global_batch_size 12", NPROC_PER_NODE="6")[0].findings
    assert (finding.where, finding.fix) == ("--num_generations", "write --global_batch_size 24")
    flags = "--num_generations 8 --global_batch_size 18 --steps_per_generation 2"
    (finding,) = read(rows, flags, NPROC_PER_NODE="6")[0].findings
    assert finding.fix == "write --global_batch_size 12 or 24"
    (finding,) = read(rows, "--num_generations 8 --global_batch_size 16", NPROC_PER_NODE="6")[0].findings
    assert finding.where == "--global_batch_size"


def test_engines_and_layouts_that_do_not_divide_the_devices_are_said_in_flags(rows: Path) -> None:
    flags = "--vllm_tensor_parallel_size 3 --use_vllm true"
    (found,) = read(rows, flags, NPROC_PER_NODE="4")[0].findings
    assert found.fix == "write --vllm_tensor_parallel_size 2"
    (found,) = read(rows, "--tensor_model_parallel_size 2", NPROC_PER_NODE="1")[0].findings
    assert found.what.startswith("1 processes are not a multiple of the 2")
    assert found.fix.startswith("write --tensor_model_parallel_size 1")


def test_a_file_of_flags_is_told_of_them_by_their_names(rows: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    flags = {"rlhf_type": "grpo", "model": "m", "reward_funcs": "format", "num_generations": 4, "dataset": str(rows)}
    flags |= {"train_iters": 6, "output_dir": "out", "epsilon": -1, "max_completion_length": 0}
    path.write_text("".join(f"{key}: {value}\n" for key, value in flags.items()))
    run = read_swift("rlhf", [str(path)], env={}, config=CONFIG, on_cpu=True)
    findings = read_keys(rollout_keys(run, find_prompts, count_rows), "the command line").findings
    assert [(each.where, each.what, each.fix) for each in findings] == [
        (f"{path}:8", "epsilon is -1", "write epsilon: 0.2, the default"),
        (f"{path}:9", "max_completion_length is 0", "write max_completion_length: 1"),
    ]


def test_a_reward_model_alone_is_the_reward(rows: Path) -> None:
    words = NEEDED.replace("--reward_funcs format", "--reward_model r --reward_weights 2 --cosine_max_len 9")
    run = read_swift("rlhf", f"{words} --dataset {rows} --train_iters 6".split(), env={}, config=CONFIG, on_cpu=True)
    keys = rollout_keys(run, find_prompts, count_rows)
    reward = read_keys(keys, "the command line").require_valid().rewards["grpo"]
    assert (reward.kind, reward.score_weight, reward.arguments) == ("reward_model", 2, {})
    said = "\n".join([*swift_lines(run, run.loaded.for_world(None)), *keys.lines])
    assert re.search(r"--cosine_max_len 9 +ignored", said), said


def test_without_data_there_is_one_reason() -> None:
    words = [
        "--rlhf_type",
        "grpo",
        "--model",
        "m",
        "--train_iters",
        "1",
        "--reward_funcs",
        "format",
        "--output_dir",
        "o",
    ]
    run = read_swift("rlhf", words, env={}, config=CONFIG, on_cpu=True)
    findings = read_keys(rollout_keys(run, find_prompts, count_rows), "the command line").findings
    assert [finding.what for finding in findings] == ["dataset is missing"]


def test_it_is_not_rehearsed(rows: Path, tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path / "model")
    words = f"rehearse megatron {NEEDED} --model {tmp_path}/model --dataset {rows} --train_iters 1".replace(
        "megatron ", "megatron rlhf "
    )
    with pytest.raises(MegatuneError, match="it cannot be rehearsed"):
        rehearse("rehearse", words.split()[1:])


def test_a_preference_stage_has_none_of_its_flags(rows: Path) -> None:
    words = f"--rlhf_type dpo --model m --dataset {rows} --train_iters 1 --num_generations 4 --epsilon 0.2".split()
    findings = read_swift("rlhf", words, env={}, config=CONFIG).loaded.check(world_size=1)
    assert [finding.what for finding in findings] == ["num_generations: 4 is not supported"]


def test_every_flag_is_said(rows: Path) -> None:
    flags = "--sleep_level 1 --epsilon 0.1 --save_safetensors true --split_dataset_ratio 0.1"
    lines = "\n".join(read(rows, flags)[1])
    for said in ("ignored: roles that share a device", "pg_clip_low: 0.1", "num_return_sequences_in_group: 4"):
        assert said in lines
    assert "it is always so" not in lines


def test_the_example_is_understood(rows: Path) -> None:
    text = (ROOT / "examples" / "rl" / "swift_grpo.sh").read_text(encoding="utf-8").replace("\\\n", " ")
    words = next(words for line in text.splitlines() if "megatron" in (words := shlex.split(line, comments=True)))
    start = words.index("megatron")
    env = dict(word.split("=", 1) for word in words[:start])
    flags = [*words[start + 2 :], "--dataset", str(rows)]
    config = {**CONFIG, "max_position_embeddings": 32768}
    run = read_swift(words[start + 1], flags, env=env, config=config)
    settings = read_keys(rollout_keys(run, find_prompts, count_rows), "the command line").require_valid()
    assert (settings.samples_per_step, settings.actor_train.samples_per_update) == (256, 64)
    assert (settings.rollout.prompt_length, settings.rollout.max_response_length) == (1024, 8192)
    assert settings.actor_infer.config["gpu_memory_utilization"] == 0.7


# --- ms-swift's loss, as megatron/trainers/grpo_trainer.py of 4.6 writes it -------------------------------------------

LOSSES = [
    "",
    "--loss_type bnpo",
    "--loss_type dapo --epsilon_high 0.28",
    "--loss_type dr_grpo --beta 0.1",
    "--loss_type cispo --epsilon_high 1.1",
    "--importance_sampling_level sequence --epsilon 0.01",
    "--delta 1.3 --beta 0",
]


def clipped_above(ratio: Tensor, said: dict[str, str]) -> Tensor:
    return ratio.clamp(max=float(said["--epsilon_high"])).detach()


def theirs(flags: str, log_probs: Tensor, values: dict[str, Tensor]) -> Tensor:
    said = dict(zip(flags.split()[::2], flags.split()[1::2], strict=True))
    low, mask = float(said.get("--epsilon", 0.2)), values["mask"]
    log_ratio = log_probs - values["old_log_probs"]
    if said.get("--importance_sampling_level") == "sequence":
        log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - low, 1 + float(said.get("--epsilon_high", low)))
    if "--delta" in said:
        ratio = ratio.clamp(max=float(said["--delta"]))
    if said.get("--loss_type") == "cispo":
        loss = -clipped_above(ratio, said) * values["advantages"] * log_probs
    else:
        loss = -torch.min(ratio * values["advantages"], clipped * values["advantages"])
    if beta := float(said.get("--beta", 0.04)):
        difference = (values["reference_log_probs"] - log_probs).clamp(min=-20, max=20)
        loss = loss + beta * (difference.exp() - difference - 1).clamp(min=-10, max=10)
    match said.get("--loss_type", "grpo"):
        case "grpo":
            return ((loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
        case "dr_grpo":
            return (loss * mask).sum() / (len(mask) * 512)
    return (loss * mask).sum() / mask.sum()


@pytest.fixture(scope="module")
def groups() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("flags", LOSSES)
def test_the_loss_is_that_of_ms_swift(rows: Path, flags: str) -> None:
    settings = read(rows, f"{flags} --steps_per_generation 2")[0].require_valid()
    torch.manual_seed(3)
    shape, lengths = (16, 12), torch.arange(16) % 10 + 1
    mask = (torch.arange(12) < lengths[:, None]).float()
    values = {"mask": mask, "weights": torch.ones(shape), "advantages": torch.randn(16, 1).expand(shape)}
    log_probs = (-torch.rand(shape)).requires_grad_()
    for name, scale in (("old_log_probs", 0.2), ("reference_log_probs", 0.5)):
        values[name] = log_probs.detach() + scale * torch.randn(shape)
    nothing = torch.zeros(0, dtype=torch.int64)
    sequences = Sequences(
        boundaries=(0, 12),
        position_ids=torch.arange(12),
        lengths=lengths[:, None],
        is_padding=mask == 0,
        normalizer=nothing,
        trained=nothing,
    )
    batch = LocalBatch(torch.zeros(shape, dtype=torch.int64), mask.long() - 1, sequences, values, None)
    role = settings.actor_train
    objective = PolicyObjective(
        settings.algorithm, variant=role.pg_variant, norm_length=settings.rollout.max_sequence_length - 1,
        samples=len(mask), ratio=(role.pg_ratio_low, role.pg_ratio_high),
    )  # fmt: skip
    divisor = mask.sum() if settings.algorithm.loss_agg_mode == "token-mean" else len(mask)
    ours = objective(torch.stack((-log_probs, torch.zeros(shape)), -1), batch).loss / divisor
    (gradient,) = torch.autograd.grad(ours, log_probs, retain_graph=True)
    expected = theirs(flags, log_probs, values)
    (wanted,) = torch.autograd.grad(expected, log_probs)
    torch.testing.assert_close(ours.float(), expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-8)


# --- a run ------------------------------------------------------------------------------------------------------------


def _start(pool: RankPool, settings: RLSettings, run_yaml: str) -> int:
    """What a command starts, without Ray."""
    output = Path(settings.run.output_dir)
    output.mkdir()
    (output / "run.yaml").write_text(run_yaml)
    return int(pool.run(1, run_file, settings, limit=120)[0])


@pytest.mark.extended("full")
@pytest.mark.parametrize(("tuner", "ranks"), [("full", 2), ("lora", 1)])
def test_a_command_line_runs_and_its_file_says_the_same(
    pool: RankPool,
    command_line: CommandLine,
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tuner: str,
    ranks: int,
) -> None:
    """Two ranks as they are typed, with Ray; one in the pool."""
    make_checkpoint("qwen3", tmp_path / "Qwen3-tiny")
    plugin = tmp_path / "plugin.py"
    plugin.write_text(
        "from swift.rewards import ORM, orms\n\n\nclass Even(ORM):\n"
        "    def __call__(self, completions, response_token_ids, **kwargs):\n"
        "        return [float(ids[0] % 2) for ids in response_token_ids]\n\n\norms['even'] = Even\n"
    )
    words = f"""megatron rlhf --rlhf_type grpo --model {tmp_path}/Qwen3-tiny --dataset {rows}#8 --train_iters 2
    --num_generations 4 --global_batch_size 8 --micro_batch_size 2 --max_completion_length 6
    --reward_funcs even accuracy --reward_weights 1 2 --external_plugins {plugin} --lr 1e-3 --fp16 false --bf16 false
    --output_dir {tmp_path}/out
    --logging_steps 1 --tensor_model_parallel_size {ranks} --vllm_mode colocate --temperature 1.0 --beta 0.1
    --max_length 64 --tuner_type {tuner} --merge_lora {str(tuner == "lora").lower()}"""
    if ranks == 1:
        # The model of its page: functions and a reward model, whose score is the last of those that are summed.
        reward = with_score(make_checkpoint("qwen3", tmp_path / "reward"))
        words = words.replace("--reward_weights 1 2", f"--reward_weights 1 2 9 --reward_model {reward}")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("NPROC_PER_NODE", "1")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.setattr("megatune.rl.pipeline.run.start", partial(_start, pool))
        done: Any = command_line(*words.split())
    else:
        done = subprocess.run(
            [sys.executable, "-m", "megatune", *words.split()], cwd=tmp_path, capture_output=True, text=True,
            timeout=1200, env={**os.environ, "OMP_NUM_THREADS": "1", "NPROC_PER_NODE": str(ranks),
                               "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "swift      --num_generations 4" in done.stdout
    metrics = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in metrics if "reward" in line]
    assert len(steps) == 2
    assert all((0 <= line["reward"] <= 1) == (ranks == 2) for line in steps)
    assert any(line["grad_norm"] > 0 for line in steps)
    whole, merged = (tmp_path / "out" / name / "model.safetensors" for name in ("", "merged"))
    assert (whole.is_file(), merged.is_file()) == (tuner == "full", tuner == "lora")
    # The file in the output folder is one of `megatune rl`, and says the same.
    again = read_file(str(tmp_path / "out" / "run.yaml"), [])
    assert again.require_valid().rewards["grpo"].arguments["reward_weights"] == [1.0, 2.0]
    assert again.require_valid().rollout.rollout_batch_size == 2
    assert again.require_valid().rewards["grpo"].score_weight == (9 if ranks == 1 else 1)
