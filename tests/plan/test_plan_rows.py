"""Plans of rows that are shorter than cutoff_len: memory for the longest, time for the mean and its padding."""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_plan_preflight import A100S, GOOD, LLAMA_8B

from megatune.config.load import load
from megatune.config.settings import Settings, with_settings
from megatune.errors import ExitCode, MegatuneError
from megatune.families import FAMILIES
from megatune.plan.case import Case, PlannedModel
from megatune.plan.estimate import estimate
from megatune.plan.machine import Device, Machine
from megatune.plan.rows import RowLengths, longest_of
from megatune.plan.run.preflight import Preflight, preflight, with_rows

MODEL = PlannedModel(name="Llama-3.1-8B", architecture=FAMILIES["llama"].architecture(LLAMA_8B))
RNG = random.Random(0)
LENGTHS = [min(2048, 1 + int(RNG.expovariate(1 / 200))) for _ in range(5000)]


def case(lengths: RowLengths | None = None, world: int = 8, **changes: Any) -> Case:
    settings = with_settings(Settings(), {"precision.bf16": True, "batch.per_device_train_batch_size": 4, **changes})
    return Case(model=MODEL, settings=settings, world_size=world, machine=A100S, lengths=lengths)


@pytest.mark.parametrize("count", [1, 2, 4, 16, 64])
def test_the_longest_of_some_rows_is_that_of_draws(count):
    expected = statistics.fmean(max(RNG.choices(LENGTHS, k=count)) for _ in range(1500))
    mean, _ = longest_of(RowLengths.of(LENGTHS, ""), count)
    assert mean == pytest.approx(expected, rel=0.06)
    # The distribution that a mean and a longest row are taken to have is that of these.
    stated, _ = longest_of(RowLengths.stated(statistics.fmean(LENGTHS), 2048, ""), count)
    assert stated == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize(("mean", "longest"), [(1, 2048), (200, 2048), (1900, 2048), (2048, 2048), (7, 8)])
def test_stated_lengths_have_the_stated_mean(mean, longest):
    stated = RowLengths.stated(mean, longest, "")
    assert stated.mean == pytest.approx(mean)
    assert mean * 0.999 <= stated.document <= longest
    assert max(stated.slices) <= longest * (1 + 1e-9)
    assert list(stated.slices) == sorted(stated.slices)


def test_few_rows_are_summed_up():
    assert RowLengths.of([7], "").mean == pytest.approx(7)
    lengths = RowLengths.of([9, 5, 7], "")
    assert (lengths.mean, lengths.longest) == (pytest.approx(7), 9)
    assert lengths.document == pytest.approx((81 + 25 + 49) / 21)


def test_memory_is_that_of_the_longest_row_and_time_that_of_the_padded_mean():
    lengths = RowLengths.of(LENGTHS, "")
    found, longest, full = case(lengths), max(LENGTHS), case()
    as_long = estimate(case(**{"data.cutoff_len": longest}))
    assert estimate(found).stages == as_long.stages
    padded = found.with_mean_rows.sequence_length
    assert lengths.mean < longest_of(lengths, 4)[0] < padded < longest  # eight replicas wait for one of them
    same = estimate(case(**{"data.cutoff_len": padded})).time
    of_lengths = estimate(found).time
    assert same.compute <= of_lengths.compute < 1.1 * same.compute  # attention grows with the square
    assert of_lengths.total < estimate(full).time.total
    assert of_lengths.tokens == pytest.approx(32 * lengths.mean, abs=1)
    assert of_lengths.model_flops < same.model_flops


def test_stages_pad_all_of_a_step_and_length_groups_hardly_anything():
    lengths = RowLengths.of(LENGTHS, "")
    alone = case(lengths).with_mean_rows.sequence_length
    stages = {"parallel.pipeline_model_parallel_size": 2, "batch.gradient_accumulation_steps": 8}
    assert case(lengths, **stages).with_mean_rows.sequence_length > 1.3 * alone
    # A replica's micro-batch is waited for as the longest of all replicas' is.
    assert alone == pytest.approx(longest_of(lengths, 32)[0], rel=0.1)
    grouped = case(lengths, **{"data.group_by_length": True}).with_mean_rows.sequence_length
    assert grouped == pytest.approx(lengths.mean, abs=1)
    packed = case(RowLengths.of([2000, 2048], "", document=300.0), **{"data.packing": True}).with_mean_rows
    assert packed.sequence_length == pytest.approx(2024, abs=24)
    assert packed.document == 300.0


