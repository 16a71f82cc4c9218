"""Command lines of Megatron-SWIFT: their syntax, their two versions, their defaults, and what flags mean together."""

from __future__ import annotations

import json

import pytest

from megatune.config.dialects.swift import SwiftRun, read_swift, swift_lines
from megatune.config.load import dump, load
from megatune.config.rules.rule import unused
from megatune.config.settings import Settings, all_settings, setting_value

CONFIG = {"dtype": "bfloat16", "max_position_embeddings": 32768, "num_hidden_layers": 8}
REQUIRED = "--model m --dataset d"


def read(flags: str = "", verb: str = "sft", config=CONFIG, words=(), **env: str) -> SwiftRun:
    return read_swift(verb, [*f"{REQUIRED} --train_iters 5 {flags}".split(), *words], env=env, config=config)


def value(run: SwiftRun, path: str):
    return setting_value(run.loaded.settings, path)


def findings(run: SwiftRun) -> list[str]:
    return [str(finding) for finding in run.loaded.check()]


# --- syntax ----------------------------------------------------------------------------------------------------------

WRITTEN = [
    ("--overlap_grad_reduce", "parallel.overlap_grad_reduce", True),
    ("--overlap_grad_reduce Yes", "parallel.overlap_grad_reduce", True),
    ("--overlap-grad-reduce 1", "parallel.overlap_grad_reduce", True),
    ("--overlap_grad_reduce tRuE --overlap_grad_reduce N", "parallel.overlap_grad_reduce", False),
    ("--no_use_distributed_optimizer", "parallel.use_distributed_optimizer", False),
    ("--no_save_optim true", "checkpoint.save_only_model", True),  # its own name, and no negation
    ("--no_save_optim", "checkpoint.save_only_model", True),
    ("--lr=3e-5", "optimizer.learning_rate", 3e-5),
    ("--lr 1e-4 --lr 3e-5", "optimizer.learning_rate", 3e-5),
    ("--recompute_gran full --recompute-method uniform", "recompute.recompute_granularity", "full"),
    ("--dataset a#5 b,c --lr 1e-5", "data.dataset", ["a#5", "b,c"]),
    ("--recompute_modules core_attn mlp", "recompute.recompute_modules", ["core_attn", "mlp"]),
    ("--system null", "data.default_system", "null"),
    ("--learning_rate 3e-5", "optimizer.learning_rate", 3e-5),
]


@pytest.mark.parametrize(("flags", "path", "expected"), WRITTEN)
def test_flags_are_written_as_argparse_reads_them(flags, path, expected):
    run = read(flags)
    assert run.loaded.findings == []
    assert value(run, path) == expected


def test_a_value_is_taken_as_it_is():
    run = read(words=["--system", 'Be "brief": yes', "--model", "a b"])
    assert value(run, "data.default_system") == 'Be "brief": yes'
    assert value(run, "model.model_name_or_path") == "a b"


def test_all_mistakes_are_reported_at_once():
    run = read("--lrr 1 --zzz --recompute 1 --lr --eval_iters many --micro_batch_size 0 --overlap_grad_reduce maybe")
    assert findings(run) == [
        "--lr: lr has no value\n    fix: write --lr VALUE",
        "--eval_iters: eval_iters is 'many'\n    why: expected a whole number\n"
        "    fix: remove --eval_iters, or give it a whole number",
        "--micro_batch_size: micro_batch_size is 0\n    why: expected a whole number, at least 1\n"
        "    fix: write --micro_batch_size 1",
        "--overlap_grad_reduce: overlap_grad_reduce is 'maybe'\n    why: expected true or false\n"
        "    fix: write --overlap_grad_reduce false, the default",
        "unknown flag --lrr\n    fix: did you mean --lr?",
        "unknown flag --zzz\n    fix: remove it; docs/migrate-from-megatron-swift.md lists the supported flags",
        "--recompute could be --recompute_granularity, --recompute_method, --recompute_modules, "
        "--recompute_num_layers\n    fix: write it out",
    ]


