"""The LLaMA-Factory dialect knows every key that its users write, and dialects are tables."""

from pathlib import Path
from typing import NamedTuple

import pytest

from megatune.config.dialects.dialect import LLAMAFACTORY, Dialect, Row, table
from megatune.config.load import load
from megatune.config.rules import DATA_RULES
from megatune.config.setting import Mark
from megatune.config.settings import all_settings, marked, setting_value
from megatune.config.values import shown
from megatune.errors import MegatuneError

# What a LLaMA-Factory file for Megatron training may hold. Never shrinks.
CONTRACT = Path(__file__).with_name("contract_keys.txt").read_text().split()


class Argument(NamedTuple):
    name: str
    declared: str
    default: str
    sample: str
    fate: str


ARGUMENTS = [
    Argument(*line.split())
    for line in Path(__file__).with_name("llamafactory_keys.txt").read_text().splitlines()
    if not line.startswith("#")
]

MEGATRON_FILE = """
model_name_or_path: Qwen/Qwen2-7B-Instruct
do_train: true
stage: sft
finetuning_type: full # only support full for now
dataset: alpaca_en_demo
preprocessing_num_workers: 8
cutoff_len: 4096
template: qwen
output_dir: saves/mca/qwen2_full
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
num_train_epochs: 2
learning_rate: 2e-5
logging_steps: 1
save_steps: 100
lr_scheduler_type: cosine
bf16: true
tensor_model_parallel_size: 4
sequence_parallel: true
pipeline_model_parallel_size: 2
bias_activation_fusion: true
apply_rope_fusion: true
use_distributed_optimizer: true
overlap_param_gather: true
overlap_grad_reduce: true
use_mca: true
"""


@pytest.mark.parametrize("key", CONTRACT)
def test_every_key_of_the_contract_is_known(key):
    assert LLAMAFACTORY.knows(key)


def fate(name: str, value: str) -> str:
    """What a user is told of a key."""
    loaded = load(overrides=[f"{name}={value}"])
    findings = [*loaded.findings, *loaded.check_rules(leave_out=[])]
    if any(finding.what.startswith(f"{name}: ") and "is not supported" in finding.what for finding in findings):
        return "refused"
    if any(name in keys for keys in loaded.accepted.values()):
        return "accepted"
    if not loaded.findings and not ((row := LLAMAFACTORY.row_of(name)) and row.paths):
        return "passes"
    sets = {path for path, entry in loaded.entries.items() if entry.key == name and path not in loaded.invalid}
    return "works" if sets and (sets & marked(Mark.SECRET) or not loaded.findings) else "dropped"


@pytest.mark.parametrize("argument", ARGUMENTS, ids=lambda argument: argument.name)
def test_every_argument_of_llama_factory_becomes_what_the_table_says(argument):
    assert fate(argument.name, argument.sample) == argument.fate


def test_what_is_refused_passes_at_the_value_that_it_has_there():
    refused = [argument for argument in ARGUMENTS if argument.fate == "refused"]
    assert len(refused) > 80
    others = {"export_size", "export_device", "export_quantization_nsamples", "export_quantization_maxlen"}
    others |= {"task", "task_dir", "lang", "n_shot", "batch_size"}
    stuck = {argument.name for argument in refused if fate(argument.name, argument.default) == "refused"}
    assert stuck == others  # they say how a model is exported or scored, which a run does not


def test_every_default_that_differs_is_listed():
    differing = {}
    for name, _, default, _, becomes in ARGUMENTS:
        if becomes in ("works", "passes") and name not in ("hub_token", "swanlab_api_key"):
            settings = load(overrides=[f"{name}={default}"]).settings
            row = LLAMAFACTORY.row_of(name)
            here = {path: all_settings()[path].default for path in row.paths} if row else {}
            refused = fate(name, default) == "refused" or name == "optimizer_offload_fraction"
            if refused or any(setting_value(settings, path) != value for path, value in here.items()):
                differing[name] = default
    assert differing == {name: shown(row.default) for name, row in table("llamafactory").items() if row.kept}


