"""Every rule that spans settings, with its whole message: what, why, and the nearest valid value."""

import dataclasses

import pytest

from megatune.architecture import Architecture
from megatune.config.load import load
from megatune.config.rules import check
from megatune.config.rules.layout import tensor_parallel_fits
from megatune.config.rules.rule import multiples_around, nearest
from megatune.plan.catalogue import find_model

QWEN = Architecture(
    model_type="qwen2",
    num_layers=12,
    hidden_size=96,
    ffn_hidden_size=192,
    num_attention_heads=12,
    num_query_groups=4,
    kv_channels=8,
    vocab_size=151_643,  # divided by no tensor-parallel size: vocabularies are padded
    max_position_embeddings=4096,
    norm_epsilon=1e-6,
    rotary_base=1e6,
)
BASE = ["model_name_or_path=m", "dataset=d", "output_dir=o"]


def messages(*overrides: str, architecture: Architecture | None = QWEN, world_size: int | None = None) -> list[str]:
    loaded = load(overrides=[*BASE, *overrides])
    assert loaded.findings == []
    return [str(finding) for finding in check(loaded.settings, architecture, world_size)]


VALID = [
    ["cutoff_len=8192", "packing=true"],  # documents of a packed row count positions from 0
    [],
    ["tensor_model_parallel_size=2", "sequence_parallel=true", "pipeline_model_parallel_size=2", "bf16=true"],
    ["tensor_model_parallel_size=4"],  # as many as key/value heads
    [
        "tensor_model_parallel_size=2",
        "pipeline_model_parallel_size=2",
        "virtual_pipeline_model_parallel_size=3",
        "gradient_accumulation_steps=4",
        "overlap_grad_reduce=true",
        "overlap_param_gather=true",
        "num_processes=8",
    ],
    ["optimizer=sgd", "fp16=true"],
    ["attention_backend=fused", "context_parallel_size=2", "cp_comm_type=a2a"],
    ["attention_backend=flash", "context_parallel_size=2", "packing=true"],
    ["cutoff_len=4096"],
    ["tensor_model_parallel_size=4", "sequence_parallel=true", "cutoff_len=4"],
    ["eval_strategy=steps", "val_size=0.1", "load_best_model_at_end=true", "save_steps=20", "eval_steps=10"],
    ["eval_strategy=epoch", "eval_dataset=e", "load_best_model_at_end=true", "save_strategy=epoch"],
    ["eval_strategy=epoch", "val_size=100"],
    ["eval_generate_steps=10", "val_size=100"],  # held out for answers alone
    ["eval_strategy=epoch", "eval_dataset=e", "predict_with_generate=true"],
    ["eval_generate_steps=10", "eval_generate_prompts=q.txt", "stage=pt"],
    ["lr_scheduler_type=cosine", "lr_scheduler_kwargs={num_cycles: 0.5}", "warmup_ratio=0.1"],
    ["lr_scheduler_type=inverse_sqrt", "lr_scheduler_kwargs={timescale: 100}", "warmup_steps=5"],
    ["lr_scheduler_type=cosine_with_min_lr", "lr_scheduler_kwargs={min_lr: 1e-6}"],
    ["lr_scheduler_type=cosine_with_min_lr", "lr_scheduler_kwargs={min_lr_rate: 0.1, num_cycles: 0.5}"],
    [
        "lr_scheduler_type=warmup_stable_decay",
        "lr_scheduler_kwargs={num_decay_steps: 5, num_stable_steps: 5, warmup_type: cosine, decay_type: 1-sqrt,"
        " min_lr_ratio: 0.1, num_cycles: 0.5}",
    ],
    ["lr_scheduler_type=constant_with_warmup", "warmup_steps=0.1"],
    ["overwrite_output_dir=true", "resume_from_checkpoint=elsewhere/checkpoint-5"],
]


@pytest.mark.parametrize("overrides", VALID)
def test_what_is_valid_passes(overrides):
    assert messages(*overrides) == []