@pytest.mark.parametrize("name", ["run.yaml", "run.json"])
def test_a_file_of_flags_comes_first_and_flags_after_it_win(tmp_path, name):
    content = {"lr": 3e-5, "save-steps": 7, "dataset": ["a", "b"], "packing": True, "system": None,
               "ENV": {"NPROC_PER_NODE": 2, "MAX_PIXELS": "5"}}  # fmt: skip
    path = tmp_path / name
    path.write_text(json.dumps(content, indent=1))  # JSON is YAML, too
    run = read_swift("sft", [str(path), "--lr", "1e-5", "--train_iters", "5"], env={"MAX_PIXELS": "6"})
    assert value(run, "optimizer.learning_rate") == 1e-5
    assert value(run, "checkpoint.save_steps") == 7
    assert value(run, "data.dataset") == ["a", "b"]
    assert value(run, "data.packing") is True
    assert run.loaded.origins["checkpoint.save_steps"].startswith(f"{path}:")
    assert value(run, "run.num_processes") == 2
    assert run.command.env["MAX_PIXELS"] == "6"
    assert run.command.variables["NPROC_PER_NODE"] == "2"


# --- versions and defaults -------------------------------------------------------------------------------------------

# What Megatron-SWIFT trains with where nothing says otherwise, as far as it changes results: shared/reference.
SAME_IN_BOTH = {
    "optimizer.muon_momentum": 0.9,
    "optimizer.muon_nesterov": False,
    "optimizer.muon_scale": 1.0,
    "run.stage": "sft",
    "run.seed": 42,
    "run.num_processes": 1,
    "run.output_dir": "megatron_output/m",
    "finetuning.finetuning_type": "full",
    "batch.per_device_train_batch_size": 1,
    "batch.per_device_eval_batch_size": 1,
    "batch.gradient_accumulation_steps": 16,
    "recompute.recompute_granularity": "selective",
    "recompute.recompute_modules": ["core_attn"],
    "optimizer.optimizer": "adam",
    "optimizer.learning_rate": 1e-5,
    "optimizer.lr_scheduler_type": "cosine",
    "optimizer.warmup_steps": 0.0,
    "optimizer.warmup_ratio": 0.0,
    "optimizer.weight_decay": 0.1,
    "optimizer.max_grad_norm": 1.0,
    "optimizer.adam_beta1": 0.9,
    "optimizer.adam_beta2": 0.95,
    "optimizer.adam_epsilon": 1e-8,
    "optimizer.sgd_momentum": 0.9,
    "optimizer.max_steps": 5,
    "precision.bf16": True,
    "precision.fp16": False,
    "precision.accumulate_allreduce_grads_in_fp32": True,
    "parallel.use_distributed_optimizer": True,
    "parallel.sequence_parallel": False,
    "experts.moe_token_dispatcher_type": "alltoall",
    "data.cutoff_len": 32768,
    "data.truncation_strategy": "drop",
    "data.packing": False,
    "data.streaming": False,
    "data.enable_thinking": None,
    "data.preserve_thinking": None,
    "data.train_on_prompt": False,
    "data.mask_history": False,
    "data.disable_shuffling": False,
    "logging.logging_steps": 5,
    "logging.report_to": ["tensorboard"],
    "checkpoint.save_strategy": "steps",
    "checkpoint.save_steps": 500,
    "checkpoint.save_only_model": False,
    "experts.moe_aux_loss_coeff": None,
}
OF_VERSION = {
    4: {"data.conversation_rules": "ms_swift_4", "data.val_size": 0.0, "evaluation.eval_strategy": "no"},
    3: {
        "data.conversation_rules": "ms_swift_3",
        "data.val_size": 0.01,
        "evaluation.eval_strategy": "steps",
        "evaluation.eval_steps": 500,
    },
}