def test_every_setting_can_be_set_and_every_key_sets_one():
    """Its own keys are the names of our settings, which options.txt freezes, and these."""
    for path, info in all_settings().items():
        row = LLAMAFACTORY.row_of(info.name)
        assert (row.paths, row.factor) == ((path,), 1)
        # Names of templates that mean the model's own chat template.
        assert {*row.values.values()} <= ({None} if info.name == "template" else set())
        assert LLAMAFACTORY.key_of(path) == info.name
    assert LLAMAFACTORY.names_of("data.packing") == [
        "packing", "neat_packing", "sequence_packing", "use_packed_sequences"
    ]  # fmt: skip
    known = {argument.name for argument in ARGUMENTS} | {info.name for info in all_settings().values()}
    others = {key for key, row in LLAMAFACTORY.rows.items() if row.paths or row.ignored} - known
    assert others == set()


def test_no_secret_is_shown_in_a_message():
    (finding,) = load(overrides=["om_hub_token=abcdef"]).findings
    assert "abcdef" not in finding.what
    assert load(overrides=["hf_hub_token=abcdef"]).secrets == {"checkpoint.hub_token": "abcdef"}


UNKNOWN = [
    ("pref_los", "did you mean pref_loss?"),
    ("plot_los", "did you mean plot_loss?"),
    ("lr", "lr is a flag of Megatron-SWIFT; write learning_rate"),
    ("train_iters", "train_iters is a flag of Megatron-SWIFT; write max_steps"),
    ("train_itrs", "did you mean train_iters, a flag of Megatron-SWIFT?; write max_steps"),
    ("nproc_per_node", "nproc_per_node is an option of torchrun; write num_processes"),
    ("base_model", "base_model is a key of Axolotl or Unsloth; write model_name_or_path"),
    ("sample_packing", "sample_packing is a key of Axolotl or Unsloth; write packing"),
    ("sequence_len", "sequence_len is a key of Axolotl or Unsloth; write cutoff_len"),
    ("adapter", "adapter is a key of Axolotl or Unsloth; write finetuning_type"),
    ("load_in_4bit", "load_in_4bit is a key of Axolotl or Unsloth; write quantization_bit"),
    ("adv_estimator", "adv_estimator is a key of ROLL, whose files `megatune rl` runs"),
    ("qqqq", "remove it; `megatune explain --all` lists every setting"),
]


@pytest.mark.parametrize(("key", "fix"), UNKNOWN)
def test_an_unknown_key_is_looked_for_in_every_dialect(key, fix):
    (finding,) = load(overrides=[f"{key}=1"]).findings
    assert (finding.what, finding.fix) == (f"unknown setting {key!r}", fix)


def test_what_changes_nothing_passes_with_a_line_for_each_reason():
    loaded = load(overrides=["trust_remote_code=true", "deepspeed=ds.json", "fsdp=full_shard", "flash_attn=null"])
    assert not loaded.findings
    assert loaded.accepted_notes() == [
        "trust_remote_code: code of a repository is never run: the supported model families do not need it",
        "deepspeed, fsdp: Megatron-Core shards the optimizer (use_distributed_optimizer), and the "
        "layout shards the model",
    ]
    assert load(overrides=["trust_remote_code=false"]).accepted_notes() == []


VALUES = [
    ("gradient_checkpointing=true", "recompute.recompute_granularity", "full"),
    ("gradient_checkpointing=False", "recompute.recompute_granularity", None),
    ("optim=sgd", "optimizer.sgd_momentum", 0.0),
    ("train_sampling_strategy=sequential", "data.disable_shuffling", True),
    ("mixed_precision=bf16_mixed", "precision.bf16", True),
    ("enable_torch_profiler=true", "logging.profile", True),
]


@pytest.mark.parametrize(("override", "path", "value"), VALUES)
def test_what_keys_of_other_names_set(override, path, value):
    loaded = load(overrides=[override])
    assert not loaded.findings
    assert setting_value(loaded.settings, path) == value


def test_no_key_is_refused_without_a_reason():
    assert all(row.paths or row.ignored or row.unsupported for row in LLAMAFACTORY.rows.values())


def test_a_megatron_file_for_eight_processes_is_read_unchanged(tmp_path):
    path = tmp_path / "qwen2_full.yaml"
    path.write_text(MEGATRON_FILE)
    settings = load(path).require_valid(world_size=8)
    assert settings.optimizer.learning_rate == 2e-5
    assert settings.parallel.model_parallel_size == 8
    assert settings.data.dataset == ["alpaca_en_demo"]


