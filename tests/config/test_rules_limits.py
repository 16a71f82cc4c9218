"""Numbers beyond what any machine can use are refused with the bound and its reason; published ones pass."""

import pytest
from test_rules import BASE

from megatune.config.load import load
from megatune.config.rules import check
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