@pytest.mark.parametrize("version", [3, 4])
def test_a_run_without_flags_is_what_swift_trains(version):
    flag = "--load" if version == 3 else "--model"
    run = read_swift("sft", [flag, "m", "--dataset", "d", "--train_iters", "5"], env={}, config=CONFIG)
    settings = run.loaded.require_valid(world_size=1)
    expected = {**SAME_IN_BOTH, **OF_VERSION[version]}
    assert {path: setting_value(settings, path) for path in expected} == expected
    # Whatever else differs from our own defaults would be a default of ours that nobody told of.
    others = {path for path, info in all_settings().items() if setting_value(settings, path) != info.default}
    assert others - set(expected) == {"model.model_name_or_path", "data.dataset", "run.memory_check"}


def test_adapters_have_defaults_of_their_own():
    run = read("--tuner_type lora")
    assert value(run, "optimizer.learning_rate") == 1e-4
    assert value(run, "finetuning.lora_alpha") == 32
    assert value(run, "finetuning.lora_dropout") == 0.05
    assert value(run, "finetuning.lora_rank") == 8
    assert value(run, "checkpoint.merge_lora") is True
    assert value(read("--train_type lora"), "checkpoint.merge_lora") is False  # version 3
    assert value(read("--adapters a --tuner_type full"), "finetuning.finetuning_type") == "lora"


def test_experts_have_defaults_of_their_own():
    config = {**CONFIG, "num_experts": 8, "router_aux_loss_coef": 0.001}
    new, old = read(config=config), read("--log_interval 1", config=config)
    assert value(new, "experts.moe_router_dtype") == "fp32"
    assert value(new, "parallel.expert_tensor_parallel_size") == 1
    assert value(new, "experts.moe_aux_loss_coeff") == 0
    assert value(old, "experts.moe_router_dtype") is None
    assert value(old, "experts.moe_aux_loss_coeff") is None  # config.json's
    ernie = CONFIG | {"moe_num_experts": 8, "moe_num_shared_experts": 2}
    overlap = read("--moe_shared_expert_overlap true", config=ernie)
    assert value(overlap, "experts.moe_router_dtype") == "fp32"
    assert value(overlap, "experts.moe_shared_expert_overlap") is True


def test_late_flags_of_version_3_tell_its_late_defaults():
    """--load_safetensors came with 3.10: the defaults are those of 3.12."""
    config = CONFIG | {"num_experts": 8, "router_aux_loss_coef": 0.01}
    early, late = (read(f"--save o {flags}", config=config) for flags in ("", "--load_safetensors true"))
    for path, before, after in (
        ("data.val_size", 0.01, 0.0),
        ("experts.moe_router_dtype", None, "fp32"),
        ("experts.moe_aux_loss_coeff", None, 0.0),
        ("parallel.expert_tensor_parallel_size", None, 1),
        ("data.conversation_rules", "ms_swift_3", "ms_swift_3"),
    ):
        assert (value(early, path), value(late, path)) == (before, after), path
    assert (
        "defaults of 3.12 are used: version 4 does not have --save, --load_safetensors"
        in swift_lines(late, late.loaded)[0]
    )
    both = "--max_epochs 2 --tuner_type lora"
    early, late = (read(f"--save o {both} {flags}") for flags in ("", "--save_safetensors true"))
    assert findings(early)
    assert "max_epochs" in findings(early)[0]
    assert findings(late) == []
    assert (value(late, "optimizer.num_train_epochs"), value(late, "optimizer.max_steps")) == (2.0, -1)
    assert (value(early, "checkpoint.merge_lora"), value(late, "checkpoint.merge_lora")) == (False, True)


def test_experts_that_tensor_parallelism_cannot_cut_are_whole_in_version_3():
    """Files of 3.9 and later mean expert_tensor_parallel_size 1, which is the only one that divides their processes."""
    flags = "--save o --tensor_model_parallel_size 2 --expert_model_parallel_size 8 --sequence_parallel true"
    few, many = (read(flags, config=CONFIG | {"num_experts": 8}, NPROC_PER_NODE=f"{count}") for count in (8, 16))
    assert value(few, "parallel.expert_tensor_parallel_size") == 1
    assert value(many, "parallel.expert_tensor_parallel_size") is None
    assert findings(few) == findings(many) == []