def test_both_answers_of_a_pair_are_rows():
    lengths = RowLengths.of(LENGTHS, "")
    pairs, rows = case(lengths, **{"run.stage": "dpo"}), case(lengths)
    assert pairs.with_mean_rows.sequence_length > rows.with_mean_rows.sequence_length
    assert pairs.tokens == pytest.approx(2 * rows.tokens, abs=2)


def test_a_shorter_cutoff_len_than_the_rows_is_planned_as_such():
    lengths = RowLengths.of(LENGTHS, "")
    assert case(lengths, **{"data.cutoff_len": 512}).sequence_length == 512


# --- what train decides ----------------------------------------------------------------------------------------------


def checked(folder: Path, machine: Machine = A100S, **values: Any) -> Preflight:
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    given = {"model_name_or_path": str(folder), "output_dir": "out", "dataset": "d", "template": "qwen", **GOOD}
    loaded = load(None, [f"{key}={json.dumps(value)}" for key, value in {**given, **values}.items()])
    return preflight(loaded, 8, (), machine, rows_follow=True)


TOO_MUCH = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}


def test_rows_that_may_be_too_long_wait_for_their_lengths(tmp_path):
    found = checked(tmp_path, **TOO_MUCH)
    assert found.planned is not None
    assert not found.planned.fits
    assert found.lines[2].startswith("plan       rows of 4,096 tokens would not fit, those of ")
    assert found.lines[2].endswith(" do: the lengths of the data are used once they are read")
    short = with_rows(found.planned.case, RowLengths.of([100, 200, 300], "of all rows"))
    assert short.planned is not None
    assert short.planned.fits
    assert short.lines[0].startswith(
        "plan       rows of 200 tokens on average, 300 the longest (of all rows); micro-batches are padded to "
    )
    with pytest.raises(MegatuneError, match="this run cannot fit") as caught:
        with_rows(found.planned.case, RowLengths.of([100, 4096], "of all rows"))
    assert caught.value.exit_code is ExitCode.SETTINGS
    warned = replace(
        found.planned.case, settings=with_settings(found.planned.case.settings, {"run.memory_check": "warn"})
    )
    assert "cannot fit" in with_rows(warned, RowLengths.of([100, 4096], "")).lines[1]


def test_what_no_row_is_short_enough_for_is_refused_at_once(tmp_path):
    device: Device = replace(A100S.device, memory=2**34)
    with pytest.raises(MegatuneError, match="this run cannot fit"):
        checked(tmp_path, replace(A100S, device=device), **TOO_MUCH)


def test_rows_of_a_stream_are_warned_of_and_packed_ones_refused(tmp_path):
    stream = {"streaming": True, "max_steps": 5, **TOO_MUCH}
    (line,) = [line for line in checked(tmp_path, **stream).lines if "would not fit" in line]
    assert line.startswith("warning    rows of 4,096 tokens would not fit, those of ")
    with pytest.raises(MegatuneError, match="this run cannot fit"):
        checked(tmp_path, packing=True, **stream)


def test_what_could_be_better_is_said_of_the_rows_that_there_are(tmp_path):
    """Recomputation that rows of cutoff_len would need, and these do not."""
    values = {"per_device_train_batch_size": 4, "recompute_granularity": "full", "recompute_method": "uniform",
              "recompute_num_layers": 1}  # fmt: skip
    found = checked(tmp_path, **values)
    assert len(found.lines) == 2, found.lines
    assert found.planned is not None
    rows = with_rows(found.planned.case, RowLengths.stated(300, 400, ""))
    assert any("not all recomputation is needed" in line for line in rows.lines)
