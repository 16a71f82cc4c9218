"""The micro-batches of one step and rank."""

from __future__ import annotations

from typing import Any

from megatune.data.batches import Batch, Collator
from megatune.data.loader import StepLoader
from megatune.data.order import StepRows


def step_batches(rows: StepRows, step: int, collator: Collator, **layout: Any) -> list[Batch]:
    """Make the micro-batches of one step that belong to one data-parallel rank."""
    return StepLoader(rows, collator, stop_step=step + 1, **layout)[step][1]
