"""Numbers beyond what any machine can use are refused with the bound and its reason; published ones pass. And no rule
is without a test."""

import pytest
from test_rules import BASE, QWEN, WRONG_ANSWERS
from test_rules import WRONG as WRONG_IN_RUNS
from test_rules_data import WRONG as WRONG_IN_DATA
from test_rules_finetuning import WRONG as WRONG_IN_FINETUNING
from test_rules_layouts import WRONG as WRONG_IN_LAYOUTS
from test_rules_preference import MOE
from test_rules_preference import WRONG as WRONG_IN_PREFERENCE
from test_rules_quantization import WRONG as WRONG_IN_QUANTIZATION

from megatune.config.load import load
from megatune.config.rules import RULES, check, trained
from megatune.config.rules.rule import Context
from megatune.config.settings import all_settings

PUBLISHED = ["preprocessing_num_workers=256", "dataloader_num_workers=64", "ddp_timeout=180000000", "max_steps=1000000"]
ABSURD = ["max_steps=1000000000000000000", "gradient_accumulation_steps=100000000000", "ddp_timeout=1e30"]


def findings(*overrides: str) -> list[str]:
    loaded = load(overrides=[*BASE, *overrides])
    assert loaded.findings == []
    return [str(finding) for finding in check(loaded.settings)]


def test_what_files_in_the_wild_say_passes():
    assert findings(*PUBLISHED) == []


def test_all_that_is_absurd_is_said_at_once():
    assert [each.split(" ")[0] for each in findings(*ABSURD)] == [
        "ddp_timeout", "gradient_accumulation_steps", "max_steps"
    ]  # fmt: skip
    assert findings("dataloader_num_workers=100000") == [
        "dataloader_num_workers 100,000 is more than 1,024\n"
        "    why: each is a process; no more are started than the machine has cores and memory for\n"
        "    fix: write dataloader_num_workers: 1024, or less"
    ]


@pytest.mark.parametrize(
    ("name", "most"), [(info.name, info.limit.most) for info in all_settings().values() if info.limit]
)
def test_the_bound_itself_passes(name, most):
    assert not any(f"{name} " in each and "is more than" in each for each in findings(f"{name}={most}"))
    assert any(each.startswith(f"{name} {most + 1:,}") for each in findings(f"{name}={most + 1}"))


def test_a_link_to_the_model_is_not_a_folder_for_output(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "model")
    (found,) = findings(f"model_name_or_path={tmp_path}/model", f"output_dir={tmp_path}/out")
    assert found.startswith("output_dir is model_name_or_path")


def test_every_rule_is_tested():
    elsewhere = [(QWEN, overrides) for overrides, _ in (*WRONG_IN_RUNS, *WRONG_IN_DATA, *WRONG_IN_QUANTIZATION)]
    elsewhere += [(QWEN, overrides) for overrides, _ in WRONG_ANSWERS]
    wrong = [*elsewhere, *((model, overrides) for model, overrides, _ in (*WRONG_IN_LAYOUTS, *WRONG_IN_FINETUNING))]
    wrong += [(MOE, overrides) for overrides, _ in WRONG_IN_PREFERENCE]
    wrong.append((QWEN, ["max_steps=2000000000"]))  # each limit: above
    loaded = [(model, load(overrides=[*BASE, *overrides])) for model, overrides in wrong]
    contexts = [Context(each.settings, model, None, each.written) for model, each in loaded]
    untested = [rule for rule in RULES if not any(list(rule(context)) for context in contexts)]
    assert [rule.__name__ for rule in untested if rule not in trained.RULES] == []  # test_plan_trainable.py