# overrides -> the one message they cause
WRONG = [
    # checkpoints
    (
        ["save_format=torch_dist", "finetuning_type=lora"],
        "save_format: torch_dist with finetuning_type: lora\n"
        "    why: an adapter checkpoint contains no model, and Megatron-Core has no common format for adapters\n"
        "    fix: write save_format: hf and merge_lora: true, then "
        "megatune export --to_mcore true of output_dir/merged",
    ),
    (
        ["save_format=torch_dist", "stage=rm"],
        "save_format: torch_dist with stage: rm\n"
        "    why: Megatron-Core's language model has no score layer\n"
        "    fix: write save_format: hf",
    ),
    (
        ["hub_model_id=me/mine"],
        "hub_model_id: me/mine without push_to_hub\n"
        "    why: nothing would be pushed\n"
        "    fix: write push_to_hub: true, or remove hub_model_id",
    ),
    (
        ["push_to_hub=true", "hub_model_id=me/mine/too"],
        "hub_model_id 'me/mine/too' is not a valid repository id\n    fix: write hub_model_id: OWNER/NAME",
    ),
    # layout
    (
        ["tensor_model_parallel_size=5"],
        "tensor_model_parallel_size 5 does not split the model's 12 attention heads, "
        "4 key/value heads, 192 MLP channels\n"
        "    why: each process takes an equal number of each; key/value heads may also be shared by several processes\n"
        "    fix: write tensor_model_parallel_size: 4, the nearest valid size",
    ),
    (
        ["tensor_model_parallel_size=3"],
        "tensor_model_parallel_size 3 does not split the model's 4 key/value heads\n"
        "    why: each process takes an equal number of each; key/value heads may also be shared by several processes\n"
        "    fix: write tensor_model_parallel_size: 2, the nearest valid size",
    ),
    (
        ["tensor_model_parallel_size=24"],
        "tensor_model_parallel_size 24 does not split the model's 12 attention heads\n"
        "    why: each process takes an equal number of each; key/value heads may also be shared by several processes\n"
        "    fix: write tensor_model_parallel_size: 4, the nearest valid size",
    ),
    (
        ["virtual_pipeline_model_parallel_size=2"],
        "virtual_pipeline_model_parallel_size: 2 with pipeline_model_parallel_size: 1\n"
        "    why: there is one stage, which holds everything\n"
        "    fix: write pipeline_model_parallel_size: 2, or remove virtual_pipeline_model_parallel_size",
    ),
    (
        ["pipeline_model_parallel_size=4", "virtual_pipeline_model_parallel_size=3", "gradient_accumulation_steps=6"],
        "gradient_accumulation_steps 6 is not a multiple of pipeline_model_parallel_size 4\n"
        "    why: with virtual stages, micro-batches go through the pipeline in rounds of one for each stage\n"
        "    fix: write gradient_accumulation_steps: 4 or 8",
    ),
    (
        ["pipeline_model_parallel_size=4", "virtual_pipeline_model_parallel_size=3"],
        "gradient_accumulation_steps 1 is not a multiple of pipeline_model_parallel_size 4\n"
        "    why: with virtual stages, micro-batches go through the pipeline in rounds of one for each stage\n"
        "    fix: write gradient_accumulation_steps: 4",
    ),
    (
        ["output_dir=./m/"],
        "output_dir is model_name_or_path, './m/'\n"
        "    why: the final model would overwrite the weights that the run starts from\n"
        "    fix: write another output_dir",
    ),
    (
        ["sequence_parallel=true"],
        "sequence_parallel: true with tensor_model_parallel_size: 1\n"
        "    why: it splits the sequence over the tensor-parallel processes; there is one\n"
        "    fix: write tensor_model_parallel_size: 2, or remove sequence_parallel",
    ),
    (
        ["sequence_parallel=true", "tensor_model_parallel_size=4", "cutoff_len=3"],
        "cutoff_len 3 is shorter than tensor_model_parallel_size 4\n"
        "    why: sequence_parallel gives each tensor-parallel process a part of the sequence\n"
        "    fix: write cutoff_len: 4 or more",
    ),
    (
        ["tensor_model_parallel_size=2", "pipeline_model_parallel_size=2", "num_processes=6"],
        "6 processes are not a multiple of the 4 that one replica of the model takes\n"
        "    why: tensor_model_parallel_size 2 times pipeline_model_parallel_size 2 is 4\n"
        "    fix: write pipeline_model_parallel_size: 1, or write num_processes: 4 or 8",
    ),
    (
        ["overlap_param_gather=true"],
        "overlap_param_gather: true without overlap_grad_reduce\n"
        "    why: it gathers the shards of the distributed optimizer in the buckets of the overlapped reduction\n"
        "    fix: write overlap_grad_reduce: true, or remove overlap_param_gather",
    ),
    (
        ["overlap_param_gather=true", "overlap_grad_reduce=true", "use_distributed_optimizer=false"],
        "overlap_param_gather: true without use_distributed_optimizer\n"
        "    why: it gathers the shards of the distributed optimizer in the buckets of the overlapped reduction\n"
        "    fix: write use_distributed_optimizer: true, or remove overlap_param_gather",
    ),
    (
        ["attention_backend=fused", "packing=true"],
        "attention_backend: fused and packing: true\n"
        "    why: cuDNN's attention supports rows of one sequence only; packed rows need flash attention\n"
        "    fix: write attention_backend: auto or flash",
    ),
    (
        ["attention_backend=fused", "context_parallel_size=2", "cp_comm_type=all_gather"],
        "attention_backend: fused and cp_comm_type all_gather\n"
        "    why: cuDNN's attention supports whole rows only, and each process has a part of the row's queries\n"
        "    fix: write attention_backend: auto or flash; or cp_comm_type: a2a, which attends to whole rows",
    ),
    # precision and length
    (
        ["bf16=true", "fp16=true"],
        "fp16: true with bf16: true\n"
        "    why: the model computes in one of them\n"
        "    fix: remove fp16: bf16 needs no loss scaling",
    ),
    (
        ["cutoff_len=4097"],
        "cutoff_len 4097 is more than the 4096 positions of the model\n"
        "    why: the rotary embeddings of its config.json do not support more\n"
        "    fix: write cutoff_len: 4096, the longest possible, or rope_scaling: yarn",
    ),
    # learning rate
    (
        ["warmup_ratio=0.1", "warmup_steps=5"],
        "warmup_ratio 0.1 and warmup_steps 5\n"
        "    why: both set the length of the warm-up\n"
        "    fix: keep one of the two",
    ),
    (
        ["warmup_steps=5.5"],
        "warmup_steps 5.5 is neither a fraction below 1 nor a number of steps\n    fix: write warmup_steps: 6",
    ),
    (
        ["lr_scheduler_type=constant", "warmup_ratio=0.1"],
        "lr_scheduler_type constant with warmup_ratio 0.1\n"
        "    why: a constant rate has no warm-up\n"
        "    fix: write lr_scheduler_type: constant_with_warmup",
    ),
    (
        ["max_steps=0"],
        "max_steps is 0\n"
        "    why: nothing would be trained\n"
        "    fix: write max_steps: 1, or -1 to let num_train_epochs decide",
    ),
    (
        ["lr_scheduler_type=cosine_with_min_lr"],
        "lr_scheduler_type cosine_with_min_lr without min_lr or min_lr_rate\n"
        "    why: the minimum rate has no default\n"
        "    fix: write lr_scheduler_kwargs: {min_lr: 5e-06}, a tenth of the peak",
    ),
    (
        ["lr_scheduler_type=cosine_with_min_lr", "lr_scheduler_kwargs={min_lr: 1e-6, min_lr_rate: 0.1}"],
        "lr_scheduler_kwargs has min_lr and min_lr_rate\n    why: both set the minimum rate\n    fix: keep one",
    ),
    (
        ["lr_scheduler_type=cosine_with_min_lr", "lr_scheduler_kwargs={min_lr: 1}"],
        "min_lr 1 is above learning_rate 5e-05\n    fix: write a min_lr of 5e-05 or less",
    ),
    (
        ["lr_scheduler_type=polynomial", "learning_rate=1e-7"],
        "lr_end 1e-07 is not below learning_rate 1e-07\n"
        "    fix: write lr_scheduler_kwargs: {lr_end: 1e-08}, a tenth of the peak",
    ),
    (
        ["lr_scheduler_type=cosine_with_min_lr", "lr_scheduler_kwargs={min_lr: low}"],
        "lr_scheduler_kwargs: min_lr is 'low'\n"
        "    why: expected a number, at least 0\n"
        "    fix: give min_lr a number, at least 0",
    ),
    (
        ["lr_scheduler_type=warmup_stable_decay"],
        "lr_scheduler_type warmup_stable_decay without num_decay_steps\n"
        "    why: the length of the decay has no default\n"
        "    fix: write lr_scheduler_kwargs: {num_decay_steps: 100}, "
        "with the number of final steps in which the rate decays",
    ),
    (
        ["lr_scheduler_type=warmup_stable_decay", "lr_scheduler_kwargs={num_decay_step: 5, num_decay_steps: 5}"],
        "lr_scheduler_kwargs: warmup_stable_decay does not take 'num_decay_step'\n"
        "    why: it takes num_decay_steps, num_stable_steps, warmup_type, decay_type, min_lr_ratio, num_cycles\n"
        "    fix: did you mean num_decay_steps?",
    ),
    (
        ["lr_scheduler_kwargs={min_lr: 1e-6}"],
        "lr_scheduler_kwargs: linear does not take 'min_lr'\n"
        "    why: it takes no arguments\n"
        "    fix: remove min_lr, or choose another lr_scheduler_type",
    ),
    # data and evaluation
    (
        ["dataset=null"],
        "dataset is missing\n    fix: write dataset: NAME, one or more of the names in dataset_info.json",
    ),
    (
        ["model_name_or_path=null"],
        "model_name_or_path is missing\n    fix: write model_name_or_path: FOLDER, a Hugging Face checkpoint, or the "
        "id of a model on a hub",
    ),
    (
        ["output_dir="],
        "output_dir is missing\n    fix: write output_dir: FOLDER, for checkpoints, logs and the final model",
    ),
    (
        ["overwrite_output_dir=true", "resume_from_checkpoint=true"],
        "resume_from_checkpoint: true with overwrite_output_dir: true\n"
        "    why: one starts over, the other resumes from the newest checkpoint of the same folder\n"
        "    fix: remove resume_from_checkpoint or overwrite_output_dir",
    ),
    (
        ["on_bad_step=go_back", "save_strategy=no"],
        "on_bad_step: go_back with save_strategy: no\n"
        "    why: there would be no checkpoint to go back to\n"
        "    fix: write save_strategy: steps, or on_bad_step: skip",
    ),
    (
        ["on_bad_step=go_back", "save_only_model=true"],
        "on_bad_step: go_back with save_only_model: true\n"
        "    why: a run cannot resume from a checkpoint without its training state\n"
        "    fix: write save_only_model: false, or on_bad_step: skip",
    ),
    (
        ["max_bad_steps=3"],
        "max_bad_steps: 3 with on_bad_step: stop\n"
        "    why: the first bad step ends the run\n"
        "    fix: write on_bad_step: skip, or remove max_bad_steps",
    ),
    (
        ["train_on_prompt=true", "mask_history=true"],
        "mask_history: true with train_on_prompt: true\n"
        "    why: one trains on every turn, the other on the last answer only\n"
        "    fix: remove mask_history or train_on_prompt",
    ),
    (
        ["eval_strategy=epoch", "val_size=0.1", "eval_dataset=e"],
        "eval_dataset: [e] with val_size: 0.1\n"
        "    why: both set the evaluation data\n"
        "    fix: remove val_size, to train on all rows",
    ),
    (
        ["eval_strategy=epoch", "val_size=10.4"],
        "val_size 10.4 is neither a fraction below 1 nor a number of rows\n    fix: write val_size: 10 for 10 rows",
    ),
    (
        ["eval_strategy=steps"],
        "eval_strategy: steps without val_size or eval_dataset\n"
        "    why: there is nothing to evaluate on\n"
        "    fix: write val_size: 0.1 to hold out a tenth of the rows, "
        "name an eval_dataset, or write eval_strategy: no",
    ),
    (
        ["val_size=0.1"],
        "val_size with eval_strategy no\n"
        "    why: the held-out rows would be neither trained on nor evaluated\n"
        "    fix: write eval_strategy: epoch, or remove val_size",
    ),
    (
        ["eval_dataset=e"],
        "eval_dataset with eval_strategy no\n"
        "    why: it would not be read\n"
        "    fix: write eval_strategy: epoch, or remove eval_dataset",
    ),
    (
        ["load_best_model_at_end=true"],
        "load_best_model_at_end: true with eval_strategy no\n"
        "    why: the best checkpoint must be saved and evaluated at the same step\n"
        "    fix: write eval_strategy: steps, or load_best_model_at_end: false",
    ),
    (
        ["load_best_model_at_end=true", "eval_strategy=epoch", "val_size=2"],
        "load_best_model_at_end: true with save_strategy steps and eval_strategy epoch\n"
        "    why: the best checkpoint must be saved and evaluated at the same step\n"
        "    fix: write save_strategy: epoch",
    ),
    (
        ["load_best_model_at_end=true", "eval_strategy=steps", "val_size=2", "save_steps=50", "eval_steps=20"],
        "load_best_model_at_end: true with save_steps 50, which is not a multiple of eval_steps 20\n"
        "    why: the best checkpoint must be saved and evaluated at the same step\n"
        "    fix: write save_steps: 40 or 60",
    ),
    (
        ["profile=true", "max_steps=100", "profile_step_end=10"],
        "profile_step_end 10 is not after profile_step_start 10\n    why: no step would be profiled\n"
        "    fix: write profile_step_end: 12",
    ),
    (
        ["profile=true", "max_steps=8"],
        "profile_step_end 12 is after max_steps 8\n    why: the run ends earlier\n"
        "    fix: write profile_step_end: 8 and profile_step_start: 6",
    ),
    (
        ["profile=true", "max_steps=100", "profile_ranks=0,-1"],
        "profile_ranks has -1\n    why: ranks are numbered from 0\n    fix: write profile_ranks: [0]",
    ),
    (
        ["report_to=tensorboard,none"],
        "report_to has none and tensorboard\n    fix: remove none",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), WRONG)
