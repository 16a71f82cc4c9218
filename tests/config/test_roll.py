"""ROLL's files: what they say is what a run gets, and everything that is wrong is said at once, with its place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_model_defaults import SPARSE

from megatune.cli.main import main
from megatune.config.dialects.roll import ReadRL, read_roll, run_yaml
from megatune.config.dialects.roll_reader import read_devices
from megatune.config.entry import is_rl_file

ROLES = ("actor_train", "critic")
FILES = Path(__file__).with_name("roll_files")
STRATEGY = "actor_train.strategy_args.strategy_config"
JUDGED = (
    "rewards.math.worker_cls=LLMJudgeRewardWorker",
    "rewards.math.judge_model_type=inference",
    "rewards.math.device_mapping=[0]",
    "rewards.math.model_args.model_name_or_path=J",
    "rewards.math.strategy_args.strategy_name=hf_infer",
)
TEACHER = "teacher={device_mapping: [2], strategy_args: {strategy_name: hf_infer}, model_args: {model_name_or_path: T}}"
SAMPLER = "actor_infer.strategy_args.strategy_config"
SGLANG = ("actor_infer.strategy_args.strategy_name=sglang", f"{SAMPLER}.mem_fraction_static=0.8")
VLLM = "actor_infer.strategy_args.strategy_name=vllm"
PACKED = "actor_train.sequence_packing_args.max_packed_sequence_length_train"
CORRECTION = "train_infer_correction"
FILTER = "rewards.math.query_filter_config={{type: mean_filter, filter_args: {}}}"


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Read a text as run.yaml."""
    monkeypatch.chdir(tmp_path)

    def read_text(text: str, *overrides: str) -> ReadRL:
        (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
        return read_roll("run.yaml", overrides)

    return read_text


SMALL = """\
pretrain: M
response_length: 64
prompt_length: 32
rollout_batch_size: 4
num_return_sequences_in_group: 4
adv_estimator: grpo
actor_train:
  device_mapping: list(range(0,2))
  training_args: {per_device_train_batch_size: 1, gradient_accumulation_steps: 8, learning_rate: 1e-6}
  data_args: {template: native, messages: messages, file_name: [a.jsonl]}
  strategy_args: {strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 1}}
actor_infer:
  device_mapping: "[0]"
  generating_args: {temperature: 1.0, top_p: 1.0, top_k: -1}
  strategy_args: {strategy_name: builtin}
rewards:
  math: {worker_cls: MathRuleRewardWorker, tag_included: [math]}
"""


@pytest.mark.parametrize("path", sorted(FILES.glob("*.yaml")), ids=lambda path: path.stem)
def test_files_are_what_their_facts_say(path):
    """Each file begins with facts as comments: `# actor_infer.devices_per_engine = 2`."""
    found = read_roll(path)
    assert found.findings == ()
    settings = found.settings
    facts = re.findall(r"^# ([\w.\[\]'\-]+) = (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert facts
    for place, value in facts:
        assert eval(f"settings.{place}", {"settings": settings}) == eval(value), place


def test_small_file(read):
    found = read(SMALL)
    settings = found.settings
    assert found.findings == ()
    assert settings is not None
    assert settings.data.domain_interleave_probs == {"math": 1.0}
    assert settings.algorithm.norm_mean_type == settings.algorithm.norm_std_type == "group"
    assert settings.actor_infer.generating_args.max_new_tokens == 64
    assert settings.actor_infer.generating_args.top_k == 0
    engine = settings.actor_train.settings
    assert (engine.precision.bf16, engine.data.cutoff_len, engine.run.num_processes) == (True, 96, 2)
    assert engine.optimizer.max_steps == 500 * 16 // 16
    assert not settings.algorithm.enable_old_logprobs_recompute


def test_the_engine_tells_the_experts_that_training_replays(read):
    packed = ("actor_train.use_sequence_packing=true", f"{PACKED}=96", "actor_train.router_replay.mode=R3")
    found = read(SMALL, *packed)
    assert found.findings == ()
    assert found.settings.actor_train.replays_routing
    assert found.settings.actor_infer.return_routing
    assert not read(SMALL).settings.actor_infer.return_routing
    vllm = read(SMALL.replace("builtin", "vllm"), *packed)
    assert vllm.settings.actor_infer.return_routing
    config = "actor_infer.strategy_args.strategy_config={pipeline_parallel_size: 2, enable_prefix_caching: false}"
    found = read(SMALL.replace("builtin", "vllm").replace('"[0]"', '"[0, 1]"'), *packed, config).findings
    assert [each.fix.partition(",")[0] for each in found] == [
        "write pipeline_parallel_size: 1",
        "write enable_prefix_caching: true",
    ]


def test_a_file_that_was_read_is_written_as_one_that_says_the_same(read):
    words = ("seed=7", "actor_infer.generating_args.max_new_tokens=9", "tracker_kwargs={api_key: hush, project: 007}")
    first = read(SMALL.replace("pretrain: M", "pretrain: ${reward_pretrain}"), "reward_pretrain=M", *words)
    text = run_yaml(first)
    assert "hush" not in text
    assert "max_new_tokens: 9" in text
    assert re.search(r"^seed: 7 +# override$", text, re.MULTILINE)
    assert re.search(r"template: native +# run.yaml:10$", text, re.MULTILINE)
    again = read(text)
    assert again.findings == ()
    assert again.settings.rewards == first.settings.rewards
    assert again.settings.actor_train == first.settings.actor_train
    assert again.settings.actor_infer == first.settings.actor_infer


def test_everything_wrong_is_said_at_once_with_its_line(read):
    text = SMALL.replace("messages: messages", "mesages: messages").replace("builtin", "vlm")
    text = text.replace("list(range(0,2))", "list(range(0,x))").replace(
        "rollout_batch_size: 4", "rollout_batch_sise: 4"
    )
    found = read(text + "  code: {worker_cls: roll.x.DetectionRewardWorker, tag_included: [math], use_local: 3}\n")
    said = [str(finding) for finding in found.findings]
    places = [finding.where for finding in found.findings]
    assert found.settings is None
    for line, part in (
        (4, "did you mean rollout_batch_size?"),
        (8, "list(range(0,8))"),
        (10, "did you mean actor_train.data_args.messages?"),
        (15, "write strategy_name: vllm"),
        (18, "rewards.code.use_local is 3"),
        (18, "DetectionRewardWorker is not supported"),
    ):
        assert any(part in text and place == f"run.yaml:{line}" for text, place in zip(said, places, strict=True)), part
    assert any("the tag 'math' is in tag_included of rewards.math and rewards.code" in text for text in said)


def test_a_student_is_distilled_as_by_the_launcher_of_such_files(read):
    text = SMALL.replace("actor_", "student_").replace("grpo", "reinforce")
    model, strategy = "model_args: {model_name_or_path: T}", "strategy_args: {strategy_name: hf_infer}"
    found = read(f"{text}teacher: {{device_mapping: [0], {model}, {strategy}}}\n")
    assert found.findings == ()
    assert found.settings.algorithm.is_pure_opd
    assert read(run_yaml(found)).settings.algorithm.is_pure_opd
    assert any(line.startswith("is_pure_opd is true") for line in found.lines)
    alone = text.partition("rewards:")[0] + f"teacher: {{device_mapping: [0], {model}, {strategy}}}\n"
    assert read(alone).findings == ()
    (finding,) = read(f"{alone}validation: {{data_args: {{file_name: [a.jsonl]}}}}\n").findings
    assert finding.what == "validation without rewards"


def test_a_preset_sets_what_was_published_and_is_refused_where_it_would_not(read):
    words = ("algorithm_preset=dapo", "rewards.more={worker_cls: format, tag_included: [a]}")
    own = "rewards.math.query_filter_config={type: mean_filter, filter_args: {threshold_up: 0.9}}"
    shares = "actor_train.data_args.domain_interleave_probs={math: 0.5, more: 0.5}"
    found = read(SMALL, *words, own, shares, "pg_clip_high=0.28")
    assert found.findings == ()
    algorithm = found.settings.algorithm
    assert (algorithm.pg_clip_low, algorithm.pg_clip_high, algorithm.loss_agg_mode) == (0.2, 0.28, "token-mean")
    assert (algorithm.max_len_mask, found.settings.rollout.is_use_additional_prompts) == (True, True)
    filters = {name: role.group_filter.type for name, role in found.settings.rewards.items()}
    assert filters == {"math": "mean_filter", "more": "std_filter"}
    assert any(
        line.startswith("algorithm_preset dapo sets adv_estimator grpo, use_pg_clip_range") for line in found.lines
    )
    again = read(run_yaml(found))
    assert again.findings == ()
    assert again.settings.algorithm == algorithm
    assert again.settings.rewards == found.settings.rewards
    (refused,) = read(SMALL, *words[:1], "loss_agg_mode=seq-mean-token-mean").findings
    assert refused.what == "loss_agg_mode is seq-mean-token-mean, and algorithm_preset dapo sets token-mean"
    assert refused.fix == "remove loss_agg_mode, or the preset"


@pytest.mark.parametrize("key", ["rollout_batch_size", "gradient_accumulation_steps"])
def test_nothing_follows_from_the_default_of_a_key_that_was_misspelt(read, key):
    text = SMALL.replace("gradient_accumulation_steps: 8", "gradient_accumulation_steps: 80")
    assert len(read(text).findings) == 1  # 16 samples, not a multiple of 160
    (finding,) = read(text.replace(f"{key}:", f"{key[:-1]}:")).findings
    assert f"did you mean {key}?" in finding.fix.replace("actor_train.training_args.", "")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("rollout_batch_size=3",), "12 samples, not a multiple of 16"),
        ((f"{STRATEGY}.tensor_model_parallel_size=3",), "2 devices, not a multiple of the 3"),
        (("actor_infer.strategy_args.strategy_name=megatron_infer",), "expected vllm or sglang or hf_infer or builtin"),
        (("actor_train.strategy_args.strategy_name=fsdp2_train",), "megatron_infer in a role that does not train"),
        (("actor_train.strategy_args.strategy_name=deepspeed_train",), "strategy_name: megatron_train"),
        (("train_infer_ratio_mask=true",), "since ROLL 0.2 train_infer_correction replaces it"),
        (("async_generation_ratio=1",), "actor_infer shares devices with actor_train"),
        (("async_generation_ratio=0.5",), "between 0 and 1"),
        (("partial_rollout_steps=1",), "without additional prompts a step needs all responses that it samples"),
        (
            (*JUDGED, "async_generation_ratio=1", "actor_infer.device_mapping=[2]"),
            "rewards.math shares devices with actor",
        ),
        (
            ("use_opd=true", "async_generation_ratio=1", "actor_infer.device_mapping=[2]", TEACHER),
            "actor_infer shares devices with teacher.default",
        ),
        (("use_kl_loss=true",), "use_kl_loss without the role reference"),
        (("use_opd=true",), "use_opd without the role teacher"),
        (("num_return_sequences_in_group=1", "rollout_batch_size=16"), "has no baseline"),
        (("pretrain=null",), "or pretrain: MODEL at the top level"),
        (("adv_estimator=gae",), "without the role critic"),
        (("adv_estimator=gigpo",), "agentic pipeline"),
        (("sequence_length=32",), "leaves no token"),
        (("~response_length",), "response_length is missing"),
        (("val_prompt_length=9",), "val_prompt_length without val_sequence_length"),
        (("val_prompt_length=9", "val_sequence_length=9"), "write val_sequence_length: 18"),
        (("difficulty_mask=true", "difficulty_low_threshold=0.9", "difficulty_high_threshold=0.5"), "0.9 is not below"),
        ((f"{STRATEGY}.expert_model_parallel_size=3",), "the 3 that one copy of the experts takes"),
        (("actor_train.worker_cls=MyWorker",), "actor_train.worker_cls is MyWorker"),
        (("~rewards.math.worker_cls",), "rewards.math has no worker_cls"),
        ((*SGLANG, f"{SAMPLER}.mem_fraction_static=null"), "ROLL requires it for sglang"),
        ((*SGLANG, f"{SAMPLER}.grpc_mode=true"), "grpc_mode is true"),
        ((*SGLANG, f"{SAMPLER}.data_parallel_size=2"), "the number of engines is derived from device_mapping"),
        ((*SGLANG, f"{SAMPLER}.tensor_parallel_size=2"), "actor_infer has 1 devices, and one engine takes 2"),
        ((*SGLANG, f"{SAMPLER}.context_length=32"), "write context_length: 96"),
        ((VLLM, f"{SAMPLER}.max_model_len=32"), "write max_model_len: 96"),
        (("actor_infer.generating_args.temperature=0",), "asks for greedy decoding"),
        (("actor_infer.generating_args.repetition_penalty=1.1",), "do not include the penalty"),
        (("actor_infer.generating_args.num_beams=2",), "beam search"),
        (("actor_train.data_args.domain_interleave_probs={mat: 1}",), "use one of: math"),
        (("actor_train.data_args.domain_interleave_probs={more: 0.1, math: 0.9}",), "more would get no prompt of"),
        (("actor_train.data_args.domain_interleave_probs={more: 2, math: 0.9}",), "math would get no prompt of"),
        (("actor_train.use_sequence_packing=true", f"{PACKED}=50"), "less than sequence_length 96"),
        (("actor_train.use_dynamic_batching_in_train=true",), "without max_tokens_per_microbatch_in_train"),
        (("actor_train.router_replay.mode=R2",), "write mode: R3"),
        (("force_disable_old_logprobs_recompute=true", "add_token_level_kl=true"), "before its updates"),
        ((f"{CORRECTION}.filters=[{{enable: true}}]",), "did you mean train_infer_correction.filters.enabled?"),
        ((f"{STRATEGY}.tensor_model_paralel_size=1",), f"did you mean {STRATEGY}.tensor_model_parallel_size?"),
        ((f"{STRATEGY}.overlap_param_gather=true",), "ROLL refuses it, too"),
        (
            ("rewards.math.query_filter_config={type: std_filter, filter_args: {threshold_up: 1}}",),
            "takes std_threshold",
        ),
        ((FILTER.format("{threshold_up: 0, threshold_down: 1}"),), "every group would be dropped"),
        (("rewards.math.worker_cls=LLMJudgeRewardWorker",), "has no judge_api_url"),
        ((*JUDGED[:1], "rewards.math.judge_api_url=host:80/v1"), "write judge_api_url: http://v1"),
        (("rewards.math.worker_cls=DetectionRewardWorker",), "or your own function"),
        (("rewards.math.worker_cls=m.f", "rewards.math.arguments={timeout: soon}"), "seconds per response"),
        (("rewards.math.worker_cls=m.f", "rewards.math.arguments={timeout: 0}"), "seconds per response"),
        (("actor_infer.model_args.model_name_or_path=Other",), "actor_train trains M"),
        (("exp_name=${nobody}",), "there is no key nobody"),
        (("exp_name=${exp_name}",), "refers to itself"),
        (("actor_train.training_args.lr_scheduler_type=cosin",), "write lr_scheduler_type: cosine"),
    ],
    ids=lambda value: value[-1].partition("=")[0].rpartition(".")[2] if isinstance(value, tuple) else None,
)
def test_what_is_wrong_is_named_with_what_helps(read, words, part):
    found = read(SMALL, *words)
    assert part in "\n".join(map(str, found.findings))
    assert all(finding.where or finding.fix for finding in found.findings)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("sequence_length=80",), "response_length 64 has no effect with sequence_length 80, which leaves 48 tokens"),
        (("norm_mean_type=batch",), "norm_mean_type batch becomes group with adv_estimator grpo, as in ROLL"),
        (("norm_std_type=batch",), "norm_std_type batch becomes group with adv_estimator grpo, as in ROLL"),
        (
            ("actor_infer.generating_args.max_new_tokens=9",),
            "max_new_tokens 9 becomes 64, which sequence_length leaves",
        ),
        (("actor_infer.num_gpus_per_worker=2",), "an engine of builtin takes 1 device"),
        ((VLLM, f"{SAMPLER}.max_model_len=40"), "max_model_len 40 is less than sequence_length 96"),
        ((*SGLANG, f"{SAMPLER}.context_length=40"), "context_length 40 is less than sequence_length 96"),
        ((f"{SAMPLER}.enforce_eager=true",), f"{SAMPLER}.enforce_eager: strategy_name is builtin"),
    ],
)
def test_what_counts_otherwise_is_said(read, words, line):
    found = read(SMALL, *words)
    assert found.findings == ()
    assert line in "\n".join(found.lines)


