"""What Megatron-SWIFT's users read: messages in their flags and variables, whose fixes help, and lines on defaults."""

from __future__ import annotations

import pytest
from test_swift import CONFIG, findings, read, value

from megatune.config.dialects.swift import swift_lines
from megatune.config.load import load


@pytest.mark.parametrize(
    ("flags", "env", "fix"),
    [
        ("--tensor_model_parallel_size 2", {"NPROC_PER_NODE": "3"}, "NPROC_PER_NODE=2 or 4"),
        ("--tensor_model_parallel_size 4", {"NPROC_PER_NODE": "3", "NNODES": "2"}, "NPROC_PER_NODE=2 or 4"),
        # 9 or 12 processes are 3 on each of 3 machines, or 4.
        ("--pipeline_model_parallel_size 3", {"NPROC_PER_NODE": "5", "NNODES": "2"}, "NPROC_PER_NODE=9 or 6"),
        ("--tensor_model_parallel_size 2 --num_processes 3", {}, "--num_processes 2 or 4"),
        ("--pipeline_model_parallel_size 4", {"NNODES": "6"}, "NPROC_PER_NODE=2 before the command"),
    ],
)
def test_fixes_name_the_variable_with_the_processes_of_a_machine(flags, env, fix):
    run = read(f"{flags} --global_batch_size 60", **env)
    (message,) = (each for each in run.loaded.check() if "process" in each.what)
    assert message.fix.endswith(f"write {fix}")


def test_messages_name_the_variables_that_bound_pictures():
    config = {**CONFIG, "model_type": "qwen2_5_vl", "vision_config": {}}
    run = read(config=config, FPS="fast", NPROC_PER_NODE="2", MAX_PIXELS="1003520")
    assert findings(run) == [
        "FPS=fast: FPS is 'fast'\n    why: expected a number, above 0\n    fix: write FPS=2.0, the default"
    ]
    lines = [" ".join(line.split()) for line in swift_lines(run, run.loaded)]
    assert "swift MAX_PIXELS=1003520 image_max_pixels: 1003520" in lines
    assert "swift (MIN_PIXELS 3136) image_min_pixels: 3136" in lines


ADVICE = [
    ("--distributed_backend word", "remove --distributed_backend"),  # the flag that was typed, of version 3
    ("--tuner_type lora --target_modules all-linear all-router", "write --target_modules all-linear"),
    ("--main_grads_dtype fp8", "write --main_grads_dtype fp32"),
    ("--use_megatron_fsdp true", "remove --use_megatron_fsdp; write --use_distributed_optimizer instead"),
    ("--top_p 2.5", "remove --top_p, or write --top_p 1.0"),  # it belongs to grpo, whatever its value
    (
        "--lr_decay_style WSD",
        "write --lr_wsd_decay_style cosine or linear, and --lr_wsd_decay_iters 100, "
        "the number of decay steps at the end",
    ),
    (
        "--task_type seq_cls",
        "write --num_labels N, one more than the largest label, or 1 if labels are numbers to predict",
    ),
]


@pytest.mark.parametrize(("flags", "fix"), ADVICE)
def test_fixes_help_when_they_are_typed(flags, fix):
    (message,) = read(flags).loaded.check()
    assert message.fix == fix


@pytest.mark.parametrize("kind", ["sft", "cls", "ppo", "dop", "null"])
def test_a_type_that_rlhf_does_not_have_is_refused(kind):
    """Also one that is the name of another stage, which was trained."""
    (message,) = read(f"--rlhf_type {kind}", verb="rlhf").loaded.check()
    assert message.what == f"rlhf_type: {kind} is not supported"
    assert message.why == "`megatron rlhf` has the types dpo, kto, rm, grpo and gkd"


def test_messages_name_the_flag_that_was_typed():
    flag = "--num_layers_per_virtual_pipeline_stage"
    (message,) = read(f"{flag} 1", config={**CONFIG, "num_hidden_layers": 4}).loaded.check()
    assert message.fix == f"write --pipeline_model_parallel_size 2, or remove {flag}"
    (message,) = (each for each in load(overrides=["save_merged_model=true"]).check() if "save_merged" in each.where)
    assert message.what == "save_merged_model: true with finetuning_type: full"
    assert message.fix == "write finetuning_type: lora, or remove save_merged_model"


def test_stages_are_named_by_what_chooses_them():
    (message,) = read("--task_type seq_cls").loaded.check()
    assert (message.what, message.where) == ("--num_labels is missing, which --task_type seq_cls needs", "--task_type")
    (message,) = read("--mtp_num_layers 1", verb="rlhf").loaded.check()
    assert message.what == "--mtp_num_layers 1 with --rlhf_type dpo"
    assert message.fix == "write `megatron pt`, or remove --mtp_num_layers"
    (message,) = read("--main_grads_dtype fp8").loaded.check()
    assert message.why == "expected one of: fp32, bf16"


def test_a_default_is_printed_as_it_is_there():
    run = read("--min_lr 1e-6")
    lines = [" ".join(line.split()) for line in swift_lines(run, run.loaded.for_world(1))]
    assert "swift (lr_decay_style cosine) lr_scheduler_type: cosine_with_min_lr" in lines


def test_a_file_of_tokens_that_is_missing_is_said_once():
    (message,) = read("--new_special_tokens none.txt").loaded.check()
    assert message.why == "none.txt cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("model_type", "vision", "expected"),
    [("qwen2_5_vl", {}, None), ("qwen3_vl", {}, False), ("qwen3_vl", {"deepstack_visual_indexes": []}, None)],
)
def test_the_aligner_has_deepstack_mergers_only_where_the_model_has_them(model_type, vision, expected):
    config = {**CONFIG, "model_type": model_type, "vision_config": vision}
    run = read("--freeze_aligner false", config=config)
    assert value(run, "finetuning.freeze_multi_modal_projector") is False
    assert value(run, "finetuning.freeze_deepstack_mergers") is expected


def test_a_layout_of_experts_has_their_defaults_before_the_model_is_known():
    flags = "--tensor_model_parallel_size 2 --expert_model_parallel_size 4"
    assert findings(read(flags, config={}, NPROC_PER_NODE="4")) == []
