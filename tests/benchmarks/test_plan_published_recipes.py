"""docs/published-recipes.md says what the planner says."""

from __future__ import annotations

import pytest
from published_recipes import PAGE, RECIPES, Recipe, section

# The searches of a few seconds are left to all tests.
CASES = [
    pytest.param(recipe, marks=[pytest.mark.extended] if recipe.model in ("DeepSeek-V3", "Qwen3-235B-A22B") else [],
                 id=f"{recipe.model} on {recipe.num_gpus}")
    for recipe in RECIPES
]  # fmt: skip


@pytest.mark.parametrize("recipe", CASES)
def test_the_page_says_what_is_planned(recipe: Recipe) -> None:
    assert "\n".join(section(recipe)) in PAGE.read_text(encoding="utf-8")


def test_there_are_eight_cases_of_dense_models_and_experts_each_with_an_address() -> None:
    assert len({(recipe.model, recipe.num_gpus) for recipe in RECIPES}) == 8
    assert all(recipe.source.startswith("https://") for recipe in RECIPES)