def test_judges_on_one_device_take_no_more_than_its_memory(read):
    """vLLM's share is of the whole device, whoever else is there."""
    vllm = "rewards.math.strategy_args.strategy_name=vllm"
    share = "rewards.{}.strategy_args.strategy_config.gpu_memory_utilization={}"
    of_math = [*JUDGED[:-1], vllm]
    words = [*of_math, *(word.replace("math", "more") for word in of_math), "rewards.more.tag_included=[more]",
             "actor_infer.device_mapping=[1]",
             "actor_train.data_args.domain_interleave_probs={math: 0.5, more: 0.5}"]  # fmt: skip
    (found,) = read(SMALL, *words).findings
    assert found.what == "rewards.math and rewards.more share device 0, and use 0.9 + 0.9 of its memory"
    assert "write gpu_memory_utilization: 0.45 for each of them" in found.fix
    one = read(SMALL, *words, share.format("math", 0.3))
    assert "use 0.3 + 0.9 of" in one.findings[0].what
    both = read(SMALL, *words, share.format("math", 0.3), share.format("more", 0.6))
    assert both.findings == ()
    assert [role.judge.memory_share for role in both.settings.rewards.values()] == [0.3, 0.6]
    assert read(SMALL, *words, "rewards.more.device_mapping=[1, 2]", "actor_infer.device_mapping=[3]").findings == ()
    (wrong,) = read(SMALL, *words, share.format("more", 90), share.format("math", 0.1)).findings
    assert (wrong.what, wrong.where) == ("rewards.more: gpu_memory_utilization is 90", share.format("more", 90))


