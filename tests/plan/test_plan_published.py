"""The planner against published measurements, as benchmarks/planner_accuracy.py reports them."""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path

import pytest

from megatune.plan.time.efficiency import EFFICIENCIES
from megatune.plan.uncertainty import MEMORY_UNCERTAINTIES, TIME_UNCERTAINTIES, regime_of

# The benchmarks are scripts: their folder is where they import from.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from planner.fit import fitted, generations, halves
from planner.memory import PUBLISHED, predicted
from planner.predict import case_of, predict
from planner.published import ROWS


def _sizes(rows):
    return [abs(predict(row).error) for row in rows]


@pytest.mark.parametrize("generation", generations())
def test_rows_that_nothing_was_fitted_to_are_predicted_within_a_fifth(generation):
    fit, test = halves(generations()[generation])
    assert len(fit) + len(test) >= 13
    assert statistics.median(_sizes(test)) <= 0.2
    assert statistics.median(_sizes(fit)) <= 0.2


@pytest.mark.parametrize("generation", generations())
def test_the_efficiency_in_use_is_the_fitted_one(generation):
    fit, _ = halves(generations()[generation])
    assert EFFICIENCIES[generation].matmul == pytest.approx(fitted(generation, fit), abs=0.03)


@pytest.mark.parametrize("regime", TIME_UNCERTAINTIES)
def test_two_of_three_rows_lie_within_the_stated_uncertainty(regime):
    predictions = [prediction for prediction in map(predict, ROWS) if regime_of(prediction.case) == regime]
    factors = [math.exp(abs(math.log(1 + prediction.error))) - 1 for prediction in predictions]
    inside = sum(factor <= TIME_UNCERTAINTIES[regime] for factor in factors)
    assert inside >= 2 / 3 * len(factors) - 1
    assert len(factors) >= 10


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_two_of_three_runs_hold_what_the_stated_uncertainty_of_memory_says(kind):
    names = {row.name for row in ROWS}  # the others are formulas that people published, not measurements
    factors = []
    for published in (each for each in PUBLISHED if each.row.name in names):
        if (case_of(published.row).model.architecture.moe is not None) == (kind == "experts"):
            ratio = published.bytes / predicted(published)
            factors.append(max(ratio, 1 / ratio) - 1)
    assert len(factors) >= 3
    assert sum(factor <= MEMORY_UNCERTAINTIES[kind] for factor in factors) >= 2 / 3 * len(factors)


def test_rows_are_planned_as_their_sources_ran_them():
    for row in ROWS:
        prediction = predict(row)
        time = prediction.time
        assert time.tokens == row.rows * row.steps * prediction.case.dp_size * row.length, row.name
        assert row.source
        assert prediction.case.world_size % prediction.case.settings.parallel.smallest_world == 0
