"""Plans of preference training: a row has two sequences, and the reference and some losses take forward passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_plan_preflight import GOOD, checked

from megatune.config.settings import Settings, with_settings
from megatune.plan.case import Case
from megatune.plan.catalogue import find_machine, find_model
from megatune.plan.estimate import estimate
from megatune.plan.run.record import Measured, RunRecord
from megatune.plan.schedule import ChunkSeconds, bubble_seconds, timeline
from megatune.plan.time.estimate import num_reference_passes

_LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 sp": {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True},
    "pp2": {"parallel.pipeline_model_parallel_size": 2},
    "pp2 vpp2": {
        "parallel.pipeline_model_parallel_size": 2,
        "parallel.virtual_pipeline_model_parallel_size": 2,
        "parallel.overlap_p2p_comm": True,
    },
    "cp2": {"parallel.context_parallel_size": 2},
    "packed": {"data.packing": True},
}


def case(model: str = "Qwen3-8B", rows: int = 1, **settings: Any) -> Case:
    usual = {
        "precision.bf16": True,
        "batch.per_device_train_batch_size": rows,
        "batch.gradient_accumulation_steps": 8,
        "recompute.recompute_granularity": "full",
        "data.cutoff_len": 2048,
    }
    return Case(
        model=find_model(model),
        settings=with_settings(Settings(), {**usual, **settings}),
        world_size=8,
        machine=find_machine("h100-80g"),
    )


def pairs(model: str = "Qwen3-8B", rows: int = 1, **settings: Any) -> Case:
    return case(model, rows, **{"run.stage": "dpo", **settings})


@pytest.mark.parametrize("layout", _LAYOUTS.values(), ids=_LAYOUTS)
@pytest.mark.parametrize("model", ["Qwen3-8B", "Qwen3-VL-8B", "Qwen3-30B-A3B"])
def test_pairs_take_what_twice_as_many_rows_do(model: str, layout: dict[str, Any]) -> None:
    of_pairs, of_rows = estimate(pairs(model, 2, **layout)), estimate(case(model, 4, **layout))
    assert of_pairs.stages == of_rows.stages
    assert of_pairs.time == of_rows.time
    assert of_pairs.case.global_batch_size * 2 == of_rows.case.global_batch_size


_STREAMED = {"finetuning.finetuning_type": "lora", "data.streaming": True}


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({}, 0),
        ({"finetuning.finetuning_type": "lora"}, 0),
        ({"preference.ref_model": "other"}, 0),
        (_STREAMED, 1),
        ({**_STREAMED, "preference.pref_loss": ["orpo"]}, 0),
        ({**_STREAMED, "preference.pref_loss": ["orpo", "ipo"]}, 1),
    ],
)
@pytest.mark.parametrize("layout", [{}, _LAYOUTS["pp2 vpp2"]])
def test_forward_passes_of_a_step(settings: dict[str, Any], passes: int, layout: dict[str, Any]) -> None:
    finetuning = {name: value for name, value in settings.items() if name.startswith("finetuning")}
    plain, time = estimate(case(rows=2, **finetuning, **layout)).time, estimate(pairs(**settings, **layout)).time
    assert time.compute == pytest.approx(plain.compute + passes * time.forward)
    assert time.total == pytest.approx(plain.total + passes * time.forward)
    assert time.forward == plain.forward


@pytest.mark.parametrize(("loss", "passes"), [("kto", 1), ("apo_zero_unpaired", 0)])
@pytest.mark.parametrize("finetuning", ["full", "lora"])
def test_single_answers_take_what_rows_do_and_passes(loss: str, passes: int, finetuning: str) -> None:
    trained = {"finetuning.finetuning_type": finetuning}
    plain = estimate(case(rows=2, **trained))
    found = estimate(case(rows=2, **trained, **{"run.stage": "kto", "preference.kto_loss": loss}))
    assert found.stages == plain.stages
    assert found.time.compute == pytest.approx(plain.time.compute + passes * plain.time.forward)
    assert num_reference_passes(found.case.settings) == 1 + passes


def test_a_run_is_told_of_both_passes_of_the_reference(tmp_path: Path) -> None:
    found = checked(tmp_path, **{**GOOD, "cutoff_len": 2048, "stage": "kto", "learning_rate": 1e-6})
    assert found.planned is not None
    assert found.lines[-1] == (
        "plan       before the first step the reference computes all rows twice, with their own answers and with"
        f" others, without gradients: about {2 * found.planned.time.forward:.2g} s for the rows of a step"
    )


def test_a_forward_pass_takes_about_a_third_of_a_step() -> None:
    time = estimate(pairs(**{"recompute.recompute_granularity": None})).time
    assert 0.25 < time.forward / (time.compute + time.tensor_parallel) < 0.36


@pytest.mark.parametrize("chunks", [((2.0,), (2.0,), (2.0,), (2.0,)), ((2.0, 2.0), (2.0, 2.0)), ((3.0,),)])
def test_a_forward_pass_is_as_long_as_its_schedule(chunks: tuple[tuple[float, ...], ...]) -> None:
    seconds = [[ChunkSeconds(each, 0.0) for each in stage] for stage in chunks]
    totals = [sum(stage) for stage in chunks]
    closed = 8 * max(totals) + bubble_seconds(totals, len(chunks[0]))
    assert closed == pytest.approx(max(slots[-1].end for slots in timeline(seconds, 8)))


def test_what_was_trained_is_planned_by_the_tokens_of_rows() -> None:
    """A measured row has both sequences, padding included."""
    measured = Measured(counted="allocated", row_tokens=1000.0, longest_row=1801)
    found = RunRecord(case=pairs(), measured=measured).as_trained()
    assert found is not None
    assert [each.case.settings.data.cutoff_len for each in found] == [901, 500]


def test_pictures_of_a_row_are_those_of_both_its_sequences() -> None:
    of_pair, of_row = pairs("Qwen3-VL-8B"), case("Qwen3-VL-8B")
    assert of_pair.picture_tokens == 2 * of_row.picture_tokens
    assert replace(of_pair, image_tokens=100).picture_tokens == 100


def test_a_run_is_told_of_pairs_reference_and_learning_rate(tmp_path: Path) -> None:
    # Memory is as good as with rows of 4,096 tokens.
    values = {**GOOD, "cutoff_len": 2048, "stage": "dpo"}
    found = checked(tmp_path, **values)
    assert found.planned is not None
    warning, first, _, reference = found.lines
    assert warning == (
        "warning    learning_rate 5e-05 is usual for supervised fine-tuning, but preference training needs 5e-7 to 5e-6"
    )
    assert first == "plan       tp2 dp4 on 8 × a100-80g; 1 × 8 × dp 4 = 32 rows a step, of up to 2 × 2,048 tokens"
    assert reference == (
        "plan       before the first step the reference computes all rows once, without gradients: about"
        f" {found.planned.time.forward:.2g} s for the rows of a step"
    )
    without = checked(tmp_path, **values, learning_rate=1e-6, pref_loss="simpo", pref_beta=2.0)
    assert len(without.lines) == 2, without.lines
    # Also where nothing is planned.
    assert checked(tmp_path, machine=None, **values).lines == (warning,)
