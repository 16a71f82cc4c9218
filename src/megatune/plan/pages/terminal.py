"""The schedule and the frontier in characters, for a terminal or a file."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatune.plan.estimate import Estimate
from megatune.plan.pages.tables import worth_seeing
from megatune.plan.pages.words import bytes_unit, seconds_unit
from megatune.plan.schedule import ChunkSeconds, Slot, Timeline, bubble_share, makespan, timeline
from megatune.plan.search import SearchResult, safe_bytes

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
        """Yield the passes of a stage that are in a window, at least in part."""
        begin, end = self.windows[window]
        for slot in self.drawn.stages[stage]:
            if slot.end > begin and slot.start < end:
                yield slot


def view(chunks: Sequence[Sequence[ChunkSeconds]], num_micro_batches: int) -> View:
    """Return the part of a schedule that is worth looking at: the whole step, or its begin and its end."""
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


class StyledText(NamedTuple):
    """Some characters, and the rich style they have where there are colours."""

    text: str
    style: str = ""


Line = Sequence[StyledText]

_CUT = " ~ "
# By virtual stage, the first one pale.
_FORWARD = ("bright_cyan", "cyan", "bright_blue", "blue")
_BACKWARD = ("bright_yellow", "yellow", "bright_red", "red")
_HEIGHT = 12
_ROOM_FOR_NUMBERS = 1.6  # columns of the shortest pass
_MOSTLY = 0.8  # of a column's work


def schedule_lines(estimate: Estimate, width: int = 80) -> Iterator[Line]:
    """Draw a row for each stage: numbers are micro-batches, > is forward, < backward, . waiting."""
    shown = view(estimate.time.chunks, estimate.case.num_micro_batches)
    stages = len(shown.drawn.stages)
    label = len(f"stage {stages - 1}") + 2
    room = width - label - (len(_CUT) if len(shown.windows) > 1 else 0) - 2
    lengths = [end - begin for begin, end in shown.windows]
    widths = [max(8, int(room * length / sum(lengths))) for length in lengths]
    vpp = 1 + max(slot.work.virtual_stage for slot in shown.drawn.stages[0])
    shortest = min(slot.end - slot.start for slots in shown.drawn.stages for slot in slots)
    columns_of_shortest = shortest * sum(widths) / sum(lengths)
    for stage in range(stages):
        line = [StyledText(f"  {f'stage {stage}':<{label - 2}} ")]
        for window, columns in enumerate(widths):
            if window:
                line.append(StyledText(_CUT))
            if columns_of_shortest < 1:
                line += _thin_row(shown, stage, window, columns)
            else:
                line += _row(shown, stage, window, columns, vpp, numbered=columns_of_shortest >= _ROOM_FOR_NUMBERS)
        yield line
    waits = f"{shown.bubble:.1%} (busiest stage {shown.least_bubble:.1%})"
    both = " x both" if columns_of_shortest < 1 else ""
    yield [StyledText(f"  > forward < backward{both} . waiting {waits}")]
    if shown.num_left_out:
        yield [StyledText(f"  ~ leaves out {shown.num_left_out:,} micro-batches")]


def _row(view: View, stage: int, window: int, columns: int, vpp: int, *, numbered: bool) -> Iterator[StyledText]:
    """Draw one stage in one window, each pass in one column or more."""
    begin, end = view.windows[window]
    per_column = (end - begin) / columns
    skipped = view.num_left_out if window else 0
    column = 0
    for slot in view.slots(stage, window):
        first = max(column, round((slot.start - begin) / per_column))
        last = max(0, min(columns, round((slot.end - begin) / per_column)))
        if first > column:
            yield StyledText("." * (first - column), "dim")
        if last > first:
            virtual, shades = slot.work.virtual_stage, _FORWARD if slot.work.forward else _BACKWARD
            shade = shades[virtual * (len(shades) - 1) // max(vpp - 1, 1)]
            number = f"{slot.work.micro_batch + skipped + 1}" if numbered else ""
            number = number if len(number) < last - first else ""  # leaves room for a sign
            yield StyledText(number.ljust(last - first, ">" if slot.work.forward else "<"), f"black on {shade}")
        column = max(column, last, first)
    if column < columns:
        yield StyledText("." * (columns - column), "dim")


def _thin_row(view: View, stage: int, window: int, columns: int) -> Iterator[StyledText]:
    """Draw one stage in one window, whose passes are narrower than a column: what it does most of a column's time."""
    begin, end = view.windows[window]
    per_column = (end - begin) / columns
    spent = [[0.0, 0.0] for _ in range(columns)]  # backward, forward
    for slot in view.slots(stage, window):
        first, last = max(0, int((slot.start - begin) / per_column)), int((slot.end - begin) / per_column)
        for column in range(first, min(last + 1, columns)):
            left = begin + column * per_column
            overlap = min(slot.end, left + per_column) - max(slot.start, left)
            spent[column][slot.work.forward] += max(overlap, 0.0)
    for backward, forward in spent:
        busy, shades = backward + forward, _FORWARD if forward > backward else _BACKWARD
        if busy < per_column / 2:
            yield StyledText(".", "dim")
        elif max(backward, forward) < _MOSTLY * busy:
            yield StyledText("x", "black on green")
        else:
            yield StyledText(">" if forward > backward else "<", f"black on {shades[1]}")


