"""docs/published-layouts.md says what the planner says."""

from __future__ import annotations

import pytest
from published_layouts import EXAMPLES, PAGE, Example, planned, section


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_the_page_says_what_is_planned(example: Example) -> None:
    assert "\n".join(section(example)) in PAGE.read_text(encoding="utf-8")


def test_the_published_layouts_are_those_of_the_contract() -> None:
    plans = {example.name: planned(example) for example in EXAMPLES}
    rows = {name: {plan.case.global_batch_size for plan in found.values()} for name, found in plans.items()}
    assert list(rows.values()) == [{16}, {2}, {64}]
    assert {plan.case.dp_size for plan in plans["Qwen3-VL-8B on 32 GPUs"].values()} >= {8, 4}