def test_what_is_wrong_is_told_with_the_nearest_valid_value(overrides, message):
    assert messages(*overrides) == [message]


def test_the_world_that_was_started_goes_before_num_processes():
    layout = ("tensor_model_parallel_size=4", "pipeline_model_parallel_size=2")
    assert messages(*layout, world_size=16) == []
    assert messages(*layout, world_size=4) == [
        "4 processes are not a multiple of the 8 that one replica of the model takes\n"
        "    why: tensor_model_parallel_size 4 times pipeline_model_parallel_size 2 is 8\n"
        "    fix: write pipeline_model_parallel_size: 1, or start 8 processes"
    ]


EXPERTS_THAT_DO_NOT_FIT = {
    "experts over fewer processes": (["expert_model_parallel_size=16"], "expert_model_parallel_size: 8"),
    "whole experts": (
        ["tensor_model_parallel_size=4", "expert_model_parallel_size=4", "pipeline_model_parallel_size=2",
         "sequence_parallel=true"],
        "expert_tensor_parallel_size: 1",
    ),
    "neither is enough": (["expert_model_parallel_size=16", "pipeline_model_parallel_size=16"], ""),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPERTS_THAT_DO_NOT_FIT)
def test_experts_that_do_not_fit_the_processes_name_a_size_that_does(name):
    overrides, size = EXPERTS_THAT_DO_NOT_FIT[name]
    architecture = find_model("Qwen3-30B-A3B").architecture
    (message,) = messages(*overrides, world_size=8, architecture=architecture)
    fix = message.partition("fix: ")[2]
    assert fix.startswith(f"write {size}, or start " if size else "start ")