def test_a_number_is_the_same_as_a_float_of_it():
    assert read("--tau_pos 1").loaded.findings == []
    assert read("--tau_pos 2").loaded.findings != []


def test_what_has_no_effect_is_not_said():
    adam, muon = read(), read("--optimizer muon")
    assert not any("muon_momentum" in line for line in swift_lines(adam, adam.loaded))
    assert any("muon_momentum" in line for line in swift_lines(muon, muon.loaded))


def test_flags_that_change_nothing_are_noted():
    """Not ms-swift's defaults, nor a flag that gives two settings their values, of which one has an effect."""
    loaded = read("--model m --dataset d --micro_batch_size 2 --muon_momentum 0.8").loaded
    assert unused(loaded.settings, loaded.written, None) == {"with optimizer: adam": ["muon_momentum"]}


def test_the_version_is_said_with_its_reason():
    assert "version 4" in swift_lines(read(), read().loaded)[0]
    run = read("--save_interval 5 --max_epochs 1 --no_masked_softmax_fusion")
    assert "version 3" in (line := swift_lines(run, run.loaded)[0])
    assert "version 4 does not have --save_interval, --max_epochs" in line
    assert read("--no_masked_softmax_fusion").command.generation == 4


# --- what flags mean together ----------------------------------------------------------------------------------------

MEANINGS = [
    ("--min_lr 1e-6", "optimizer.lr_scheduler_type", "cosine_with_min_lr"),
    ("--min_lr 1e-6", "optimizer.lr_scheduler_kwargs", {"min_lr": 1e-6}),
    ("--min_lr 0", "optimizer.lr_scheduler_type", "cosine"),
    ("--lr_decay_style constant --lr_warmup_iters 2", "optimizer.lr_scheduler_type", "constant_with_warmup"),
    ("--lr_decay_style inverse-square-root --lr_warmup_iters 2", "optimizer.lr_scheduler_type", "inverse_sqrt"),
    ("--lr_warmup_fraction 0.1", "optimizer.warmup_ratio", 0.1),
    ("--lr 1e-5 --lr_decay_style WSD --lr_wsd_decay_style linear --lr_wsd_decay_iters 2 --min_lr 5e-6",
     "optimizer.lr_scheduler_kwargs", {"decay_type": "linear", "num_decay_steps": 2, "min_lr_ratio": 0.5}),
    ("--num_train_epochs 2", "optimizer.max_steps", -1),
    ("--val_dataset v --save_strategy epoch", "evaluation.eval_strategy", "epoch"),
    ("--val_dataset v --save_steps 20", "evaluation.eval_steps", 20),
    ("--val_dataset v --eval_iters 0", "data.eval_dataset", []),
    ("--split_dataset_ratio 0.1", "evaluation.eval_strategy", "steps"),
    ("--cached_dataset c#5 e", "data.dataset", ["d", "c#5", "e"]),
    ("--cached_dataset c --cached_val_dataset v --split_dataset_ratio 0.1", "data.eval_dataset", ["v"]),
    ("--cached_dataset c --val_dataset v --split_dataset_ratio 0.1", "data.val_size", 0.0),
    ("--save_interval 3 --streaming", "data.val_size", 0.0),
    ("--tensor_model_parallel_size 2 --sequence_parallel", "parallel.sequence_parallel", True),
    ("--sequence_parallel", "parallel.sequence_parallel", False),
    ("--num_layers_per_virtual_pipeline_stage 2 --pipeline_model_parallel_size 2",
     "parallel.virtual_pipeline_model_parallel_size", 2),
    ("--virtual_pipeline_model_parallel_size 1", "parallel.virtual_pipeline_model_parallel_size", None),
    ("--distributed_timeout_minutes 2", "run.ddp_timeout", 120),
    ("--recompute_granularity none", "recompute.recompute_granularity", None),
    ("--moe_router_dtype none", "experts.moe_router_dtype", None),
    ("--main_grads_dtype bf16", "precision.accumulate_allreduce_grads_in_fp32", False),
    ("--attention_backend flash_3", "performance.attention_backend", "flash"),
    ("--torch_dtype float32", "precision.fp16", True),
    ("--fp16 false --bf16 false", "precision.bf16", False),
    ("--fp16 false --bf16 false --torch_dtype float32", "precision.fp16", False),
    ("--max_pixels 5000", "data.image_scale_pixels", 5000),
    ("--accumulate_allreduce_grads_in_fp32 false", "precision.accumulate_allreduce_grads_in_fp32", True),
    ("--fp16 --accumulate_allreduce_grads_in_fp32 false", "precision.accumulate_allreduce_grads_in_fp32", False),
    ("--truncation_strategy delete", "data.truncation_strategy", "drop"),
    ("--dataset_shuffle false --train_dataloader_shuffle false", "data.disable_shuffling", True),
    ("--train_dataloader_shuffle false", "data.disable_shuffling", False),
    ("--interleave_prob 0.5 0.5 --dataset a b", "data.mix_strategy", "interleave_under"),
    ("--strict", "data.on_bad_row", "error"),
    ("--loss_scale last_round", "data.mask_history", True),
    ("--loss_scale all", "data.train_on_prompt", True),
    ("--tuner_type lora --target_modules linear_qkv linear_proj", "finetuning.lora_target",
     ["q_proj", "k_proj", "v_proj", "o_proj"]),
    ("--tuner_type lora --modules_to_save word_embeddings", "finetuning.additional_target", ["embed_tokens"]),
    ("--lora_rank 4", "finetuning.lora_rank", 8),  # of tuner_type lora
    ("--freeze_aligner false", "finetuning.freeze_multi_modal_projector", False),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "path", "expected"), MEANINGS)
