"""The planner against published measurements, as benchmarks/planner_accuracy.py reports them."""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path

import pytest

from megatune.plan.case import OURS
from megatune.plan.time.efficiency import EFFICIENCIES
from megatune.plan.uncertainty import SPREADS, memory_bound, model_class

# The benchmarks are scripts: their folder is where they import from.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from planner.fit import CHOSEN, fitted, hosts, rows_for
from planner.memory import MEASURED, predicted
from planner.predict import Prediction, by_this_engine, case_of, predict
from planner.published import REASONS, ROWS
from planner.row import MEGATRON, Row
from planner.sets import held_out
from planner.spread import spread

HELD_OUT = held_out(ROWS)


def _sizes(rows: list[Row]) -> list[float]:
    return [abs(predict(row).error) for row in rows]


def test_publishers_are_open_or_held_out_as_a_whole() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    for device in {row.device for row in ROWS}:
        for publisher in {row.publisher for row in ROWS}:
            mine = {row.name for row in ROWS if (row.publisher, row.device) == (publisher, device)}
            assert mine <= HELD_OUT or not mine & HELD_OUT
    assert len(HELD_OUT) >= len(ROWS) / 2
    first = {row.publisher for row in ROWS if row.device == "h100-80g" and row.name not in HELD_OUT}
    assert first == {"IST-DASLab/llmq", "NVIDIA-NeMo/Automodel"}
    # Publishers that came after the split are held out, wherever they stand in the alphabet.
    assert {row.name for row in ROWS if row.publisher == "PrimeIntellect-ai/prime-rl"} <= HELD_OUT


_MEDIANS = {"ampere": 0.05, "hopper": 0.15, "ada": 0.2, "blackwell": 0.1}


@pytest.mark.parametrize(("generation", "bound"), _MEDIANS.items())
def test_rows_that_no_constant_was_chosen_from_are_predicted(generation: str, bound: float) -> None:
    rows = [row for row in ROWS if row.name in HELD_OUT]
    mine = [row for row in rows if case_of(row).machine.device.generation == generation]
    assert len(mine) >= 6
    assert statistics.median(_sizes(mine)) <= bound


def test_dense_models_are_within_8_percent_of_memory_and_15_of_time_in_the_median() -> None:
    """The issue's own aim, of rows that no constant was chosen from."""
    dense = [row for row in ROWS if row.name in HELD_OUT and model_class(case_of(row)) == "dense"]
    assert len(dense) >= 40
    assert statistics.median(_sizes(dense)) <= 0.15
    held = [each for each in MEASURED if model_class(case_of(each.row)) == "dense"]
    assert len(held) >= 20
    assert statistics.median(abs(predicted(each) / each.bytes - 1) for each in held) <= 0.08


def test_cards_with_little_compute_reach_more_of_it() -> None:
    """An H20's publisher has 0.65 to 0.83 of its peak; one efficiency for all of Hopper said 0.41 to 0.51."""
    rows = [row for row in ROWS if row.device == "h20-96g" and row.name in HELD_OUT]
    assert len(rows) == 7
    assert max(_sizes(rows)) <= 0.15
    assert min(predict(row).time.mfu for row in rows) > 0.6


@pytest.mark.parametrize(("constant", "generation", "devices"), CHOSEN)
def test_constants_in_use_are_those_that_open_rows_say(
    constant: str, generation: str, devices: tuple[str, ...]
) -> None:
    assert rows_for(devices)
    assert not {row.name for row in rows_for(devices)} & HELD_OUT
    found = fitted(constant, generation, devices)
    assert getattr(EFFICIENCIES[generation], constant) == pytest.approx(found, rel=0.06)


def test_the_host_of_megatron_core_is_what_open_rows_say() -> None:
    losses = hosts()
    assert min(losses, key=lambda host: losses[host]) == pytest.approx(MEGATRON.host, abs=0.1)


def test_held_out_experts_are_within_12_percent_in_the_median_and_nine_of_ten_within_45() -> None:
    held = [each for each in map(predict, ROWS) if each.row.name in HELD_OUT and model_class(each.case) == "experts"]
    assert len(held) >= 40
    assert statistics.median(abs(each.error) for each in held) <= 0.12
    factors = sorted(max(1 + each.error, 1 / (1 + each.error)) for each in held)
    assert factors[math.ceil(0.9 * len(factors)) - 1] <= 1.45


def test_rows_that_are_far_off_and_no_others_have_a_reason() -> None:
    far = {each.row.name for each in map(predict, ROWS) if not 1 / 1.4 <= 1 + each.error <= 1.4}
    assert far == REASONS.keys()


def test_rows_are_planned_as_the_engine_that_made_them() -> None:
    """Planned as this project's engine, the runs of others are farther off."""
    others = [row for row in ROWS if row.engine != OURS and model_class(case_of(row)) == "experts"]
    assert len(others) >= 50

    def median(predictions: list[Prediction]) -> float:
        return statistics.median(abs(math.log(1 + each.error)) for each in predictions)

    assert median([predict(row) for row in others]) < 0.7 * median([by_this_engine(row) for row in others])


@pytest.mark.parametrize("name", SPREADS)
def test_what_plans_state_follows_from_the_rows(name: str) -> None:
    assert spread(name) == SPREADS[name]  # type: ignore[arg-type, index]


def test_nine_of_ten_rows_respect_the_bounds_of_their_class() -> None:
    for name in ("dense", "experts"):
        mine = [each for each in map(predict, ROWS) if model_class(each.case) == name]
        factors = [max(1 + each.error, 1 / (1 + each.error)) for each in mine]
        inside = sum(factor <= 1 + SPREADS[name].time_bound for factor in factors)
        assert inside >= 0.9 * len(mine)
        assert inside < len(mine)  # the worst are not inside: the bound is of nine of ten, and says so
        held = [each for each in MEASURED if model_class(case_of(each.row)) == name]
        within = [each.bytes <= (1 + memory_bound(case_of(each.row))) * predicted(each) for each in held]
        assert sum(within) >= 0.9 * len(held)
        assert all(each.bytes >= predicted(each) / 1.1 for each in held)


def test_rows_are_planned_as_their_sources_ran_them() -> None:
    for row in ROWS:
        prediction = predict(row)
        time = prediction.time
        assert time.tokens == row.rows * row.steps * prediction.case.dp_size * row.length, row.name
        assert row.source
        assert prediction.case.world_size % prediction.case.settings.parallel.smallest_world == 0