def test_reference_is_run_only_where_something_needs_it(read):
    reference = (
        "reference: {device_mapping: '[0, 1]', strategy_args: {strategy_name: megatron_infer, strategy_config: null}}\n"
    )
    idle = read(SMALL + reference)
    assert idle.settings.reference is None
    assert "reference is not loaded" in "\n".join(idle.lines)
    assert read(SMALL + reference, "use_kl_loss=true").settings.reference.name == "reference"
    assert read(SMALL + reference, "add_token_level_kl=true").settings.algorithm.enable_old_logprobs_recompute
    adapters = read(SMALL + reference, "use_kl_loss=true", "actor_train.model_args.lora_target=all-linear")
    assert adapters.settings.reference is None
    assert adapters.settings.algorithm.enable_reference
    assert adapters.settings.actor_train.settings.finetuning.lora_target == ["all"]
    other = "reference.model_args.model_name_or_path=other"
    (found,) = read(
        SMALL + reference, "use_kl_loss=true", "actor_train.model_args.lora_target=all-linear", other
    ).findings
    assert (found.what[:19], found.where) == ("reference is other,", other)
    assert not read(SMALL + reference, "actor_train.model_args.lora_target=all-linear", other).findings


def test_the_base_below_adapters_may_be_quantized(read):
    adapters, bits = (f"actor_train.model_args.{each}" for each in ("lora_target=all-linear", "quantization_bit=4"))
    found = read(SMALL, adapters, bits, "actor_train.model_args.quantization_type=fp4")
    assert (found.findings, found.lines) == ((), ())
    selection = found.settings.actor_train.settings.finetuning
    assert (selection.quantization_bit, selection.quantization_type) == (4, "fp4")
    (alone,) = read(SMALL, bits).findings
    assert alone.what == "actor_train.model_args.quantization_bit without lora_target"
    assert (alone.where, alone.fix) == (bits, "write lora_target: all-linear")


