"""Which rows constants may be chosen from, and which they may not.

The rule, made before any of the rows of 2026-11-23 was predicted, and kept as publishers were added: of each generation
of devices, publishers in alphabetical order are in turn open and held out, with all their rows. Rows of a generation
with one publisher are all held out.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.predict import machine_of
from planner.row import Row


def generation_of(row: Row) -> str:
    return machine_of(row.device).device.generation


def held_out(rows: Sequence[Row]) -> frozenset[str]:
    """Names of the rows that nothing may be chosen from."""
    names: set[str] = set()
    for generation in {generation_of(row) for row in rows}:
        mine = [row for row in rows if generation_of(row) == generation]
        publishers = sorted({row.publisher for row in mine}, key=str.lower)
        closed = publishers[1::2] if len(publishers) > 1 else publishers
        names.update(row.name for row in mine if row.publisher in closed)
    return frozenset(names)