def test_without_an_architecture_its_rules_say_nothing():
    assert messages("tensor_model_parallel_size=5", "pipeline_model_parallel_size=7", architecture=None) == []


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("tp", range(1, 17))
def test_the_nearest_tensor_parallel_size_is_valid_and_none_is_nearer(groups, tp):
    model = dataclasses.replace(QWEN, num_attention_heads=16, num_query_groups=groups, ffn_hidden_size=48)
    if tensor_parallel_fits(model, tp):
        assert messages(f"tensor_model_parallel_size={tp}", architecture=model) == []
        return
    (message,) = messages(f"tensor_model_parallel_size={tp}", architecture=model)
    named = int(message.rpartition("size: ")[2].partition(",")[0])
    assert messages(f"tensor_model_parallel_size={named}", architecture=model) == []
    nearer = range(tp - abs(tp - named) + 1, tp + abs(tp - named))
    assert not any(size > 0 and tensor_parallel_fits(model, size) for size in nearer)


def test_a_finding_points_at_the_line_that_was_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("dataset: d\nmodel_name_or_path: m\noutput_dir: o\n\nsequence_parallel: true\n")
    loaded = load("run.yaml", ["bf16=true"], ["--fp16"])
    assert [finding.where for finding in loaded.check()] == ["run.yaml:5", "--fp16"]