def test_a_merged_model_is_written_of_adapters_alone(read):
    merged = f"{STRATEGY}.save_merged_model=true"
    whole = read(SMALL, merged)
    assert not whole.settings.actor_train.settings.checkpoint.merge_lora
    assert f"{STRATEGY}.save_merged_model: there is no adapter to merge" in whole.lines
    adapted = read(SMALL, merged, "actor_train.model_args.lora_target=all-linear")
    assert adapted.settings.actor_train.settings.checkpoint.merge_lora
    assert adapted.lines == ()


@pytest.mark.parametrize(("kind", "weight"), [("aux_loss", 0.001), ("sinkhorn", 0.0), ("none", 0.0)])
def test_experts_are_balanced_as_their_config_json_says(read, kind, weight):
    """The critic's, too; what balances without a loss has no weight, and nothing is refused that nobody wrote."""
    read(SMALL)
    engine = "strategy_args: {strategy_name: megatron_train}"
    critic = f"critic={{device_mapping: [0, 1], model_args: {{model_name_or_path: M}}, {engine}}}"
    balancing = [f"{role}.strategy_args.strategy_config.moe_router_load_balancing_type={kind}" for role in ROLES]
    found = read_roll("run.yaml", ["adv_estimator=gae", critic, *balancing], lambda settings, stage: SPARSE)
    assert found.findings == ()
    roles = (found.settings.actor_train, found.settings.critic)
    assert [role.settings.experts.moe_aux_loss_coeff for role in roles] == [weight, weight]
    assert found.lines.count("moe_aux_loss_coeff 0.001: router_aux_loss_coef of config.json") == 2 * bool(weight)


