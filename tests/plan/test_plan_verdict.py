"""What a run is said to have been beside its plan."""

from __future__ import annotations

from dataclasses import replace

from megatune.config.settings import Settings, with_settings
from megatune.plan.case import Case
from megatune.plan.catalogue import find_machine, find_model
from megatune.plan.estimate import estimate
from megatune.plan.run.record import Measured, RankMemory, RunRecord, compare_memory, verdict

GIB = 2**30
CASE = Case(
    model=find_model("Qwen3-0.6B"),
    settings=with_settings(
        Settings(),
        {"precision.bf16": True, "parallel.pipeline_model_parallel_size": 2, "data.cutoff_len": 4096,
         "batch.gradient_accumulation_steps": 4},
    ),
    world_size=2,
    machine=find_machine("a100-80g"),
)  # fmt: skip
MEASURED = Measured(
    counted="allocated",
    stages=(RankMemory(rank=0, peak=7 * GIB), RankMemory(rank=1, stage=1, peak=5 * GIB)),
    step_seconds=2.0,
    num_steps=3,
    row_tokens=900.0,
    longest_row=2048,
)


def test_memory_is_that_of_the_fullest_rank_for_the_longest_row_without_what_an_allocator_does_not_see() -> None:
    shorter = replace(CASE, settings=with_settings(CASE.settings, {"data.cutoff_len": 2048}))
    stages = estimate(shorter).stages
    found = compare_memory(RunRecord(case=CASE, measured=MEASURED))
    assert found == (max(stage.total - stage.framework for stage in stages), 7 * GIB)
    assert stages[0].total != stages[1].total
    resident = compare_memory(RunRecord(case=CASE, measured=replace(MEASURED, counted="resident")))
    assert resident == (max(stage.total for stage in stages), 7 * GIB)
    assert compare_memory(RunRecord(case=CASE)) is None


def test_the_line_says_for_which_rows() -> None:
    (line,) = verdict(RunRecord(case=CASE, measured=MEASURED))
    assert "a step, was 2.0 s; planned " in line
    assert ", was 7.00 GiB (rows of 900 tokens, 2,048 the longest; 4,096 were allowed)" in line
    (line,) = verdict(RunRecord(case=CASE, measured=replace(MEASURED, longest_row=4096)))
    assert "rows" not in line
    assert not list(verdict(RunRecord(case=CASE)))