def test_nearest_and_multiples():
    assert nearest(3, [1, 2, 4]) == 2
    assert multiples_around(7, 4) == (4, 8)
    assert multiples_around(3, 4) == (4,)


WRONG_ANSWERS = [
    (
        ["predict_with_generate=true", "eval_generate_prompts=q.txt"],
        "predict_with_generate: true with eval_strategy no\n"
        "    why: answers are generated at evaluations\n"
        "    fix: write eval_generate_steps: 100, or an eval_strategy",
    ),
    (
        ["eval_generate_steps=10"],
        "eval_generate_steps without prompts\n"
        "    why: there are no held-out rows with prompts\n"
        "    fix: write eval_generate_prompts: FILE, or write val_size: 0.1",
    ),
    (
        ["eval_generate_steps=10", "eval_dataset=e", "stage=pt"],
        "eval_generate_steps with stage pt\n"
        "    why: held-out texts of stage pt have no prompts\n"
        "    fix: write eval_generate_prompts: FILE",
    ),
    (
        ["predict_with_generate=true", "eval_strategy=epoch", "val_size=5", "train_on_prompt=true"],
        "predict_with_generate with train_on_prompt: true\n"
        "    why: rows do not mark where their answers begin\n"
        "    fix: write eval_generate_prompts: FILE",
    ),
    (
        ["eval_generate_steps=10", "val_size=5", "stage=rm"],
        "eval_generate_steps: 10 with stage: rm\n"
        "    why: a model with scores generates no text\n"
        "    fix: remove eval_generate_steps",
    ),
    (
        ["eval_generate_steps=10", "val_size=5", "eval_generate_tokens=5000"],
        "eval_generate_tokens 5000 of 4096 positions\n"
        "    why: there is no room for prompts\n"
        "    fix: write eval_generate_tokens: 2048",
    ),
    (
        ["eval_generate_steps=10", "eval_generate_prompts=q.txt", "val_size=5"],
        "val_size with eval_strategy no\n"
        "    why: the held-out rows would be neither trained on nor evaluated\n"
        "    fix: write eval_strategy: epoch, or remove val_size",
    ),
]


@pytest.mark.parametrize(("overrides", "expected"), WRONG_ANSWERS)
def test_answers_have_prompts_and_steps(overrides: list[str], expected: str) -> None:
    assert messages(*overrides) == [expected]
