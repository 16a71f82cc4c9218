"""Which rows constants may be chosen from, and which they may not.

The rule, made before any of the rows of 2026-11-23 was predicted: of each generation of devices, publishers in
alphabetical order are in turn open and held out, with all their rows. Rows of a generation with one publisher are all
held out. `OPEN` has what the rule said of the publishers of that time. Of those that came later all rows are held out,
so that none of these changes its set.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.predict import machine_of
from planner.row import Row

OPEN = {
    "ampere": ("modelscope/ms-swift", "pytorch/torchtitan"),
    "hopper": (
        "alibaba/Pai-Megatron-Patch",
        "InternLM/xtuner",
        "IST-DASLab/llmq",
        "modelscope/ms-swift",
        "NVIDIA-NeMo/Automodel",
        "pytorch/torchtitan",
    ),
}


def generation_of(row: Row) -> str:
    return machine_of(row.device).device.generation


def held_out(rows: Sequence[Row]) -> frozenset[str]:
    """Names of the rows that nothing may be chosen from."""
    return frozenset(row.name for row in rows if row.publisher not in OPEN.get(generation_of(row), ()))
