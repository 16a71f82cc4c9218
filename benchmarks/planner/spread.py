"""How far published runs lie from their plans, by class of models: what `megatune.plan.uncertainty` states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from megatune.plan.uncertainty import ModelClass, Spread, model_class
from planner.memory import MEASURED, predicted
from planner.predict import case_of, predict
from planner.published import ROWS
from planner.sets import held_out

_STEP = 0.05  # to which what is stated is rounded up
_ENOUGH = 5  # held-out rows of a class that are looked at apart


@cache
def time_factors() -> tuple[tuple[ModelClass, bool, float], ...]:
    """Class, whether held out, and published over planned seconds of each row of `ROWS`."""
    closed = held_out(ROWS)
    predictions = [predict(row) for row in ROWS]
    return tuple((model_class(each.case), each.row.name in closed, 1 + each.error) for each in predictions)


@cache
def memory_factors() -> tuple[tuple[ModelClass, bool, float], ...]:
    """The same of published over planned bytes. Nothing was ever fitted to them."""
    closed = held_out(ROWS)
    return tuple(
        (model_class(case_of(each.row)), each.row.name in closed, each.bytes / predicted(each)) for each in MEASURED
    )


def spread(name: ModelClass) -> Spread:
    """What is to be stated of a class: see `megatune.plan.uncertainty`."""
    found = (
        _stated(memory_factors(), name, 0.9, one_sided=True),
        _stated(time_factors(), name, 2 / 3),
        _stated(time_factors(), name, 0.9),
    )
    return Spread(*found) if name == "dense" else Spread(*map(max, found, spread("dense")))


def _stated(
    factors: Sequence[tuple[ModelClass, bool, float]], name: ModelClass, share: float, one_sided: bool = False
) -> float:
    mine = [(closed, factor) for of, closed, factor in factors if of == name]
    closed = [factor for closed, factor in mine if closed]
    sets = [[factor for _, factor in mine], *([closed] if len(closed) >= _ENOUGH else [])]
    return max((_least(each, share, one_sided) for each in sets if each), default=0.0)


def _least(factors: Sequence[float], share: float, one_sided: bool) -> float:
    """The least multiple of 5 % that this share of the factors respects."""
    sizes = sorted(factor - 1 if one_sided else max(factor, 1 / factor) - 1 for factor in factors)
    needed = sizes[math.ceil(share * len(sizes) - 1e-9) - 1]
    return round(max(_STEP, _STEP * math.ceil(needed / _STEP - 1e-9)), 2)
