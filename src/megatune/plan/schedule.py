"""Pipeline schedules: the order of passes, the micro-batches in flight, and the bubble.

1F1B (PipeDream-Flush, arXiv:2006.09503) and interleaved 1F1B (arXiv:2104.04473), in Megatron-Core's order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from operator import mul
from typing import NamedTuple


class Pass(NamedTuple):
    """One stage's work on one micro-batch: the layers of one virtual stage, forward or backward."""

    forward: bool
    virtual_stage: int
    micro_batch: int


class Slot(NamedTuple):
    """When a stage computes a pass, in seconds from the start of the step."""

    work: Pass
    start: float
    end: float


class ChunkSeconds(NamedTuple):
    """Seconds of one micro-batch in one virtual stage of one stage; `backward` includes recomputation."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


def num_warmup_passes(pp: int, vpp: int, stage: int, num_micro_batches: int) -> int:
    """Count the warm-up forward passes of a stage, before the steady state of 1F1B.

    As Megatron-Core's get_pp_rank_microbatches: p - s - 1 without virtual stages, and
    2 (p - s - 1) + (v - 1) p with them.
    """
    ahead = pp - stage - 1
    return min(ahead if vpp == 1 else 2 * ahead + (vpp - 1) * pp, num_micro_batches * vpp)


@lru_cache(maxsize=4096)
def forward_order(pp: int, vpp: int, num_micro_batches: int) -> tuple[tuple[int, int], ...]:
    """Return (virtual stage, micro-batch) of all forward passes of a stage; the same for all stages.

    As Megatron-Core's get_schedule_table: pp micro-batches go through all virtual stages, then the next pp.
    """
    return tuple(
        (virtual, micro_batch)
        for first in range(0, num_micro_batches, pp)
        for virtual in range(vpp)
        for micro_batch in range(first, min(first + pp, num_micro_batches))
    )


def stage_passes(pp: int, vpp: int, stage: int, num_micro_batches: int) -> list[Pass]:
    """Return the passes of one stage in a step, in their order.

    Args:
        vpp: virtual stages of a stage, 1 without.
        num_micro_batches: of one process in a step; Megatron-Core requires a multiple of pp if vpp > 1.
    """
    order = forward_order(pp, vpp, num_micro_batches)
    forwards = [Pass(True, virtual, micro_batch) for virtual, micro_batch in order]
    # Backward passes take the virtual stages from the last one.
    backwards = [Pass(False, vpp - 1 - virtual, micro_batch) for virtual, micro_batch in order]
    warmup = num_warmup_passes(pp, vpp, stage, num_micro_batches)
    steady = [work for pair in zip(forwards[warmup:], backwards, strict=False) for work in pair]
    return [*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]]


@lru_cache(maxsize=65536)
def in_flight(
    pp: int, vpp: int, stage: int, num_micro_batches: int, sizes: tuple[float, ...] | None = None
) -> tuple[int, ...]:
    """Return the number of micro-batches in flight in each virtual stage when the stage holds most.

    A stage holds most after each forward pass that follows its warm-up: min(warm-up + 1, all) micro-batches. Their
    distribution over the virtual stages changes from pass to pass, with a period of pp · vpp passes.

    Args:
        sizes: activations of a micro-batch in each virtual stage, in any unit; None weighs all equally, and uses the
            first of these moments.
    """
    moments = _moments(pp, vpp, stage, num_micro_batches)
    if sizes is None or len(moments) == 1 or len(set(sizes)) == 1:  # the same number is held at each moment
        return moments[0]
    return max(moments, key=lambda held: sum(map(mul, held, sizes)))


@lru_cache(maxsize=4096)
def _moments(pp: int, vpp: int, stage: int, num_micro_batches: int) -> tuple[tuple[int, ...], ...]:
    """Return the distinct distributions of micro-batches after the forward passes that follow the warm-up, in order."""
    warmup = num_warmup_passes(pp, vpp, stage, num_micro_batches)
    # One period of the steady state is enough.
    order = forward_order(pp, vpp, min(num_micro_batches, -(-warmup // (pp * vpp)) * pp + 2 * pp))
    held = [0] * vpp
    for virtual, _ in order[: warmup + 1]:
        held[virtual] += 1
    moments = {tuple(held): None}
    for (arrives, _), (leaves, _) in zip(order[warmup + 1 :], order, strict=False):
        held[vpp - 1 - leaves] -= 1
        held[arrives] += 1
        moments[tuple(held)] = None
    return tuple(moments)


def timeline(chunks: Sequence[Sequence[ChunkSeconds]], num_micro_batches: int) -> list[list[Slot]]:
    """Simulate a step: each stage computes its passes in order, each as soon as its input is available.

    Args:
        chunks: seconds by [stage][virtual stage].

    Returns:
        The passes of each stage, in their order.
    """
    pp, vpp = len(chunks), len(chunks[0])
    orders = [deque(stage_passes(pp, vpp, stage, num_micro_batches)) for stage in range(pp)]
    slots: list[list[Slot]] = [[] for _ in chunks]
    ends: dict[tuple[int, Pass] | None, float] = {None: 0.0}
    while any(orders):
        for stage, order in enumerate(orders):
            while order and (source := _needed(stage, order[0], pp, vpp)) in ends:
                work = order.popleft()
                chunk = chunks[stage][work.virtual_stage]
                free = slots[stage][-1].end if slots[stage] else 0.0
                start = max(free, ends[source])
                slots[stage].append(Slot(work, start, start + (chunk.forward if work.forward else chunk.backward)))
                ends[stage, work] = slots[stage][-1].end
    return slots


def _needed(stage: int, work: Pass, pp: int, vpp: int) -> tuple[int, Pass] | None:
    """Return the pass whose result a pass needs: that of the layers before it, or, backward, of those after it."""
    virtual, step = work.virtual_stage, -1 if work.forward else 1
    if 0 <= stage + step < pp:
        return stage + step, work
    if 0 <= virtual + step < vpp:
        return (pp - 1 if work.forward else 0), work._replace(virtual_stage=virtual + step)
    return None if work.forward else (stage, work._replace(forward=True))


def bubble_seconds(totals: Sequence[float], vpp: int) -> float:
    """Return the time that the slowest stage is idle in a step, in closed form.

    It computes all its micro-batches without a pause once the first has arrived; before and after, the other stages
    compute one micro-batch, or one v-th of it with v virtual stages. With equal stages this is the well-known bubble of
    (p - 1) / (v · m). The same is true for forward passes alone.

    Args:
        totals: seconds of a micro-batch in each stage.
        vpp: virtual stages of a stage, 1 without.
    """
    return (sum(totals) - max(totals)) / vpp


def bubble_shares(chunks: Sequence[Sequence[ChunkSeconds]], num_micro_batches: int) -> tuple[float, float]:
    """Return the shares of a step in which stages are idle: the mean over all stages, and that of the slowest one.

    For p equal stages without virtual stages, both are (p - 1) / (m + p - 1).
    """
    totals = [sum(chunk.total for chunk in stage) for stage in chunks]
    bubble = bubble_seconds(totals, len(chunks[0]))
    whole = num_micro_batches * max(totals) + bubble
    if not whole:
        return 0.0, 0.0
    return 1 - num_micro_batches * sum(totals) / (len(chunks) * whole), bubble / whole


def exchange_seconds(
    stages: int, virtual: int, num_micro_batches: int, overlap: bool, hop: float, busy: float
) -> float:
    """Return the seconds of communication between stages that is not overlapped.

    The messages to the last stage and back while the pipeline fills and drains never overlap. In between, a stage waits
    for two messages per micro-batch and virtual stage; with overlap, which only the interleaved schedule supports, only
    for the time by which they exceed the computation.

    Args:
        hop: seconds of one message to the next stage.
        busy: seconds that a stage computes in a step.
    """
    if stages == 1:
        return 0.0
    through = 2 * (stages - 1) * hop
    steady = 2 * virtual * num_micro_batches * hop
    return through + (max(0.0, steady - busy) if overlap and virtual > 1 else steady)