def test_what_flags_mean(flags, path, expected):
    run = read(flags, NPROC_PER_NODE="2")
    assert findings(run) == []
    assert value(run, path) == expected


RLHF = [
    ("", "run.stage", "dpo"),
    ("--rlhf_type kto --loss_type apo_zero_unpaired", "preference.kto_loss", "apo_zero_unpaired"),
    ("--rlhf_type rm --center_rewards_coefficient 0.1", "run.stage", "rm"),
    ("--loss_type hinge", "preference.pref_loss", ["hinge"]),
    ("--rpo_alpha 0.1", "preference.pref_ftx", 0.1),
    ("--calculate_per_token_loss false", "run.stage", "dpo"),
]


@pytest.mark.parametrize(("flags", "path", "expected"), RLHF)
def test_rlhf_is_a_preference_stage(flags, path, expected):
    run = read(flags, verb="rlhf")
    assert findings(run) == []
    assert value(run, path) == expected


def test_cached_rows_alone_are_not_held_out():
    run = read_swift(
        "sft", ["--model", "m", "--cached_dataset", "c", "--train_iters", "5"], env={}
    )  # 0.01 in version 3
    assert findings(run) == []
    assert value(run, "data.dataset") == ["c"]
    assert value(run, "data.val_size") == 0.0


def test_losses_of_all_pairs_together_are_refused():
    run = read("--loss_type kto_pair", verb="rlhf")
    (message,) = findings(run)
    assert message.startswith("--loss_type: loss_type: kto_pair is not supported")


REFUSED = [
    ("--cached_dataset c --split_dataset_ratio 0.1", "--cached_dataset"),  # which would hold rows of `d` out
    ("--min_lr 1e-6 --lr_decay_style linear", "--min_lr"),
    ("--lr_decay_iters 7", "--lr_decay_iters"),
    ("--lr_decay_style inverse-square-root", "--lr_decay_style"),
    ("--data_seed 1", "--data_seed"),
    ("--max_epochs 1", "--max_epochs"),  # version 3, with train_iters
    ("--calculate_per_token_loss false", "--calculate_per_token_loss"),
    ("--loss_scale react", "--loss_scale"),
    ("--log_interval 5 --hidden_size 8", "--hidden_size"),
    ("--optimizer dist_muon --muon_num_ns_steps 6", "--muon_num_ns_steps"),
    ("--do_train=false", "--do_train"),
    ("--tuner_type lora --target_modules all-embedding", "--target_modules"),
    ("--output_dir out --mcore_model " + 300 * "a", "--mcore_model"),
    ("--save_hf_model=false", "--save_hf_model"),
    ("--add_version true", "--add_version"),  # on two machines
]