def test_trackers_get_what_the_file_says(read):
    found = read(SMALL, "track_with=wandb", "tracker_kwargs={project: p, tags: [a, b], api_key: hush, log_dir: w}")
    logs = found.settings.actor_train.settings.logging
    assert (logs.report_to, logs.wandb_project, logs.wandb_save_dir) == (["wandb"], "p", "w")
    assert found.variables == {"WANDB_API_KEY": "hush", "WANDB_TAGS": "a,b"}
    assert "hush" not in repr(found)
    assert read(SMALL, "track_with=stdout").settings.actor_train.settings.trackers == []
    assert "tensorboard is used" in "\n".join(read(SMALL, "track_with=ml_tracker").lines)


def test_defaults_of_hydra(read, tmp_path):
    (tmp_path / "base.yaml").write_text("seed: 3\nsave_steps: 9\nsystem_envs: {A: '1', B: '2'}\n", encoding="utf-8")
    own = "defaults: [base@_here_, ../x/deepspeed_zero2@_here_]\nsave_steps: 5\nsystem_envs: {B: '3'}\n"
    found = read(own + SMALL)
    assert found.findings == ()
    assert (found.settings.run.seed, found.settings.run.save_steps) == (3, 5)
    assert found.settings.run.system_envs == {"A": "1", "B": "3"}
    assert found.places["seed"] == "base.yaml:1"
    assert "DeepSpeed" in "\n".join(found.lines)
    assert any({"save_steps", "system_envs.B"} == {*line.split(": ")[0].split(", ")} for line in found.lines)
    missing = read("defaults: [nobody@_here_, a/b]\n" + SMALL)
    assert [finding.where for finding in missing.findings] == ["run.yaml:1"] * 2
    for text in ("'base'", "{base: 1}"):
        (wrong,) = read(f"defaults: {text}\n{SMALL}").findings
        assert (wrong.where, wrong.what, wrong.why) == ("run.yaml:1", f"defaults is {text}", "expected a list of files")


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("list(range(0,4))", (0, 1, 2, 3)),
        ("[6, 7]", (6, 7)),
        ("list(range(0,2))+list(range(8,10))", (0, 1, 8, 9)),
        ("list([6,7,14])", (6, 7, 14)),
        ("list(range(0, 2 * 2, 2))", (0, 2)),
        ([1, 2], (1, 2)),
    ],
)
def test_device_mappings(text, devices):
    assert read_devices(text) == devices


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').getpid()",
        "list(range(10**9))",
        "[0, 0]",
        "[-1]",
        "list(range(0,",
        "[x for x in (1,)]",
        "[1.5]",
        "()()",
    ],
)
def test_device_mappings_are_not_run(text):
    with pytest.raises(ValueError, match=r".+"):
        read_devices(text)


