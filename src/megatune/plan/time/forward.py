"""Passes without gradients, which preference training has beside those that train."""

from __future__ import annotations

from collections.abc import Sequence

from megatune.config.settings import Settings
from megatune.plan.schedule import ChunkSeconds


def forward_seconds(chunks: Sequence[Sequence[ChunkSeconds]], num_micro_batches: int) -> float:
    """Return seconds of a forward pass over the micro-batches of a step; exchanges between stages left out.

    As with `schedule.bubble_seconds` the slowest stage waits for one micro-batch of the others.
    """
    totals = [sum(chunk.forward for chunk in stage) for stage in chunks]
    return num_micro_batches * max(totals) + (sum(totals) - max(totals)) / len(chunks[0])


def num_forward_passes(settings: Settings) -> int:
    """Count those of each step: for answers to other prompts, and for the reference where rows are streamed."""
    if settings.run.stage == "kto":
        return num_reference_passes(settings) - 1
    if settings.run.stage != "dpo":
        return 0
    return int(settings.preference.has_reference and settings.data.streaming)


def num_reference_passes(settings: Settings) -> int:
    """Count forward passes over all rows before the first step; of KTO a second one, with answers to other prompts."""
    if settings.run.stage == "kto":
        return 2 if settings.preference.kto_loss == "kto" else 1
    return int(settings.run.stage == "dpo" and settings.preference.has_reference and not settings.data.streaming)
