"""docs/published-layouts.md says what the planner says."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
from published_layouts import EXAMPLES, PAGE, Example, planned, table

from megatune.plan.estimate import Estimate

# A page is as good as its day: it is made again when what it says is wrong, not with every change of a prediction.
_SAME = 0.1


def section_of(example: Example) -> str:
    return PAGE.read_text(encoding="utf-8").partition(f"## {example.name}\n")[2].partition("\n## ")[0]


def seconds_in(text: str) -> list[float]:
    """Seconds of a step, by line of the table of layouts."""
    lines = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("|")]
    column = lines[0].index("s")
    return [float(cells[column]) for cells in lines[2:] if len(cells) == len(lines[0])]


@pytest.fixture(scope="module")
def plans() -> Mapping[str, Mapping[str, Estimate]]:
    return {example.name: planned(example) for example in EXAMPLES}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_the_page_says_what_is_planned(example: Example, plans: Mapping[str, Mapping[str, Estimate]]) -> None:
    text, found = section_of(example), plans[example.name]
    written = text.partition("\nThe published layout")[0].partition("\n|")
    assert seconds_in(f"|{written[2]}") == pytest.approx(seconds_in(table(found)), rel=_SAME)
    published, recommended = found["published"], found["recommended"]
    assert f"The published layout {'fits' if published.fits else 'does not fit'} the" in text
    told = re.search(r"is ([\d.]+) times as fast", text)
    assert told is not None
    assert float(told[1]) == pytest.approx(published.time.total / recommended.time.total, rel=_SAME)


def test_the_published_layouts_are_those_of_the_contract(plans: Mapping[str, Mapping[str, Estimate]]) -> None:
    rows = {name: {plan.case.global_batch_size for plan in found.values()} for name, found in plans.items()}
    assert list(rows.values()) == [{16}, {2}, {64}]
    assert {plan.case.dp_size for plan in plans["Qwen3-VL-8B on 32 GPUs"].values()} >= {8, 4}