def test_files_of_rl_are_told_from_others(tmp_path):
    (tmp_path / "sft.yaml").write_text("stage: sft\nmodel_name_or_path: x\n", encoding="utf-8")
    assert not is_rl_file(tmp_path / "sft.yaml")
    assert not is_rl_file(tmp_path / "nothing.yaml")
    (tmp_path / "odd.yaml").write_text("? [a]\n: 1\n", encoding="utf-8")
    assert not is_rl_file(tmp_path / "odd.yaml")
    assert all(is_rl_file(path) for path in FILES.glob("*.yaml"))


@pytest.mark.parametrize("key", ["sft_train", "chosen_key", "distill_loss_weight", "custom_envs"])
@pytest.mark.parametrize("verb", ["rl", "train"])
def test_a_file_of_another_pipeline_is_one_finding_for_every_verb(tmp_path, key, verb, capsys):
    """And none that sends its reader to the other verb, which would send it back."""
    others = {"distill_loss_weight": "student_pretrain: M\n", "sft_train": ""}
    roles = others.get(key, "actor_train: {}\n")
    path = tmp_path / "run.yaml"
    path.write_text(f"{roles}exp_name: x\nsequence_length: 8\n{key}: {{}}\n", encoding="utf-8")
    assert main([verb, str(path)]) == 64
    said = capsys.readouterr().err
    assert said.startswith(f"{path}: this is a file of ROLL's")
    assert said.count("fix: ") == 1
    assert "megatune rl" not in said
    if "docs/migrate-from-roll.md" in said:
        page = FILES.parents[2] / "docs" / "migrate-from-roll.md"
        assert "## Files of SFT and DPO\n" in page.read_text(encoding="utf-8")


