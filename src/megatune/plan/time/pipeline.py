"""Seconds of all micro-batches of a step in a pipeline, in closed form.

1F1B (arXiv:2006.09503) and its interleaved form (arXiv:2104.04473). The slowest stage computes all its micro-batches
without a pause once the first has arrived; before it and after its last one the other stages work for one micro-batch,
with v virtual stages for one v-th of it. With equal stages that is the well-known bubble of (p - 1) / (v · m).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class ChunkTime(NamedTuple):
    """Seconds of one micro-batch in one virtual stage, with what it exchanges and cannot hide.

    Attributes:
        backward: with what is recomputed.
    """

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


def _totals(chunks: Sequence[Sequence[ChunkTime]]) -> list[float]:
    """Return seconds of a micro-batch by stage."""
    return [sum([forward + backward for forward, backward in stage]) for stage in chunks]


def slowest_stage(chunks: Sequence[Sequence[ChunkTime]]) -> int:
    """Return the stage that the others wait for."""
    totals = _totals(chunks)
    return totals.index(max(totals))


def bubble_seconds(chunks: Sequence[Sequence[ChunkTime]]) -> float:
    """Return how long the slowest stage waits in a step."""
    totals = _totals(chunks)
    return (sum(totals) - max(totals)) / len(chunks[0])


def exchange_seconds(
    stages: int, virtual: int, num_micro_batches: int, overlap: bool, hop: float, busy: float
) -> float:
    """Return what of the exchanges between stages is not hidden.

    The way to the last stage and back is in nobody's shadow. Between, a stage waits for two exchanges a micro-batch and
    virtual stage, unless they run beside computing, as only the interleaved schedule can: then for what of them takes
    longer than all that is computed.

    Args:
        hop: seconds of one message to the next stage.
        busy: seconds that a stage computes in a step.
    """
    if stages == 1:
        return 0.0
    through = 2 * (stages - 1) * hop
    steady = 2 * virtual * num_micro_batches * hop
    return through + (max(0.0, steady - busy) if overlap and virtual > 1 else steady)
