"""Which part of a step's schedule is drawn: all of a short one, the begin and the end of a long one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatune.plan.estimate import Estimate
from megatune.plan.schedule import ChunkSeconds, Slot, Timeline, bubble_share, makespan, timeline

# In either window: what fills the pipeline, and a little of the steady state.
_ROUNDS_OF_STAGES = 1.25
_MORE = 3


@dataclass(frozen=True)
class View:
    """What of a schedule is shown.

    Attributes:
        drawn: the schedule, of fewer micro-batches than the step has where only its ends are shown.
        windows: (begin, end) in seconds of `drawn`; one, or two with steady state between them.
        begins: seconds of the real step at which each window begins.
        num_left_out: micro-batches of the step that are not drawn; those after the cut are numbered from it on.
        bubble: share of the whole step's time in which stages wait, all of them together.
        least_bubble: share in which the busiest stage waits, for the pipeline to fill and to empty.
    """

    drawn: Timeline
    windows: tuple[tuple[float, float], ...]
    begins: tuple[float, ...]
    num_left_out: int
    bubble: float
    least_bubble: float

    def slots(self, stage: int, window: int) -> Iterator[Slot]:
        """The passes of a stage that are in a window, at least in part."""
        begin, end = self.windows[window]
        for slot in self.drawn.stages[stage]:
            if slot.end > begin and slot.start < end:
                yield slot


def view_of(estimate: Estimate) -> View:
    """The part of a plan's schedule that is worth looking at."""
    return view(estimate.time.chunks, estimate.case.num_micro_batches)


def view(chunks: Sequence[Sequence[ChunkSeconds]], num_micro_batches: int) -> View:
    """The whole step, or its begin and its end."""
    stages = len(chunks)
    whole = makespan(chunks, num_micro_batches)
    busiest = num_micro_batches * max(sum(chunk.forward + chunk.backward for chunk in stage) for stage in chunks)
    shares = bubble_share(chunks, num_micro_batches), 1 - busiest / whole
    shown = round(_ROUNDS_OF_STAGES * stages) + _MORE  # micro-batches of one window
    # Full rounds, so that the order at the end is the real one's.
    fewer = num_micro_batches % stages + (-(-2 * shown // stages) + 1) * stages
    if num_micro_batches <= max(2 * shown, fewer):
        drawn = timeline(chunks, num_micro_batches)
        return View(drawn, ((0.0, drawn.makespan),), (0.0,), 0, *shares)
    drawn = timeline(chunks, fewer)
    length = drawn.makespan / (fewer + stages - 1) * shown
    windows = ((0.0, length), (drawn.makespan - length, drawn.makespan))
    return View(drawn, windows, (0.0, whole - length), num_micro_batches - fewer, *shares)
