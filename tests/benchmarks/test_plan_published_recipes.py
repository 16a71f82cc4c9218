"""docs/published-recipes.md recommends what the planner recommends."""

from __future__ import annotations

import pytest
from published_recipes import PAGE, RECIPES, Recipe, planned, verdict

from megatune.plan.pages.words import describe_layout, describe_recompute

# The searches of a few seconds are left to all tests.
CASES = [
    pytest.param(recipe, marks=[pytest.mark.extended] if recipe.model in ("DeepSeek-V3", "Qwen3-235B-A22B") else [],
                 id=f"{recipe.model} on {recipe.num_gpus}")
    for recipe in RECIPES
]  # fmt: skip


def section_of(recipe: Recipe) -> str:
    title = f"## {recipe.model} on {recipe.num_gpus:,} × {recipe.gpu}\n"
    return PAGE.read_text(encoding="utf-8").partition(title)[2].partition("\n## ")[0]


@pytest.mark.parametrize("recipe", CASES)
def test_the_page_names_the_winner(recipe: Recipe) -> None:
    published, found = planned(recipe)
    text = section_of(recipe)
    rows = [[cell.strip() for cell in line.split("|")][1:5] for line in text.splitlines() if line.startswith("|")]
    written = {cells[0]: cells[1:] for cells in rows}
    for name, plan in (("recipe", published), ("recommended", found)):
        batch = f"{plan.case.micro_batch_size} × {plan.case.num_micro_batches}"
        assert written[name][:2] == [describe_layout(plan.case), batch]
        assert describe_recompute(plan.case.settings.recompute) in text
    assert recipe.source in text
    said = verdict(published, found).partition(" At the upper end")[0]
    assert said.partition(" is ")[0] in text
    assert f"the recommended one {'is tight' if found.is_tight else 'fits'}" in text


def test_there_are_eight_cases_of_dense_models_and_experts_each_with_an_address() -> None:
    assert len({(recipe.model, recipe.num_gpus) for recipe in RECIPES}) == 8
    assert all(recipe.source.startswith("https://") for recipe in RECIPES)