@pytest.mark.parametrize(("flags", "where"), REFUSED)
def test_what_would_train_something_else_is_refused(flags, where):
    run = read(flags, config={**CONFIG, "hidden_size": 4}, NNODES="2", NODE_RANK="0", MASTER_ADDR="h")
    assert [finding.where for finding in run.loaded.check()] == [where]
    assert all(finding.why and finding.fix for finding in run.loaded.findings)


def test_a_decay_of_no_known_length_names_the_flag_for_it():
    (finding,) = read("--lr_decay_style WSD --lr_wsd_decay_style linear").loaded.check()
    assert finding.fix.startswith("write --lr_wsd_decay_iters 100")


def test_rules_speak_of_flags_by_the_names_of_their_version():
    new, old = read("--save_steps 0"), read("--save_interval 0")
    assert "--save_steps 1" in findings(new)[-1]
    assert "--save_interval 1" in findings(old)[-1]
    (message,) = read("--global_batch_size 6 --micro_batch_size 4").loaded.check(world_size=1)
    assert message.fix == "write --global_batch_size 4 or 8"
    (message,) = read("--tensor_model_parallel_size 2").loaded.check()
    assert message.fix == "write NPROC_PER_NODE=2 before the command"


def test_pictures_are_bounded_by_environment_variables():
    config = {**CONFIG, "model_type": "qwen2_5_vl", "vision_config": {}}
    run = read("--freeze_vit false", config=config, MAX_PIXELS="1003520", FPS_MAX_FRAMES="12")
    assert value(run, "data.image_max_pixels") == 1003520
    assert value(run, "data.video_maxlen") == 12
    assert value(run, "data.image_min_pixels") == 4 * 28**2
    assert value(run, "finetuning.freeze_deepstack_mergers") is True
    run = read("--model_kwargs", config=config, words=['{"fps": 1, "max_pixels": 5000}'])
    assert (value(run, "data.video_fps"), value(run, "data.image_max_pixels")) == (1.0, 5000 // 28**2 * 28**2)
    run = read(config={**config, "model_type": "qwen3_vl"}, IMAGE_MAX_TOKEN_NUM="100")
    assert value(run, "data.image_max_pixels") == 100 * 32**2


def test_frames_of_videos_have_room_above_the_smallest():
    """As in qwen_vl_utils, where the largest frame has at least 1.05 times the area of the smallest."""
    config = {"model_type": "qwen3_vl", "vision_config": {}, "text_config": CONFIG}
    run = read(config=config, VIDEO_MAX_PIXELS="50176")
    assert findings(run) == []
    assert value(run, "data.video_min_pixels") == 128 * 32**2
    assert value(run, "data.video_max_pixels") == int(128 * 32**2 * 1.05)
    run = read(config=config, VIDEO_MAX_PIXELS="50176", VIDEO_MIN_PIXELS="16384")
    assert value(run, "data.video_max_pixels") == 50176


def test_add_version_names_a_new_folder(tmp_path):
    (tmp_path / "v3-20260101-000000").mkdir()
    run = read(f"--output_dir {tmp_path} --add_version")
    assert value(run, "run.output_dir").startswith(f"{tmp_path}/v4-")
    assert value(read(f"--output_dir {tmp_path}"), "run.output_dir") == str(tmp_path)


def test_finetune_false_resumes_from_a_checkpoint_of_this_program(tmp_path):
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "manifest.json").touch()
    for flags in (f"--load {tmp_path} --finetune false", f"--model {tmp_path} --no_finetune"):
        assert value(read(flags), "run.resume_from_checkpoint") == str(tmp_path)
    assert value(read("--load m --finetune false"), "run.resume_from_checkpoint") is None


