"""What `explain` says a setting costs is what the planner says, in both languages."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from megatune.config.load import load
from megatune.config.rules import check
from megatune.config.settings import all_settings, with_settings
from megatune.errors import ExitCode, MegatuneError
from megatune.pages import columns_of, page_width
from megatune.plan.catalogue import find_machine
from megatune.plan.changes import value_of
from megatune.plan.estimate import estimate
from megatune.plan.explain.cost import BaseCase, case_of_file, compare_with, default_cases, impact_of, needed
from megatune.plan.explain.settings import explain_file, explain_key, settings_page
from megatune.plan.explain.words import language_of, others_of, signed_bytes, words_of, wrapped

CASES = default_cases()
INFOS = all_settings()
impact_once = cache(lambda path: impact_of(INFOS[path], CASES))
FILE = """\
model_name_or_path: Qwen3-14B
dataset: identity
output_dir: out
bf16: true
cutoff_len: 4096
per_device_train_batch_size: 1
gradient_accumulation_steps: 16
tensor_model_parallel_size: 4
sequence_parallel: true
learning_rate: 1e-5
recompute_granularity: full
sgd_momentum: 0.5
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    return str(path)


@pytest.mark.covering
@pytest.mark.parametrize("path", INFOS)
def test_costs_are_the_planners(path: str) -> None:
    """Each number is the difference of two plans of valid settings, which differ in what is said and nothing else."""
    impact = impact_once(path)
    assert impact is not None
    for effect in impact.effects:
        before, after = effect.before.case, effect.after.case
        changes = {**effect.changes, path: value_of(after, path)}
        assert after.settings == with_settings(before.settings, changes)
        for case in (before, after):
            wrong = [finding.what for finding in check(case.settings, case.model.architecture, case.world_size)]
            assert not [what for what in wrong if "is missing" not in what and "max_steps" not in what]
        assert -effect.saving == estimate(after).fullest.total - estimate(before).fullest.total
        assert effect.after.time == estimate(after).time
        if effect.same_rows:
            assert -effect.gain == pytest.approx(effect.after.time.total / effect.before.time.total - 1)
    assert not impact.effects or not all(effect.has_no_effect for effect in impact.effects)


def test_what_costs_and_what_does_not() -> None:
    """Decided by the plan: nothing of what only learns, saves or reads has a cost, and everything of the layout has."""
    costly = {path for path in INFOS if (found := impact_once(path)) and found.effects}
    groups = {path.partition(".")[0] for path in costly}
    assert not groups & {"logging", "checkpoint", "evaluation"}
    assert {path for path in INFOS if path.startswith("parallel.")} <= costly
    assert {path for path in INFOS if path.startswith("recompute.")} <= costly
    assert {"data.cutoff_len", "precision.bf16", "optimizer.optimizer_cpu_offload", "run.num_processes"} <= costly
    assert not costly & {"optimizer.learning_rate", "run.seed", "data.template", "run.output_dir", "data.val_size"}


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("path", INFOS)
def test_every_key_is_explained(path: str, language: str) -> None:
    # Costs are impact for some: `test_costs_are_the_planners` does so for all.
    cases = CASES[:1] if path.startswith(("parallel.", "recompute.")) else [BaseCase(None, why_not="")]
    text = explain_key(path, cases, language)  # type: ignore[arg-type]
    assert path.partition(".")[2] in text.splitlines()[0]
    assert max(map(columns_of, text.splitlines())) <= page_width()
    assert not re.search(r"(?<!\{)\{\w+\}(?!\})", text), "a phrase that is not filled in"
    headings = (
        ("takes", "default", "what", "how", "when", "cost") if language == "en" else ("取值", "说明", "原理", "代价")
    )
    assert all(re.search(rf"^  {heading} ", text, re.MULTILINE) for heading in headings)


def test_a_key_by_any_of_its_names() -> None:
    same = explain_key("packing", CASES)
    assert "packing, neat_packing" in same
    for name in ("neat_packing", "data.packing", "--packing", "neat-packing"):
        assert explain_key(name, CASES) == same
    assert explain_key("evaluation_strategy", CASES) == explain_key("eval_strategy", CASES)


