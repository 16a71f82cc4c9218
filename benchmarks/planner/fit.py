"""One efficiency a generation, fitted to half of the published rows."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatune.plan.time.efficiency import EFFICIENCIES
from planner.predict import case_of, predict
from planner.published import ROWS
from planner.row import Row


def generations() -> dict[str, list[Row]]:
    """Rows by their device's generation, in published order."""
    found: dict[str, list[Row]] = {}
    for row in ROWS:
        found.setdefault(case_of(row).machine.device.generation, []).append(row)
    return found


def halves(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """The first, third, fifth … row to fit, the others to test."""
    return list(rows[::2]), list(rows[1::2])


def fitted(generation: str, rows: Sequence[Row]) -> float:
    """The efficiency of dense products, in steps of 0.01, with the least median of |log(predicted / published)|:
    rows that no efficiency explains then weigh no more than others."""

    def loss(share: float) -> float:
        with efficiency_set(generation, share):
            return statistics.median(abs(math.log(1 + predict(row).error)) for row in rows)

    return min((step / 100 for step in range(40, 96)), key=loss)


@contextmanager
def efficiency_set(generation: str, share: float) -> Iterator[None]:
    """Predict with this efficiency of dense products."""
    before = EFFICIENCIES[generation]
    EFFICIENCIES[generation] = dataclasses.replace(before, matmul=share)
    try:
        yield
    finally:
        EFFICIENCIES[generation] = before