OFF = [
    "packing=false", "neat_packing=false", "streaming=false", "mix_strategy=concat", "interleave_probs=null",
    "tokenized_path=null", "overwrite_cache=false", "image_max_pixels=null", "freeze_language_model=false",
    "image_do_pan_and_scan=false", "crop_to_patches=false", "use_audio_in_video=false",
    "preprocessing_batch_size=1000",
    "context_parallel_size=1", "expert_model_parallel_size=1", "expert_tensor_parallel_size=1",
    "expert_tensor_parallel_size=null", "recompute_granularity=null", "moe_grouped_gemm=false",
    "account_for_loss_in_pipeline_split=false", "pipeline_model_parallel_layout=null", "calculate_per_token_loss=true",
    "transformer_impl=local", "ddp_find_unused_parameters=false", "trust_remote_code=true", "save_hf_model=true",
    "use_rslora=false", "create_new_adapter=false", "lora_rank=null", "lora_alpha=null", "adapter_name_or_path=null",
    "finetuning_type=full", "finetuning_type=freeze", "finetuning_type=lora", "freeze_vision_tower=true",
    "loraplus_lr_embedding=1e-6", "pissa_init=false", "export_legacy_format=false",
    "use_galore=false", "ppo_epochs=4", "reward_model=null", "reward_model_type=lora",
    "remove_unused_columns=true", "remove_unused_columns=false", "report_to=none",
    "do_train=True",
]  # fmt: skip


@pytest.mark.parametrize("override", OFF)
def test_a_value_that_asks_for_nothing_passes(override):
    loaded = load(overrides=["model_name_or_path=m", "dataset=d", "output_dir=o", "eval_strategy=no", override])
    assert loaded.check() == []


REFUSED = [
    "image_do_pan_and_scan=true", "use_audio_in_video=true",
    "hub_strategy=checkpoint", "hub_strategy=all_checkpoints",
    "calculate_per_token_loss=false", "save_hf_model=false", "do_train=false",
    "loraplus_lr_embedding=1e-5", "pissa_init=true", "pissa_iter=-1", "pissa_convert=true",
    "oft_rank=8", "adapter_folder=out", "export_dir=out", "export_size=5", "export_quantization_bit=4",
    "use_galore=true", "use_badam=true", "optim=adafactor", "stage=ppo",
    "reward_model=r", "reward_model_type=api", "ppo_epochs=1",
    "ref_model_quantization_bit=4",
]  # fmt: skip


@pytest.mark.parametrize("override", REFUSED)
def test_what_is_not_built_is_refused_by_name_with_a_reason(override):
    key = override.partition("=")[0]
    (finding,) = (each for each in load(overrides=[override]).check() if "missing" not in each.what)
    assert finding.what.startswith(f"{key}: ")
    assert finding.what.endswith(" is not supported")
    assert finding.where == override
    assert finding.why
    assert finding.fix