def test_short_names_of_layouts_lead_to_the_key() -> None:
    with pytest.raises(MegatuneError, match=r"did you mean tensor_model_parallel_size\?"):
        explain_key("tp", CASES)


def test_refused_and_unknown_keys() -> None:
    assert "use_distributed_optimizer" in explain_key("deepspeed", [])
    assert "已实现 LoRA" in explain_key("oft_rank", CASES, "zh")
    text = explain_key("hub_strategy", CASES)
    assert "all_checkpoints" in text
    assert "hub_strategy: every_save" in text
    with pytest.raises(MegatuneError) as raised:
        explain_key("lerning_rate", CASES)
    assert raised.value.exit_code == ExitCode.SETTINGS
    assert raised.value.findings[0].fix == "did you mean learning_rate?"


def test_cost_of_the_case_that_was_asked_for() -> None:
    (base,) = default_cases("Qwen3-0.6B", 4, "a100-80g")
    text = explain_key("use_distributed_optimizer", [base])
    assert "for Qwen3-0.6B on 4 × a100-80g" in text
    assert "assumed" not in text
    assert base.case is not None
    effect = impact_of(INFOS["parallel.use_distributed_optimizer"], [base])
    assert effect is not None
    assert f"false: {signed_bytes(-effect.effects[0].saving)}" in text
    assert "assumed" in explain_key("use_distributed_optimizer", default_cases("Qwen3-0.6B"))
    large = default_cases("llama3-70b", 32, "a100-80g")[0].case
    assert large is not None
    assert estimate(large).fits


def test_what_a_key_needs_is_said_in_both_languages() -> None:
    for language, needs, either, model in (
        ("en", "needs", "or", "a mixture of experts"),
        ("zh", "需要", "或", "MoE 模型"),
    ):
        said = {
            key: " ".join(explain_key(key, CASES, language).split())  # type: ignore[arg-type]
            for key in ("lora_rank", "eval_strategy", "moe_router_dtype")
        }
        assert f"{needs} finetuning_type: lora" in said["lora_rank"]
        assert f"val_size {either} eval_dataset" in said["eval_strategy"]
        assert f"{needs} {model}" in said["moe_router_dtype"]


def test_a_dense_model_has_no_cost_of_experts() -> None:
    text = explain_key("expert_model_parallel_size", default_cases("Qwen3-8B", 8, "h100-80g"))
    assert "not valid here: expert_model_parallel_size: 2 with a dense model" in " ".join(text.split())


def test_file(file: str) -> None:
    loaded = load(file)
    base = case_of_file(loaded, find_machine("h100-80g"), 8)
    text, findings = explain_file("run.yaml", loaded, base)
    assert findings == []
    written = [line.partition(":")[0] for line in FILE.splitlines()]
    assert [line.partition(":")[0] for line in text.splitlines() if "(line " in line] == written
    assert "learning_rate: 1e-05 (line 10; default 5e-05)" in text
    assert "sgd_momentum has no effect without optimizer: sgd" in text
    assert base.case is not None
    effect = compare_with(base.case, "recompute.recompute_granularity", None)
    assert effect is not None
    assert effect.gain < 0 < effect.saving
    assert f"compared with null: {signed_bytes(-effect.saving)}" in text
    off, _ = explain_file("run.yaml", load(file, ["bf16=false"]), base)
    assert "    off: Compute in bfloat16" in off
    chinese, _ = explain_file("run.yaml", loaded, base, "zh")
    assert "第 10 行；默认 5e-05" in chinese
    assert "需要 optimizer: sgd，否则 sgd_momentum 不起作用" in chinese


def test_file_with_faults(file: str) -> None:
    """What is wrong is said, what is right is explained, and a layout that is not valid is not planned."""
    loaded = load(file, ["tensor_model_parallel_size=3", "foo=1", "save_steps=-1"])
    text, findings = explain_file("run.yaml", loaded, case_of_file(loaded, find_machine("h100-80g"), 6))
    assert len(findings) == 3
    assert all(str(finding) in text for finding in findings)
    assert "not planned: tensor_model_parallel_size 3" in " ".join(text.split())
    assert "learning_rate: 1e-05" in text
    loaded = load(file, ["model_name_or_path=nobody/knows"])
    text, _ = explain_file("run.yaml", loaded, case_of_file(loaded, find_machine("h100-80g")))
    assert "not planned: " in text


