"""`megatron rlhf --rlhf_type gkd` as a file that distils whole distributions."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatune.config.dialects.roll import ReadRL, read_keys
from megatune.config.dialects.swift import read_swift, swift_lines
from megatune.config.dialects.swift_rl import rollout_keys
from megatune.errors import MegatuneError
from megatune.families import read_architecture
from megatune.rl.problem_files import count_rows, find_prompts

PUBLISHED = {
    "model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
CONFIG = {"max_position_embeddings": 1024, "num_hidden_layers": 4, "dtype": "bfloat16"}
NEEDED = "--rlhf_type gkd --model s --teacher_model t --lmbda 1 --global_batch_size 16 --output_dir out"
# ms-swift's examples/megatron/rlhf/gkd/dense.sh, with data sets of its test.
DENSE = """
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 NPROC_PER_NODE=8 PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True'
megatron rlhf --rlhf_type gkd --model Qwen/Qwen3-8B-Base --teacher_model Qwen/Qwen3-32B --tuner_type lora
--dataset {rows}#20 {rows}#12 --tensor_model_parallel_size 2 --expert_model_parallel_size 1
--pipeline_model_parallel_size 2 --context_parallel_size 2 --lmbda 1 --beta 1 --torch_dtype bfloat16
--micro_batch_size 2 --global_batch_size 16 --num_train_epochs 1 --lr 5e-6 --logging_steps 1 --max_length 8192
--max_completion_length 8192 --attention_backend flash --use_vllm true --vllm_mode colocate
--vllm_gpu_memory_utilization 0.5 --vllm_tensor_parallel_size 1 --vllm_max_model_len 16384 --sleep_level 1
--offload_teacher_model true --recompute_granularity selective --finetune --no_save_optim --no_save_rng
--temperature 1.0 --padding_free true --sequence_parallel true
"""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "sums.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": "?"}]} for n in range(24)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(flags: str, *, on_cpu: bool = True, needed: str = NEEDED, **env: str) -> tuple[ReadRL, list[str]]:
    run = read_swift("rlhf", f"{needed} {flags}".split(), env=env, config=CONFIG, on_cpu=on_cpu)
    keys = rollout_keys(run, find_prompts, count_rows)
    return read_keys(keys, "the command line"), [*swift_lines(run, run.loaded.for_world(None)), *keys.lines]


MEANINGS = [
    ("", "algorithm.distils", True),
    ("", "algorithm.opd_beta", 0.5),
    ("--beta 0.1", "algorithm.opd_beta", 0.1),
    ("", "algorithm.opd_top_k", None),
    ("--gkd_logits_topk 64", "algorithm.opd_top_k", 64),
    ("--lmbda 0.5", "algorithm.opd_lmbda", 0.5),
    ("--lmbda 0.5 --sft_alpha 0.2", "algorithm.opd_sft_alpha", 0.2),
    ("--sft_alpha 0.2", "algorithm.opd_sft_alpha", 0.0),  # lmbda 1: no step has the rows' answers
    ("--use_vllm false --sft_alpha 0.2", "algorithm.opd_lmbda", 0.0),
    ("--max_grad_norm 0.5", "algorithm.max_grad_norm", 0.5),
    ("", "actor_train.teacher.model.model_name_or_path", "t"),
    ("--tensor_model_parallel_size 2", "actor_train.teacher.parallel.tensor_model_parallel_size", 2),
    ("--tuner_type lora", "actor_train.teacher.finetuning.finetuning_type", "full"),
    ("", "rollout.rollout_batch_size", 16),  # one response a prompt
    ("--num_generations 1", "rollout.num_return_sequences_in_group", 1),
    ("--num_generations 8", "rollout.num_return_sequences_in_group", 1),
    ("--steps_per_generation 2", "rollout.rollout_batch_size", 32),
    ("--temperature 0.7", "actor_infer.generating_args.temperature", 0.7),
    ("", "actor_infer.generating_args.temperature", 0.9),
    ("", "actor_infer.engine", "builtin"),
    ("--max_length 100 --max_completion_length 20", "rollout.max_sequence_length", 120),
    ("", "run.exp_name", "gkd"),
    ("", "teachers", {}),
    ("", "reference", None),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "dotted", "expected"), MEANINGS)
def test_what_flags_mean(rows: Path, flags: str, dotted: str, expected: Any) -> None:
    value: Any = read(f"--train_iters 6 --dataset {rows} {flags}", NPROC_PER_NODE="2")[0].require_valid()
    for part in dotted.split("."):
        value = getattr(value, part)
    assert value == expected


def test_vllm_samples_where_there_are_gpus(rows: Path) -> None:
    settings = read(f"--train_iters 6 --dataset {rows}", on_cpu=False)[0].require_valid()
    assert settings.actor_infer.engine == "vllm"


REFUSED = [
    ("--lmbda 1.5", "lmbda is 1.5", "write --lmbda 1"),
    ("--beta 2", "beta is 2", "write --beta 1"),
    ("--gkd_logits_topk 0", "gkd_logits_topk is 0", "write --gkd_logits_topk 1"),
    ("--teacher_model_server http://h:8000", "teacher_model_server: http://h:8000 is not supported",
     "remove --teacher_model_server, and write --teacher_model MODEL"),
    ("--gkd_logits_topk 1", "over the one most likely token the loss is always 0",
     "write a larger number, such as 64, or remove it: the whole vocabulary is compared"),
    ("--teacher_model_revision r", "teacher_model_revision: r is not supported",
     "remove --teacher_model_revision, and write --teacher_model FOLDER"),
    ("--external_plugins p.py", "external_plugins: [p.py] is not supported", "remove --external_plugins"),
    ("--multi_turn_scheduler gym", "multi_turn_scheduler: gym is not supported", "remove --multi_turn_scheduler"),
    ("--vllm_mode server", "vllm_mode: server is not supported", "write --vllm_mode colocate"),
    ("--num_layers_per_virtual_pipeline_stage 1 --pipeline_model_parallel_size 2",
     "num_layers_per_virtual_pipeline_stage: 2 is not supported", "remove --num_layers_per_virtual_pipeline_stage"),
    ("--router_replay_mode R3", "router_replay_mode: R3 is not supported", "write --router_replay_mode disabled"),
    ("--save_safetensors false", "save_safetensors: false is not supported", "remove --save_safetensors"),
    ("--fp8_format e4m3", "fp8_format: e4m3 is not supported", "remove --fp8_format"),
    ("--rope_scaling yarn", "rope_scaling: yarn is not supported", "remove --rope_scaling"),
    ("--max_model_len 2048", "max_model_len: 2048 is not supported", "remove --max_model_len"),
    ("--decoder_first_pipeline_num_layers 1", "--decoder_first_pipeline_num_layers 1 with "
     "--pipeline_model_parallel_size 1", "write --pipeline_model_parallel_size 2, or remove "
     "--decoder_first_pipeline_num_layers"),
    ("--tuner_type lora --use_rslora true", "use_rslora: true is not supported", "remove --use_rslora"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "what", "fix"), REFUSED)
def test_what_is_refused(rows: Path, flags: str, what: str, fix: str) -> None:
    (finding,) = read(f"--train_iters 6 --dataset {rows} {flags}", NPROC_PER_NODE="2")[0].findings
    assert (finding.what, finding.fix) == (what, fix)
    assert finding.why
    assert finding.where.startswith("--")


def test_experts_are_replayed_where_an_engine_has_taken_them(rows: Path) -> None:
    def replayed(flags: str) -> ReadRL:
        config = CONFIG | {"num_experts": 8, "model_type": "qwen3_moe"}
        words = f"{NEEDED} --train_iters 6 --dataset {rows} --router_replay_mode R3 {flags}".split()
        run = read_swift("rlhf", words, env={"NPROC_PER_NODE": "2"}, config=config, on_cpu=True)
        return read_keys(rollout_keys(run, find_prompts, count_rows), "the command line")

    assert replayed("").require_valid().actor_train.replays_routing
    (finding,) = replayed("--lmbda 0.5").findings
    assert finding.fix == "write --lmbda 1, or --router_replay_mode disabled"
    assert not replayed("--lmbda 0.5 --router_replay_mode disabled").findings


def test_data_sets_that_are_not_there_are_those_of_flags(rows: Path) -> None:
    for flag in ("--dataset", "--cached_dataset"):
        with pytest.raises(MegatuneError) as raised:
            read(f"--train_iters 6 {flag} nowhere.jsonl")
        assert [each.where for each in raised.value.findings] == [flag]


def test_what_nobody_wrote_is_one_finding_each(rows: Path) -> None:
    needed = f"--rlhf_type gkd --model s --train_iters 6 --output_dir out --dataset {rows}"
    (teacher,) = read("", needed=needed)[0].findings
    assert teacher.what == "teacher_model is missing"
    (server,) = read("--teacher_model_server http://h:8000", needed=needed)[0].findings
    assert server.where == "--teacher_model_server"
    (finding,) = read("", needed=f"{NEEDED} --train_iters 6")[0].findings
    assert (finding.what, finding.fix) == ("dataset is missing", "write --dataset FILE.jsonl, with messages")


def test_the_first_rows_of_a_data_set_are_counted_over_its_files(rows: Path) -> None:
    (rows.parent / "more.jsonl").write_text(rows.read_text())
    (rows.parent / "other.jsonl").write_text(rows.read_text())
    settings = read(f"--num_train_epochs 1 --dataset {rows.parent}#30 {rows}#4")[0].require_valid()
    names = [Path(name).name for name in settings.data.file_name]
    assert names == ["more.jsonl#30", "other.jsonl#6", "sums.jsonl#4"]
    assert settings.run.max_steps == (24 + 6 + 4) // 16


def test_lengths_that_exceed_the_positions_of_a_teacher_are_said_in_flags(rows: Path) -> None:
    architecture = read_architecture({**PUBLISHED, "max_position_embeddings": 600}, "config.json")
    words = f"{NEEDED} --train_iters 6 --dataset {rows}".split()
    run = read_swift("rlhf", words, env={"NPROC_PER_NODE": "1"}, config=CONFIG, on_cpu=True)
    keys = rollout_keys(run, find_prompts, count_rows)
    (finding,) = read_keys(keys, "the command line", lambda settings, stage: architecture).findings
    assert finding.what == "a sequence of 1024 is more than the 600 positions of the model"
    assert finding.fix == "write a --max_length and a --max_completion_length of 600 or less together"


def test_it_is_not_evaluated(rows: Path) -> None:
    (finding,) = read(f"--train_iters 6 --dataset {rows} --val_dataset {rows}")[0].findings
    assert (finding.what, finding.where) == ("gkd does not support evaluation", "--val_dataset")


def test_flags_that_change_nothing_are_said(rows: Path) -> None:
    flags = "--sft_alpha 0.2 --seq_kd true --offload_teacher_model true --num_generations 4 --reward_funcs format"
    found, lines = read(f"--train_iters 6 --dataset {rows} {flags}")
    assert found.findings == ()
    said = "\n".join(" ".join(line.split()) for line in lines)
    assert not any(each in said for each in ("mask_history", "packing"))  # defaults that have no effect, either
    for flag, why in (
        ("--sft_alpha 0.2", "with lmbda 1 no step trains on the data set's answers"),
        ("--seq_kd true", "the teacher does not sample, as in Megatron-SWIFT"),
        ("--offload_teacher_model true", "roles that share a device always release it"),
        ("--num_generations 4", "it has no effect in this run"),
        ("--reward_funcs format", "it has no effect in this run"),
    ):
        assert f"swift {flag} ignored: {why}" in said


@pytest.mark.parametrize("flag", ["--teacher_model t", "--gkd_logits_topk 4", "--lmbda 1", "--sft_alpha 0.1"])
def test_other_kinds_have_none_of_its_flags(rows: Path, flag: str) -> None:
    common = f"--model m --train_iters 4 --output_dir out --dataset {rows} --global_batch_size 16"
    for kind in ("dpo", "grpo --reward_funcs format"):
        run = read_swift("rlhf", f"--rlhf_type {kind} {common} {flag}".split(), env={}, config=CONFIG, on_cpu=True)
        assert [each.where for each in run.loaded.check(world_size=1)] == [flag.split()[0]]


def test_the_published_script_runs_as_it_is(rows: Path) -> None:
    words = shlex.split(DENSE.format(rows=rows))
    start = words.index("megatron")
    env = dict(word.split("=", 1) for word in words[:start])
    config = {**CONFIG, "max_position_embeddings": 32768}
    run = read_swift(words[start + 1], [*words[start + 2 :], "--output_dir", "out"], env=env, config=config)
    settings = read_keys(rollout_keys(run, find_prompts, count_rows), "the command line").require_valid()
    assert settings.data.file_name == [f"{rows}#20", f"{rows}#12"]
    assert (settings.run.max_steps, settings.samples_per_step) == (2, 16)
    assert (settings.rollout.prompt_length, settings.rollout.max_response_length) == (8192, 8192)
    teacher = settings.actor_train.teacher
    assert (teacher.model.model_name_or_path, teacher.parallel) == (
        "Qwen/Qwen3-32B",
        settings.actor_train.settings.parallel,
    )
    assert settings.actor_infer.config["gpu_memory_utilization"] == 0.5
    assert settings.algorithm.opd_beta == 1
