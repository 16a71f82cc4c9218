"""The schedule and the frontier in characters, for a terminal or a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatune.plan.estimate import Estimate
from megatune.plan.pages.tables import worth_seeing
from megatune.plan.pages.words import Unit, bytes_unit, seconds_unit
from megatune.plan.schedule import ChunkSeconds, Slot, Timeline, bubble_share, makespan, timeline
from megatune.plan.search import SearchResult

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


class Piece(NamedTuple):
    """Some characters, and the rich style they have where there are colours."""

    text: str
    style: str = ""


Line = Sequence[Piece]

_CUT = " ~ "
# By virtual stage, the first one pale.
_FORWARD = ("bright_cyan", "cyan", "bright_blue", "blue")
_BACKWARD = ("bright_yellow", "yellow", "bright_red", "red")
_HEIGHT = 12
_ROOM_FOR_NUMBERS = 1.6  # columns of the shortest pass
_MOSTLY = 0.8  # of a column's work
_MARKS = {"too large": "x", "fits": "o", "frontier": "*", "yours": "@"}


def schedule_lines(estimate: Estimate, width: int = 80) -> Iterator[Line]:
    """A row for each stage: numbers are micro-batches, > is forward, < backward, . waiting."""
    view = view_of(estimate)
    stages = len(view.drawn.stages)
    label = len(f"stage {stages - 1}") + 2
    room = width - label - (len(_CUT) if len(view.windows) > 1 else 0) - 2
    lengths = [end - begin for begin, end in view.windows]
    widths = [max(8, int(room * length / sum(lengths))) for length in lengths]
    vpp = 1 + max(slot.work.virtual_stage for slot in view.drawn.stages[0])
    shortest = min(slot.end - slot.start for slots in view.drawn.stages for slot in slots)
    columns_of_shortest = shortest * sum(widths) / sum(lengths)
    for stage in range(stages):
        line = [Piece(f"  {f'stage {stage}':<{label - 2}} ")]
        for window, columns in enumerate(widths):
            if window:
                line.append(Piece(_CUT))
            if columns_of_shortest < 1:
                line += _thin_row(view, stage, window, columns)
            else:
                line += _row(view, stage, window, columns, vpp, numbered=columns_of_shortest >= _ROOM_FOR_NUMBERS)
        yield line
    waits = f"{view.bubble:.1%} (busiest stage {view.least_bubble:.1%})"
    both = " x both" if columns_of_shortest < 1 else ""
    yield [Piece(f"  > forward < backward{both} . waiting {waits}")]
    if view.num_left_out:
        yield [Piece(f"  ~ leaves out {view.num_left_out:,} micro-batches")]


def _row(view: View, stage: int, window: int, columns: int, vpp: int, *, numbered: bool) -> Iterator[Piece]:
    """One stage in one window, each pass in one column or more."""
    begin, end = view.windows[window]
    per_column = (end - begin) / columns
    skipped = view.num_left_out if window else 0
    column = 0
    for slot in view.slots(stage, window):
        first = max(column, _column(slot.start - begin, per_column))
        last = min(columns, _column(slot.end - begin, per_column))
        if first > column:
            yield Piece("." * (first - column), "dim")
        if last > first:
            virtual, shades = slot.work.virtual_stage, _FORWARD if slot.work.forward else _BACKWARD
            shade = shades[virtual * (len(shades) - 1) // max(vpp - 1, 1)]
            number = f"{slot.work.micro_batch + skipped + 1}" if numbered else ""
            yield Piece(_cell(number, slot.work.forward, last - first), f"black on {shade}")
        column = max(column, last, first)
    if column < columns:
        yield Piece("." * (columns - column), "dim")


def _thin_row(view: View, stage: int, window: int, columns: int) -> Iterator[Piece]:
    """One stage in one window, whose passes are narrower than a column: what it does for most of a column's time."""
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
        busy = backward + forward
        if busy < per_column / 2:
            yield Piece(".", "dim")
        elif max(backward, forward) < _MOSTLY * busy:
            yield Piece("x", "black on green")
        else:
            yield (
                Piece(">", f"black on {_FORWARD[1]}") if forward > backward else Piece("<", f"black on {_BACKWARD[1]}")
            )


def _column(seconds: float, per_column: float) -> int:
    return max(0, round(seconds / per_column))


def _cell(number: str, forward: bool, width: int) -> str:
    """The number where it leaves room for a sign."""
    return (number if len(number) < width else "").ljust(width, ">" if forward else "<")


def frontier_lines(result: SearchResult, own: Estimate | None = None, width: int = 80) -> Iterator[Line]:
    """Memory to the right, time upwards: * the frontier, o what fits beside it, x what does not, @ the user's own."""
    marked: list[tuple[str, Sequence[Estimate]]] = [
        (_MARKS["too large"], result.too_large), (_MARKS["fits"], result.ranked),
        (_MARKS["frontier"], result.frontier), (_MARKS["yours"], [own] if own else []),
    ]  # fmt: skip
    everything = [each for _, some in marked for each in some]
    if len(everything) < 2 or not (result.ranked or own):
        return
    limit = everything[0].case.machine.device.memory
    # What is far slower than the fastest, or far larger than the device, would press the rest together.
    least = min(each.time.total for each in everything)
    shown = worth_seeing(result.frontier) or list(everything)
    most = max(each.time.total for each in (*shown, *([own] if own else [])))
    right = max(each.fullest.total for each in (*shown, *([own] if own else [])))
    if right > limit / 4:
        right = max(right, round(1.25 * limit))
    seconds, memory = seconds_unit(least), bytes_unit(right)
    label = max(len(seconds.of(most)), len(seconds.of(least))) + 4
    columns = max(20, min(width, 100) - label - 4)
    grid = [[" "] * (columns + 1) for _ in range(_HEIGHT)]
    if limit <= right:
        for row in grid:
            row[round(limit / right * columns)] = "|"
    for mark, some in marked:
        for each in some:
            if each.time.total <= most and each.fullest.total <= right:
                height = (each.time.total - least) / (most - least) if most > least else 0.0
                grid[_HEIGHT - 1 - round(height * (_HEIGHT - 1))][round(each.fullest.total / right * columns)] = mark
    styles = {"*": "bold green", "x": "dim", "@": "bold red", "|": "red"}
    for index, row in enumerate(grid):
        text = seconds.of(most) if not index else seconds.of(least) if index == _HEIGHT - 1 else ""
        yield [Piece(f"{f'{text} {seconds.name}' if text else '':>{label}} |"),
               *(Piece(mark, styles.get(mark, "")) for mark in row)]  # fmt: skip
    yield [Piece(" " * label + " +" + "-" * (columns + 1))]
    yield [Piece(_scale(label, columns, right, memory))]
    said = [f"{_MARKS['frontier']} frontier", f"{_MARKS['fits']} fits"]
    said += [f"{_MARKS['too large']} too large"] if result.too_large else []
    said += [f"{_MARKS['yours']} your settings"] if own else []
    said += ["| device's memory"] if limit <= right else []
    yield [Piece(" " * label + "  " + ", ".join(said))]


def _scale(label: int, columns: int, right: float, memory: Unit) -> str:
    half, whole = memory.of(right / 2), memory.with_name(right)
    left = f"0{half:>{columns // 2 + len(half) // 2}}"
    return " " * (label + 2) + left + whole.rjust(columns + 1 - len(left))