def test_messages_of_refused_keys(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("finetuning_type: lora\nloraplus_lr_embedding: 1e-5\npure_bf16: true\nrope_scaling: dynamic\n")
    findings = [finding for finding in load(path).check() if finding.where]
    assert "\n".join(map(str, findings)).replace(str(path), "run.yaml") == (
        "run.yaml:2: loraplus_lr_embedding: 1e-5 is not supported\n"
        "    why: adapters on embeddings are not supported: additional_target trains the embeddings, at learning_rate\n"
        "    fix: remove loraplus_lr_embedding, or write loraplus_lr_embedding: 1e-06\n"
        "run.yaml:3: pure_bf16: true is not supported\n"
        "    why: master weights are kept in fp32, because small updates would be lost in bf16\n"
        "    fix: remove pure_bf16; write bf16: true; exp_avg_dtype and exp_avg_sq_dtype: bf16 save memory\n"
        "run.yaml:4: rope_scaling: dynamic is not supported\n"
        "    why: dynamic has no effect up to max_position_embeddings, which LLaMA-Factory multiplies by the factor\n"
        "    fix: write rope_scaling: yarn"
    )


@pytest.mark.parametrize("stage", ["ppo", "orpo"])
def test_stages_that_are_not_built_point_to_what_is(stage):
    (message,) = (str(finding) for finding in load(overrides=[f"stage={stage}"]).findings)
    assert message == (
        f"stage={stage}: stage: {stage} is not supported\n"
        "    why: ORPO is a loss of stage dpo, and PPO is not supported here\n"
        "    fix: for ORPO write stage: dpo and pref_loss: orpo; for PPO use `megatune rl`"
    )


EVALUATES = (
    "do_eval: without eval_strategy a run evaluates after every epoch, and LLaMA-Factory only after the last one"
)
DO_EVAL = [
    ("do_eval: true", [], "epoch", [EVALUATES]),
    ("do_eval: true\neval_strategy: steps", [], "steps", ["do_eval: eval_strategy says it"]),
    ("eval_strategy: steps", ["do_eval=true"], "steps", ["do_eval: eval_strategy says it"]),
    ("do_eval: true", ["evaluation_strategy=steps"], "steps", ["do_eval: evaluation_strategy says it"]),
    ("do_eval: false\neval_strategy: epoch", [], "epoch", []),
    ("do_eval: false", [], "no", []),
]


@pytest.mark.parametrize(("text", "overrides", "strategy", "notes"), DO_EVAL)
def test_do_eval_evaluates_where_nothing_else_says_when(tmp_path, text, overrides, strategy, notes):
    path = tmp_path / "run.yaml"
    path.write_text(f"{text}\neval_dataset: e\n")
    loaded = load(path, overrides)
    assert loaded.settings.evaluation.eval_strategy == strategy
    assert loaded.accepted_notes() == notes


def test_do_eval_that_is_no_choice_is_said_alone(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("do_eval: maybe\neval_dataset: e\n")
    findings = [str(each) for each in load(path).check() if "missing" not in each.what]
    assert [each.partition("\n")[0] for each in findings] == [f"{path}:1: do_eval is 'maybe'"]


OF_VERSION_1 = ["global_batch_size", "dp_size", "dist_timeout", "save_epochs", "lr_scheduler_config", "save_ckpt_as_hf"]
OF_VERSION_1 += ["batching_workers", "custom_chat_template", "enable_activation_checkpointing", "mp_shard_size"]


@pytest.mark.parametrize("key", OF_VERSION_1)
def test_keys_of_version_1_are_refused_with_the_key_to_write(key):
    finding = next(each for each in load(overrides=[f"{key}=2"]).findings)
    assert finding.what == f"{key}: 2 is not supported"
    assert "version 1" in finding.why
    assert finding.fix.startswith((f"remove {key}; write ", "remove it: "))


def test_two_names_of_one_setting_may_say_the_same(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("packing: true\nneat_packing: true\n")
    loaded = load(path)
    assert not loaded.findings
    assert loaded.settings.packing


def test_the_last_value_decides_whether_a_key_is_refused(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("packing: true\n")
    assert load(path, ["packing=false"]).findings == []


def test_reading_data_refuses_what_is_not_built(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model_name_or_path: m\ndataset: d\nloraplus_lr_embedding: 1\n")
    with pytest.raises(MegatuneError, match=r"run\.yaml:3: loraplus_lr_embedding: 1 is not supported"):
        load(path).require_valid(rules=DATA_RULES)


def test_another_dialect_is_a_table():
    dialect = Dialect(
        name="other",
        rows={
            "lr": Row(target="optimizer.learning_rate"),
            "save": Row(target="run.output_dir"),
            "output_dir": Row(target="run.output_dir"),
            "tp_comm_overlap": Row(unsupported="needs Transformer Engine", passes=[False]),
        },
    )
    flags = ["--lr", "1", "--save", "out", "--tp-comm-overlap", "--learning_rate", "1e-5", "--neat_packing"]
    loaded = load(flags=flags, dialect=dialect)
    assert loaded.settings.optimizer.learning_rate == 1e-5
    assert loaded.settings.run.output_dir == "out"
    assert loaded.origins["run.output_dir"] == "flag"
    assert [finding.what for finding in loaded.findings] == [
        "unknown setting 'neat_packing'",
        "tp_comm_overlap: true is not supported",
    ]
    assert dialect.key_of("run.output_dir") == "save"


@pytest.mark.parametrize("name", ["glm4_moe", "gemma4", "qwen3_6", "seed_oss"])
def test_a_name_of_a_models_own_chat_template_is_null(name: str) -> None:
    loaded = load(overrides=[f"template={name}"])
    assert not loaded.findings
    assert loaded.settings.data.template is None