def test_a_checkpoint_of_megatron_core_is_told_from_a_model(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    run = read_swift("sft", ["--load", str(tmp_path), "--dataset", "d", "--train_iters", "5"], env={}, config=CONFIG)
    assert value(run, "model.mcore_model") == str(tmp_path)
    assert any("(finetune)" in line for line in swift_lines(run, run.loaded))
    refused = read(f"--load {tmp_path} --finetune false")
    assert [finding.where for finding in refused.loaded.findings] == ["--finetune"]
    (tmp_path / "model.safetensors").touch()  # version 4 writes both
    assert value(read(f"--load {tmp_path}"), "model.model_name_or_path") == str(tmp_path)


@pytest.mark.parametrize(
    ("flags", "scaling", "length"),
    [
        ("yarn --max_model_len 65537", {"rope_type": "yarn", "factor": 3.0}, 32768),
        ("linear --max_model_len 65536 --max_length 9", {"rope_type": "linear", "factor": 2.0}, 9),
        ('{"type":"yarn","factor":2.5}', {"type": "yarn", "factor": 2.5}, 32768),
        ('{"type":"yarn","original_max_position_embeddings":4096} --max_model_len 8192',
         {"type": "yarn", "original_max_position_embeddings": 4096, "factor": 2.0}, 32768),
    ],
)  # fmt: skip
def test_a_rotary_scaling_gets_its_factor(flags, scaling, length):
    run = read(f"--rope_scaling {flags}")
    assert run.loaded.findings == []
    assert value(run, "model.rope_scaling") == scaling
    assert value(run, "data.cutoff_len") == length


@pytest.mark.parametrize("flags", ["--rope_scaling yarn", "--rope_scaling dynamic", "--max_model_len 9"])
def test_a_rotary_scaling_without_a_factor_is_refused(flags):
    (finding,) = read(flags).loaded.findings
    assert finding.where == flags.split()[0]
    assert finding.fix


def test_trackers_are_those_of_the_version():
    old, new = read("--wandb_exp_name run"), read("--report_to swanlab --swanlab_exp_name run")
    assert value(old, "logging.report_to") == ["tensorboard"]  # the name alone says nothing to version 4
    assert value(read("--wandb_exp_name run --log_interval 1"), "logging.report_to") == ["tensorboard", "wandb"]
    assert value(new, "logging.swanlab_project") == "megatron-swift"
    assert value(new, "run.run_name") == "run"


def test_a_token_is_not_shown():
    run = read("--hub_token secret --push_to_hub")
    lines = "\n".join(swift_lines(run, run.loaded))
    assert "--hub_token ***" in lines
    assert "secret" not in lines


def test_run_yaml_trains_the_same(tmp_path):
    run = read("--lr 3e-5 --global_batch_size 8 --lora_rank 4 --tuner_type lora --min_lr 1e-6", NPROC_PER_NODE="2")
    loaded = run.loaded.for_world(2)
    path = tmp_path / "run.yaml"
    path.write_text(dump(loaded.settings, loaded.origins))
    assert load(path).require_valid(world_size=2) == loaded.settings
    text = path.read_text()
    assert "# Megatron-SWIFT 4's default" in text
    assert "# NPROC_PER_NODE" in text


def test_every_line_is_of_one_flag_and_aligned():
    run = read("--lr 3e-5 --micro_batch_size 2 --masked_softmax_fusion true --seed 42")
    lines = swift_lines(run, run.loaded.for_world(1))
    assert "swift      --micro_batch_size 2" in "\n".join(lines)
    assert not any("--seed" in line for line in lines)  # the same name, and the same value
    assert len({line.index("learning_rate") for line in lines if " learning_rate: " in line}) == 1
    assert any("--masked_softmax_fusion true" in line and "ignored: " in line for line in lines)
    assert isinstance(run.loaded.settings, Settings)


@pytest.mark.parametrize("count", ["²", "9" * 5000])
def test_a_number_of_processes_that_is_none_is_found_elsewhere(count):
    """Where the processes are decided, for every verb."""
    run = read(NPROC_PER_NODE=count)
    assert value(run, "run.num_processes") is None