def test_a_variable_has_a_name(read):
    found = read(SMALL + "system_envs: {'A=B': 1, '': 2}\n")
    assert [finding.what for finding in found.findings] == [
        "system_envs: 'A=B' is not a valid name of a variable",
        "system_envs: '' is not a valid name of a variable",
    ]


def test_what_cannot_be_merged_is_named_and_what_is_no_mapping_loses_nothing(read):
    found = read(SMALL, "actor_infer.generating_args=[1]")
    assert [(finding.what, finding.where) for finding in found.findings] == [
        ("Cannot merge incompatible container types", "actor_infer.generating_args=[1]")
    ]
    (removed,) = read(SMALL, "~seed.below").findings
    assert (removed.what, removed.where) == ("there is no key seed.below to remove", "~seed.below")
    broken = read(SMALL.replace("pretrain: M", "pretrain: ${M"), "exp_name=${nobody} ${other}")
    said = {finding.where: finding.what for finding in broken.findings}
    assert said["run.yaml:1"].startswith("'${M'")
    assert "there is no key nobody" in said["exp_name=${nobody} ${other}"]


def test_references_are_those_of_omegaconf(read):
    found = read(SMALL + "a: {b: 3, c: [1, '${.b}']}\nkey: b\n", "seed=${a.${key}}", "~a.c")
    assert found.settings is None  # a and key are not ROLL's
    assert found.reading.data["seed"] == 3


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("custom_envs", "agentic reinforcement learning"),
        ("sft_train", "supervised"),
        ("chosen_key", "ROLL's DPO"),
        ("student_pretrain", "distillation on recorded answers"),
    ],
)
def test_a_file_of_another_pipeline_is_one_finding(tmp_path: Path, key: str, says: str) -> None:
    file = tmp_path / "other.yaml"
    file.write_text(f"exp_name: x\n{key}: {{a: 1}}\nbeta: 0.1\nactor_train: {{unheard_of: 1}}\n")
    (finding,) = read_roll(file).findings
    assert says in finding.what
    assert finding.fix