def frontier_lines(
    result: SearchResult, own: Estimate | None = None, width: int = 80, recommended: Estimate | None = None
) -> Iterator[Line]:
    """Draw memory to the right, time upwards: * the frontier, o what fits beside it, x what does not, R what is
    recommended, @ the user's."""
    yours, best = [own] if own else [], [recommended] if recommended else []
    marked = (("x", result.too_large), ("o", result.ranked), ("*", result.frontier), ("R", best), ("@", yours))
    everything = [each for _, some in marked for each in some]
    if len(everything) < 2 or not (result.ranked or own):
        return
    limit = everything[0].case.machine.device.memory
    # What is far slower than the fastest, or far larger than the device, would press the rest together.
    least = min(each.time.total for each in everything)
    shown = worth_seeing(result.frontier) or list(everything)
    most = max(each.time.total for each in (*shown, *yours))
    right = max(each.fullest.total for each in (*shown, *yours))
    if right > limit / 4:
        right = max(right, round(1.25 * limit))
    seconds, memory = seconds_unit(least), bytes_unit(right)
    label = max(len(seconds.of(most)), len(seconds.of(least))) + 4
    columns = max(20, min(width, 100) - label - 4)
    grid = [[" "] * (columns + 1) for _ in range(_HEIGHT)]
    sure = safe_bytes(everything[0].case)
    for mark, memory_line in ((":", sure), ("|", limit)):
        for row in grid if memory_line <= right else ():
            row[round(memory_line / right * columns)] = mark
    for mark, some in marked:
        for each in some:
            if each.time.total <= most and each.fullest.total <= right:
                height = (each.time.total - least) / (most - least) if most > least else 0.0
                grid[_HEIGHT - 1 - round(height * (_HEIGHT - 1))][round(each.fullest.total / right * columns)] = mark
    styles = {"*": "bold green", "x": "dim", "@": "bold red", "|": "red", ":": "red", "R": "bold magenta"}
    for index, row in enumerate(grid):
        text = seconds.of(most) if not index else seconds.of(least) if index == _HEIGHT - 1 else ""
        yield [StyledText(f"{f'{text} {seconds.name}' if text else '':>{label}} |"),
               *(StyledText(mark, styles.get(mark, "")) for mark in row)]  # fmt: skip
    yield [StyledText(" " * label + " +" + "-" * (columns + 1))]
    half, whole = memory.of(right / 2), memory.with_name(right)
    scale = f"0{half:>{columns // 2 + len(half) // 2}}"
    yield [StyledText(" " * (label + 2) + scale + whole.rjust(columns + 1 - len(scale)))]
    said = {"R recommended": recommended, "* frontier": True, "o fits": True, "x too large": result.too_large,
            "@ your settings": own, ": surely fits to the left": sure <= right,
            "| device's memory": limit <= right}  # fmt: skip
    legend = ", ".join(text for text, is_there in said.items() if is_there)
    for line in textwrap.wrap(legend, max(width - label - 2, 40)):
        yield [StyledText(" " * (label + 2) + line)]