def test_against_keeps_the_rows_of_a_step(file: str) -> None:
    case = case_of_file(load(file), find_machine("h100-80g"), 8).case
    assert case is not None
    effect = compare_with(case, "parallel.tensor_model_parallel_size", 1)
    assert effect is not None
    others = {"batch.gradient_accumulation_steps": 4, "parallel.sequence_parallel": False}
    assert others_of(effect, "parallel.tensor_model_parallel_size") == others
    assert effect.before.case.global_batch_size == effect.after.case.global_batch_size == case.global_batch_size
    assert value_of(effect.before.case, "parallel.tensor_model_parallel_size") == 1
    assert compare_with(replace(case, world_size=4), "parallel.pipeline_model_parallel_size", 3) is None


def test_pages_name_every_setting() -> None:
    for language in ("en", "zh"):
        page = settings_page(language)  # type: ignore[arg-type]
        assert re.findall(r"^### (\w+)$", page, re.MULTILINE) == [path.partition(".")[2] for path in INFOS]


@pytest.mark.parametrize(
    ("environment", "language"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "C.UTF-8"}, "en"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "en_GB.UTF-8"}, "en"),
        ({"LANG": "de_DE", "LC_MESSAGES": "zh_TW"}, "zh"),
    ],
)
def test_language(environment: dict[str, str], language: str) -> None:
    assert language_of(environment) == language


def test_wrapping() -> None:
    text = "张量并行把每一层切分到 tensor_model_parallel_size 个进程上，" * 8
    lines = wrapped(text, indent="  ").splitlines()
    assert len(lines) > 3
    assert all(columns_of(line) <= page_width() and not line.strip().startswith("，") for line in lines)
    assert "".join(line.strip() for line in lines).replace(" ", "") == text.replace(" ", "")


def test_needs_no_slow_library() -> None:
    script = (
        "import sys\n"
        "from megatune.cli.main import main\n"
        "main(['explain', 'moe_router_dtype'])\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_setting_is_compared_with_what_it_declares_to_need() -> None:
    """What it needs is laid over the case, with what that needs in turn."""
    case = CASES[0].case
    assert case is not None
    lora, bits = "finetuning.finetuning_type", "finetuning.quantization_bit"
    assert needed(INFOS["finetuning.double_quantization"], case) == {lora: "lora", bits: 4}
    assert needed(INFOS["preference.discopop_tau"], case) == {"run.stage": "dpo", "preference.pref_loss": ["discopop"]}
    assert needed(INFOS["data.cutoff_len"], case) == {}
    impact = impact_once("finetuning.double_quantization")
    assert impact is not None
    assert impact.companions == {lora: "lora", bits: 4}


def test_values_that_are_compared_are_those_that_people_try() -> None:
    impact = {
        path: impact_once(path)
        for path in ("experts.moe_router_bias_update_rate", "experts.moe_expert_capacity_factor")
    }
    for found in impact.values():
        assert found is not None
        assert all(effect.before.fits for effect in found.effects), found.base.case
    [rate] = impact["experts.moe_router_bias_update_rate"].effects  # type: ignore[union-attr]
    assert value_of(rate.after.case, "experts.moe_router_bias_update_rate") == 0.001
    # 1.5 changes nothing, which is worth knowing beside 1.0, which does.
    factors = impact["experts.moe_expert_capacity_factor"].effects  # type: ignore[union-attr]
    values = [value_of(effect.after.case, "experts.moe_expert_capacity_factor") for effect in factors]
    assert values == [1.0, 1.5]
    assert [effect.has_no_effect for effect in factors] == [False, True]


def test_every_word_is_in_both_languages() -> None:
    english, chinese = vars(words_of("en")), vars(words_of("zh"))
    assert english.keys() == chinese.keys()
    assert not [name for name in english if english[name] == chinese[name]]
