"""Files that distil whole distributions (`opd_loss: jsd`): the teacher is an engine of actor_train."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_model_defaults import DENSE, SPARSE
from test_roll import SMALL

from megatune.architecture import Architecture
from megatune.config.dialects.roll import ReadRL, read_roll, run_yaml
from megatune.config.settings import Settings, is_default

STUDENT = "student_train.strategy_args.strategy_config"
TEXT = SMALL.replace("actor_", "student_").replace("adv_estimator: grpo", "opd_loss: jsd").partition("rewards:")[0]
TEXT += "teacher: {model_args: {model_name_or_path: T}}\n"


@pytest.fixture
def read(tmp_path):
    """Read the file, with the models that are given, and words behind it."""

    def read_words(*words: str, text: str = TEXT, **models: Architecture) -> ReadRL:
        def model_of(settings: Settings, stage: str) -> Architecture:
            return models[settings.model.model_name_or_path or ""]

        (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
        return read_roll(tmp_path / "run.yaml", words, model_of if models else None)

    return read_words


def said(found: ReadRL) -> str:
    return "\n".join(map(str, found.findings))


def test_the_teacher_is_an_engine_of_the_students_processes(read):
    found = read(
        *("opd_beta=0.25", "opd_top_k=64", "student_train.model_args.lora_target=all-linear"),
        *(f"{STUDENT}.tensor_model_parallel_size=2", f"{STUDENT}.recompute_granularity=full"),
        *(f"{STUDENT}.attention_backend=unfused", "student_train.backend_timeout=2"),
    )
    assert found.findings == ()
    settings = found.settings
    student, teacher, algorithm = settings.actor_train.settings, settings.actor_train.teacher, settings.algorithm
    assert algorithm.distils
    assert (algorithm.opd_beta, algorithm.opd_top_k, algorithm.loss_agg_mode) == (0.25, 64, "token-mean")
    assert settings.teachers == {}
    assert not algorithm.enable_old_logprobs_recompute
    assert student.finetuning.finetuning_type == "lora"
    assert teacher.model.model_name_or_path == "T"
    assert (teacher.parallel, teacher.precision) == (student.parallel, student.precision)
    assert (teacher.performance, teacher.run.ddp_timeout) == (student.performance, 120)
    for path in ("finetuning.finetuning_type", "finetuning.lora_target", "recompute.recompute_granularity"):
        assert is_default(teacher, path), path
    again = read(text=run_yaml(found))
    assert again.findings == ()
    assert again.settings.actor_train == settings.actor_train


def test_the_policy_gradient_has_teachers_with_devices_of_their_own(read):
    own = "teacher={device_mapping: [0], strategy_args: {strategy_name: hf_infer}}"
    found = read("opd_loss=policy_gradient", own)
    assert found.findings == ()
    assert not found.settings.algorithm.distils
    assert list(found.settings.teachers) == ["default"]
    assert found.settings.actor_train.teacher is None
    assert found.settings.algorithm.enable_old_logprobs_recompute


REFUSED = [
    ("use_kl_loss=true", "use_kl_loss: true", "replaces the reference"),
    ("enable_reference=true", "enable_reference: true", "replaces the reference"),
    ("add_token_level_kl=true", "add_token_level_kl: true", "replaces the reference"),
    ("adv_estimator=grpo", "adv_estimator: grpo", "no advantages"),
    ("algorithm_preset=dapo", "algorithm_preset: dapo", "no advantages"),
    ("loss_function=m.f", "loss_function: m.f", "no advantages"),
    ("enable_old_logprobs_recompute=true", "enable_old_logprobs_recompute: true", "no ratios"),
    ("train_infer_correction={is_weight: {enabled: true}}", "train_infer_correction.is_weight.enabled", "no ratios"),
    ("train_infer_correction={filters: [{enabled: true}]}", "train_infer_correction.filters", "no ratios"),
    ("loss_agg_mode=seq-mean-token-sum", "loss_agg_mode: seq-mean-token-sum", "averaged over tokens"),
    ("entropy_loss_coef=0.1", "entropy_loss_coef: 0.1", "the loss is only the divergence"),
    ("length_loss_weight=true", "length_loss_weight: true", "have the same weight"),
    ("teacher.device_mapping=[0]", "teacher.device_mapping: [0]", "in the processes of actor_train, with its layout"),
    ("teacher.strategy_args.strategy_name=hf_infer", "teacher.strategy_args: ", "in the processes of actor_train"),
    ("teacher.infer_batch_size=4", "teacher.infer_batch_size: 4", "in the processes of actor_train"),
    ("teacher.tag_included=[a]", "teacher.tag_included: [a]", "one teacher for all rows"),
    ("teacher.opd_kl_coef=2", "teacher.opd_kl_coef: 2", "the loss is only the divergence"),
    ("teacher.model_args.dtype=fp32", "teacher.model_args.dtype is not that of actor_train", "in its processes"),
    ("student_train.worker_cls=ActorPGWorker", "opd_loss: jsd with pg_variant: vanilla", "can compute the loss"),
    ("opd_beta=1.5", "opd_beta is 1.5", "at least 0, at most 1"),
    ("opd_top_k=0", "opd_top_k is 0", "at least 1, or null"),
    ("opd_lmbda=0.5", "opd_lmbda 0.5 without data_args.conversation_rules", "read by these rules"),
    ("opd_sft_alpha=0.5", "opd_sft_alpha has no effect", "with opd_lmbda 1"),
    ("use_opd=true", "is_pure_opd and use_opd", "adds a teacher to rewards"),
    ("teacher.model_args.model_name_or_path=null", "teacher has no model", "model_args: {model_name_or_path: MODEL}"),
]


@pytest.mark.parametrize(("word", "what", "why"), REFUSED, ids=[word.partition("=")[0] for word, _, _ in REFUSED])
def test_what_has_no_effect_is_refused_by_name(read, word, what, why):
    message = said(read(word))
    assert what in message
    assert why in message


@pytest.mark.parametrize(
    "word",
    [
        *("adv_estimator=reinforce", "loss_agg_mode=token-mean", "use_kl_loss=false", "ppo_epochs=2"),
        *("teacher.model_args.dtype=bf16", "teacher.opd_kl_coef=1", "max_len_mask=true"),
        "train_infer_correction={filters: []}",
    ],
)
def test_what_says_how_it_is_anyway_passes(read, word):
    found = read(word)
    assert found.findings == ()
    assert not found.settings.algorithm.enable_old_logprobs_recompute


def test_keys_of_whole_distributions_need_opd_loss_jsd_and_that_is_pure_opd(read):
    own = "teacher={device_mapping: [0], strategy_args: {strategy_name: hf_infer}}"
    found = read("opd_loss=policy_gradient", own, "opd_beta=0.1", "opd_top_k=4")
    assert [each.what for each in found.findings] == [
        "opd_beta 0.1 without opd_loss: jsd",
        "opd_top_k 4 without opd_loss: jsd",
    ]
    assert found.findings[0].fix == "write opd_loss: jsd, or remove opd_beta"
    (finding,) = read("opd_loss=jsd", text=SMALL).findings
    assert (finding.what, finding.where) == ("opd_loss jsd without is_pure_opd: true", "opd_loss=jsd")


def test_one_teacher_of_any_name(read):
    model = "{model_args: {model_name_or_path: T}}"
    one = read("~teacher.model_args", f"teacher.big={model}")
    assert one.findings == ()
    assert one.settings.actor_train.teacher.model.model_name_or_path == "T"
    (two,) = read("~teacher.model_args", f"teacher.big={model}", f"teacher.small={model}").findings
    assert (two.what, two.fix) == ("opd_loss: jsd with 2 teachers", "keep one of big, small")


def test_stages_have_one_part_each(read):
    words = (f"{STUDENT}.{each}_model_parallel_size=2" for each in ("pipeline", "virtual_pipeline"))
    assert "without virtual stages" in said(read(*words))


@pytest.mark.parametrize(
    ("teacher", "what"),
    [
        (replace(DENSE, num_query_groups=3, num_attention_heads=33), "33"),
        (replace(DENSE, num_layers=1), "1 layer"),
        (replace(DENSE, max_position_embeddings=64), "sequence_length 96 is more than the 64 positions"),
    ],
    ids=["heads", "layers", "positions"],
)
def test_the_layout_divides_the_teacher_too(read, teacher, what):
    text = TEXT.replace("range(0,2)", "range(0,4)")
    text = text.replace(
        "tensor_model_parallel_size: 1", "tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2"
    )
    student = replace(DENSE, num_layers=48)
    assert read(text=text, M=student, T=student).findings == ()
    (finding, *_) = read(text=text, M=student, T=teacher).findings
    assert what in str(finding)
    assert finding.where.endswith(("run.yaml:11", "run.yaml:2"))
    if "positions" not in what:
        assert finding.what.startswith("teacher, in the layout of actor_train: ")


def test_vocabularies_and_kinds_of_models_may_differ(read):
    student = replace(DENSE, vocab_size=152064)
    for teacher in (DENSE, SPARSE):
        assert read("student_train.model_args.lora_target=all-linear", M=student, T=teacher).findings == ()
    sparse = read(f"{STUDENT}.moe_router_load_balancing_type=aux_loss", M=SPARSE, T=DENSE)
    assert sparse.findings == ()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["async_generation_ratio=1"], "opd_lmbda 0.5 with async_generation_ratio above 0"),
        (
            ["partial_rollout_steps=1", "is_use_additional_prompts=true", "max_additional_running_prompts=2"],
            "opd_lmbda 0.5 with partial_rollout_steps above 0",
        ),
        (["student_train.router_replay.mode=R3"], "opd_lmbda 0.5 with router_replay R3"),
    ],
)
def test_steps_with_answers_do_not_meet_responses_of_other_steps(read, words, what):
    rules = ["student_train.data_args.conversation_rules=ms_swift_4", "student_train.data_args.template=qwen3"]
    assert not read("opd_lmbda=0.5", *rules).findings
    assert what in [each.what for each in read("opd_lmbda=0.5", *rules, *words).findings]
