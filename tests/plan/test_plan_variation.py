"""Cases with some settings changed keep the rows of a step, and are none where a rule is against the change."""

from __future__ import annotations

from typing import Any

import pytest

from megatune.config.settings import Settings, with_settings
from megatune.plan.case import Case
from megatune.plan.catalogue import find_machine, find_model
from megatune.plan.changes import change_case, smaller_micro_batch, written

MICRO, STEPS = "batch.per_device_train_batch_size", "batch.gradient_accumulation_steps"
TP, PP = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"


def case(**batch: int) -> Case:
    """Eight processes with 6 · 2 rows each."""
    return Case(
        model=find_model("Qwen3-8B"),
        settings=with_settings(Settings(), {"precision.bf16": True, MICRO: 6, STEPS: 2, **batch}),
        world_size=8,
        machine=find_machine("h100-80g"),
    )


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        # 96 rows a step: four replicas take 24 each.
        ({TP: 2}, {TP: 2, STEPS: 4}),
        ({MICRO: 3}, {MICRO: 3, STEPS: 4}),
        ({MICRO: 3, TP: 1}, {MICRO: 3, STEPS: 4}),
        ({TP: 2, MICRO: 12}, {TP: 2, MICRO: 12}),
        # More rows, where they are asked for.
        ({STEPS: 8}, {STEPS: 8}),
    ],
)
def test_accumulation_follows_from_the_rows_of_a_step(changes: dict[str, Any], differs: dict[str, Any]) -> None:
    before = case()
    found = change_case(before, changes)
    assert found is not None
    assert found[0] == differs
    assert found[1].settings == with_settings(before.settings, differs)
    assert found[1].global_batch_size == (384 if STEPS in changes else 96)


@pytest.mark.parametrize(
    "changes",
    [
        {TP: 1, MICRO: 6},  # as it is
        {MICRO: 5},  # 96 rows are no multiple of 5 · 8
        {MICRO: 24},  # nor of 24 · 8
        {PP: 3},  # eight processes are not
        {"parallel.sequence_parallel": True},  # a rule: with one tensor-parallel process
    ],
)
def test_what_is_no_other_valid_case_is_none(changes: dict[str, Any]) -> None:
    assert change_case(case(), changes) is None


def test_a_smaller_micro_batch_makes_up_the_rows() -> None:
    assert smaller_micro_batch(case()) == {MICRO: 3}
    assert smaller_micro_batch(case(**{MICRO: 5, STEPS: 3})) == {MICRO: 1}
    assert smaller_micro_batch(case(**{MICRO: 1})) == {}


def test_changes_are_written_as_users_write_them() -> None:
    changes = {
        "recompute.recompute_granularity": None,
        "recompute.recompute_modules": ["mlp", "moe"],
        "precision.bf16": True,
    }
    assert written(changes) == "recompute_granularity: null, recompute_modules: [mlp, moe], bf16: true"
