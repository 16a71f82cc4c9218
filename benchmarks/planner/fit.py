"""Constants that were chosen from published rows, and what the open rows say of them: those of
`megatune.plan.time.efficiency`, and Megatron-Core's host."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatune.plan.time.efficiency import EFFICIENCIES
from megatune.plan.uncertainty import model_class
from planner.predict import case_of, predict
from planner.published import ROWS
from planner.row import MEGATRON, Row
from planner.sets import generation_of, held_out

# The constant, of which generation, and the devices whose open rows say most of it: those that power limits, or not.
CHOSEN = (
    ("demand", "hopper", ("h100-80g", "h100-96g")),
    ("demand", "ampere", ("a100-80g", "a800-80g")),
    ("ceiling", "hopper", ("h20-96g",)),
)


def rows_for(devices: Sequence[str]) -> list[Row]:
    """The open rows of dense models on these devices, with and without adapters."""
    closed = held_out(ROWS)
    mine = [row for row in ROWS if row.device in devices and row.name not in closed]
    return [row for row in mine if model_class(case_of(row)) in ("dense", "lora")]


def fitted(constant: str, generation: str, devices: Sequence[str]) -> float:
    """The value, in steps of a hundredth of the one in use, with the least median of |log(predicted / published)|:
    rows that no value explains then weigh no more than others."""
    rows, now = rows_for(devices), getattr(EFFICIENCIES[generation], constant)

    def loss(value: float) -> float:
        with efficiency_set(generation, **{constant: value}):
            return statistics.median(abs(math.log(1 + predict(row).error)) for row in rows)

    values = [now * step / 100 for step in range(70, 131)]
    return min((value for value in values if constant != "ceiling" or value <= 1), key=loss)


def hosts() -> dict[float, float]:
    """The mean |log(predicted / published)| of the open rows that Megatron-Core made, by `host` of its engine.

    Few of them wait for the host: the median hardly depends on it.
    """
    closed = held_out(ROWS)
    rows = [row for row in ROWS if row.engine.host == MEGATRON.host and row.name not in closed]

    def loss(host: float) -> float:
        made = (dataclasses.replace(row, engine=row.engine._replace(host=host)) for row in rows)
        return statistics.mean(abs(math.log(1 + predict(row).error)) for row in made)

    return {step / 10: loss(step / 10) for step in range(10, 31)}


@contextmanager
def efficiency_set(generation: str, **values: Any) -> Iterator[None]:
    """Predict with these constants."""
    before = EFFICIENCIES[generation]
    EFFICIENCIES[generation] = dataclasses.replace(before, **values)
    try:
        yield
    finally:
        EFFICIENCIES[generation] = before


__all__ = ["CHOSEN", "efficiency_set", "fitted", "generation_of", "rows_for"]
