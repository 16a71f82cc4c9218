"""Memory against time, and the pipeline, as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, log
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatune.picture import new_figure, write
from megatune.plan.estimate import Estimate
from megatune.plan.pages.tables import spread, worth_seeing
from megatune.plan.pages.terminal import View, view
from megatune.plan.pages.words import (
    Unit,
    bytes_unit,
    count,
    layout_words,
    machine_words,
    recompute_words,
    row_words,
    seconds_unit,
)
from megatune.plan.search import SearchResult, safe_bytes
from megatune.plan.uncertainty import memory_bound

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from megatune.plan.answer import Answer
    from megatune.plan.case import Case

FRONTIER_NAME, PIPELINE_NAME = "plan_frontier.png", "plan_pipeline.png"
_MOST_NAMED = 10
# Named dots are at least so far from each other, in parts of the picture's width and height.
_APART = 0.045
_BLUE, _ORANGE, _GREEN, _GREY, _RED = "#3b75af", "#e28b3d", "#4a9a5b", "#9aa0a6", "#c0392b"
_PURPLE = "#7b2d8b"
_COLOURS = {"nothing": _BLUE, "some": _GREEN, "whole layers": _ORANGE}


def draw(found: Answer, folder: Path) -> list[Path]:
    """Write the pictures that an answer has: of all layouts, and of the pipeline of what was planned.

    Raises:
        MegatuneError: CANNOT_WRITE.
    """
    figures = {}
    if found.result.ranked or found.result.too_large or found.own is not None:
        figures[folder / FRONTIER_NAME] = frontier_figure(found.result, found.own, found.recommended)
    if (planned := found.own or found.best) is not None:
        batches = planned.case.num_micro_batches
        shown = view(planned.time.chunks, batches)
        title = f"{planned.case.model.name}, {layout_words(planned.case)}: a step of "
        title += f"{batches:,} micro-batch{'es' * (batches != 1)}. "
        waits = f"Stages wait {shown.bubble:.1%} of the time, the busiest of them {shown.least_bubble:.1%}"
        title += waits if len(shown.drawn.stages) > 1 else "One stage never waits"
        figures[folder / PIPELINE_NAME] = pipeline_figure(shown, title)
    for path, figure in figures.items():
        write(figure, path)
    return list(figures)


def frontier_figure(result: SearchResult, own: Estimate | None = None, recommended: Estimate | None = None) -> Figure:
    """Draw layouts as dots coloured by what they recompute, the frontier as a line and its names beside it, what is
    recommended, and the user's own."""
    figure = new_figure(13, 6)
    axes, names = figure.subplots(1, 2, width_ratios=[3, 1.15])
    fitting = list({id(each): each for each in (*result.ranked, *worth_seeing(result.frontier))}.values())
    everything = [*fitting, *result.too_large, *([own] if own else [])]
    case = everything[0].case
    figure.suptitle(
        f"{case.model.name} on {machine_words(case.machine, case.world_size)}, "
        f"a global batch of {count(case.global_batch_size, 'row')} of {row_words(case)}",
        fontsize=11,
    )
    scale = _Scale.of([*fitting, *([own] if own else [])] if fitting else everything, everything)
    for name, colour in _COLOURS.items():
        _scatter(axes, scale, [each for each in fitting if _recomputed(each) == name], s=26, color=colour, alpha=0.65,
                 linewidth=0, label=f"recomputes {name}", zorder=2)  # fmt: skip
    _scatter(axes, scale, result.too_large, s=34, color=_GREY, marker="x", linewidth=1.2, label="too large", zorder=2)
    _scatter(axes, scale, [own] if own else [], s=190, color="black" if own and own.fits else _RED, marker="*",
             edgecolor="white", label="your settings", zorder=5)  # fmt: skip
    if recommended is not None:
        _scatter(axes, scale, [recommended], s=210, facecolor="none", edgecolor=_PURPLE, marker="D", linewidth=2.2,
                 label=f"recommended: {layout_words(recommended.case)}", zorder=6)  # fmt: skip
    _draw_limit(axes, scale, everything[0].case)
    _draw_line(axes, names, scale, worth_seeing(result.frontier))
    _finish(axes, scale)
    return figure


@dataclass(frozen=True)
class _Scale:
    """Units and limits of the picture, the limits in the units."""

    memory: Unit
    seconds: Unit
    limit: float
    left: float
    right: float
    bottom: float
    top: float

    @classmethod
    def of(cls, shown: Sequence[Estimate], everything: Sequence[Estimate]) -> _Scale:
        """So that what is shown is seen, and the device's memory where that is not far away."""
        limit = shown[0].case.machine.device.memory
        bytes_of = [each.fullest.total for each in shown]
        times = [each.time.total for each in shown]
        memory, seconds = bytes_unit(max(bytes_of)), seconds_unit(min(times))
        right = max(bytes_of) * 1.1
        if max(bytes_of) > limit / 3:
            near = [each.fullest.total for each in everything if each.fullest.total < 1.4 * limit]
            right = max(limit * 1.08, 1.05 * max(near, default=0), max(bytes_of) * 1.04)
        least = min(*bytes_of, limit)  # the device's memory is seen where all is too large for it
        left = 0.0 if least < 0.35 * right else least - 0.12 * (right - least)
        ratio = max(max(times) / min(times), 1.2)
        return cls(memory, seconds, limit / memory.size, left / memory.size, right / memory.size,
                   min(times) * ratio**-0.08 / seconds.size, max(times) * ratio**0.08 / seconds.size)  # fmt: skip

    def place(self, estimate: Estimate) -> tuple[float, float]:
        return estimate.fullest.total / self.memory.size, estimate.time.total / self.seconds.size

    def share(self, estimate: Estimate) -> tuple[float, float]:
        """Where a dot is, in parts of the picture's width and height."""
        x, y = self.place(estimate)
        return (x - self.left) / (self.right - self.left), log(y / self.bottom) / log(self.top / self.bottom)


def _scatter(axes: Axes, scale: _Scale, estimates: Sequence[Estimate], **how: Any) -> None:
    if estimates:
        axes.scatter(*zip(*map(scale.place, estimates), strict=True), **how)


def _recomputed(estimate: Estimate) -> str:
    words = recompute_words(estimate.case.settings.recompute)
    return "nothing" if words == "none" else "whole layers" if words.startswith(("full", "block")) else "some"


def _draw_limit(axes: Axes, scale: _Scale, case: Case) -> None:
    """The device's memory, where it is near enough to be seen, and what surely fits in it."""
    text = f"memory of the device: {scale.limit:,.4g} {scale.memory.name}"
    if scale.limit > scale.right:
        axes.text(0.99, 0.02, f"{text}, far to the right", transform=axes.transAxes, ha="right", color=_RED, fontsize=9)
        return
    sure = safe_bytes(case) / scale.memory.size
    axes.axvspan(sure, scale.limit, color=_ORANGE, alpha=0.06, linewidth=0)
    axes.annotate(f"tight: runs hold up to {memory_bound(case):.0%} more than planned", (sure, 0.03), (5, 0),
                  xycoords=("data", "axes fraction"), textcoords="offset points", rotation=90, ha="left", va="bottom",
                  color=_ORANGE, fontsize=9)  # fmt: skip
    axes.axvspan(scale.limit, scale.right, color=_RED, alpha=0.06, linewidth=0)
    axes.axvline(scale.limit, color=_RED, linestyle="--", linewidth=1.3)
    axes.annotate(text, (scale.limit, 0.03), (5, 0), xycoords=("data", "axes fraction"), textcoords="offset points",
                  rotation=90, ha="left", va="bottom", color=_RED, fontsize=9)  # fmt: skip


def _draw_line(axes: Axes, names: Axes, scale: _Scale, frontier: Sequence[Estimate]) -> None:
    """The frontier as steps; some of its layouts numbered, and named beside the picture."""
    names.set_axis_off()
    if not frontier:
        return
    axes.plot(*zip(*map(scale.place, frontier), strict=True), color="black", linewidth=1.0, drawstyle="steps-post",
              zorder=3)  # fmt: skip
    _scatter(axes, scale, frontier, s=46, facecolor="none", edgecolor="black", linewidth=1.0, zorder=3,
             label="no other is faster and smaller")  # fmt: skip
    names.text(0, 1, "from the fastest to the smallest", fontsize=9, va="top", transform=names.transAxes)
    for number, each in enumerate(_apart(scale, frontier), 1):
        axes.annotate(f"{number}", scale.place(each), (-4, -4), textcoords="offset points", fontsize=9, ha="right",
                      va="top", weight="bold", zorder=6)  # fmt: skip
        case, recompute = each.case, recompute_words(each.case.settings.recompute)
        held, takes = scale.memory.with_name(each.fullest.total), scale.seconds.with_name(each.time.total)
        text = f"{number}  {layout_words(case)}\n     {case.micro_batch_size}×{case.num_micro_batches}, "
        text += f"recompute {recompute}\n     {held}, {takes}"
        names.text(0, 1.0 - 0.095 * number + 0.045, text, fontsize=8, va="top", transform=names.transAxes,
                   linespacing=1.15)  # fmt: skip


def _apart(scale: _Scale, frontier: Sequence[Estimate]) -> list[Estimate]:
    """Return the fastest, and others that are not on top of each other, the smallest among them where there is room."""
    chosen: list[Estimate] = []
    for each in sorted(frontier, key=lambda each: each.time.total):
        x, y = scale.share(each)
        if all(hypot(x - other_x, y - other_y) >= _APART for other_x, other_y in map(scale.share, chosen)):
            chosen.append(each)
    return spread(chosen, _MOST_NAMED)


def _finish(axes: Axes, scale: _Scale) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xlim(scale.left, scale.right)
    axes.set_yscale("log")
    axes.set_ylim(scale.bottom, scale.top)
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 1.5, 2, 3, 4, 5, 7)))
    axes.yaxis.set_minor_locator(LogLocator(10, subs=(1.2, 1.4, 1.6, 1.8, 2.5, 6, 8, 9)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.4g}"))
    wide = scale.top / scale.bottom > 1.8
    axes.yaxis.set_minor_formatter(NullFormatter() if wide else FuncFormatter(lambda y, _: f"{y:,.4g}"))
    axes.set_xlabel(f"memory of the fullest device ({scale.memory.name})")
    axes.set_ylabel(f"time of a step ({scale.seconds.name})")
    axes.grid(alpha=0.25)
    axes.legend(loc="upper right", fontsize=8.5, framealpha=0.9)


_WIDTH, _ROW = 13.0, 0.42
# Pale for the first virtual stage, dark for the last.
_PALE_BLUE, _DARK_BLUE = (0.62, 0.78, 0.92), (0.10, 0.30, 0.55)
_PALE_ORANGE, _DARK_ORANGE = (0.99, 0.80, 0.55), (0.75, 0.36, 0.05)
_WAITING: dict[str, Any] = {"facecolor": "#f4f4f4", "hatch": "////", "edgecolor": "#cfcfcf"}
_ROOM_FOR_A_DIGIT = 0.085  # inches


def pipeline_figure(view: View, title: str) -> Figure:
    """Draw stages as rows, the first at the top; forward passes blue, backward passes orange, waiting hatched."""
    stages = len(view.drawn.stages)
    figure = new_figure(_WIDTH, 1.55 + _ROW * max(stages, 2))
    figure.suptitle(title, fontsize=11)
    lengths = [end - begin for begin, end in view.windows]
    panels: Sequence[Axes] = list(figure.subplots(1, len(lengths), sharey=True, squeeze=False, width_ratios=lengths)[0])
    unit = seconds_unit(view.begins[-1] + lengths[-1])
    vpp = 1 + max(slot.work.virtual_stage for slot in view.drawn.stages[0])
    for window, axes in enumerate(panels):
        _draw_window(axes, view, window, vpp, _WIDTH * 0.92 * lengths[window] / sum(lengths))
        axes.xaxis.set_major_formatter(lambda seconds, _: f"{seconds / unit.size:.6g}")
        axes.set_xlabel(f"time ({unit.name})")
    panels[0].set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    panels[0].set_ylim(stages - 0.5, -0.5)
    if len(panels) > 1:
        panels[0].set_title("begin", fontsize=9)
        panels[1].set_title("end", fontsize=9)
        panels[0].spines["right"].set_linestyle((0, (4, 4)))
        panels[1].spines["left"].set_linestyle((0, (4, 4)))
        panels[1].tick_params(axis="y", left=False)
    _legend(figure, vpp, waits=stages > 1)
    return figure


def _draw_window(axes: Axes, view: View, window: int, vpp: int, inches: float) -> None:
    begin, end = view.windows[window]
    per_second = inches / (end - begin)
    skipped = view.num_left_out if window else 0
    offset = view.begins[window] - begin  # from what is drawn to the real step
    for stage in range(len(view.drawn.stages)):
        axes.barh(stage, end - begin, left=begin + offset, height=0.86, linewidth=0, **_WAITING)
        slots = list(view.slots(stage, window))
        axes.barh(
            [stage] * len(slots), [slot.end - slot.start for slot in slots],
            left=[slot.start + offset for slot in slots], height=0.86,
            color=[_colour(slot.work.forward, slot.work.virtual_stage, vpp) for slot in slots],
            edgecolor="white", linewidth=0.5,
        )  # fmt: skip
        for slot in slots:
            label = f"{slot.work.micro_batch + skipped + 1}"
            room = (slot.end - slot.start) * per_second
            inside = begin <= (slot.start + slot.end) / 2 <= end
            if inside and room >= _ROOM_FOR_A_DIGIT * len(label):
                dark = slot.work.virtual_stage > (vpp - 1) / 2
                axes.text((slot.start + slot.end) / 2 + offset, stage, label, ha="center", va="center",
                          fontsize=8 if room >= 1.5 * _ROOM_FOR_A_DIGIT * len(label) else 6,
                          color="white" if dark else "black", clip_on=True)  # fmt: skip
    axes.set_xlim(begin + offset, end + offset)


def _colour(forward: bool, virtual: int, vpp: int) -> tuple[float, float, float]:
    pale, dark = (_PALE_BLUE, _DARK_BLUE) if forward else (_PALE_ORANGE, _DARK_ORANGE)
    share = virtual / (vpp - 1) if vpp > 1 else 0.0
    red, green, blue = (a + (b - a) * share for a, b in zip(pale, dark, strict=True))
    return red, green, blue


def _legend(figure: Figure, vpp: int, *, waits: bool) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(
            color=_colour(forward, virtual, vpp),
            label=("forward" if forward else "backward") + ("" if vpp == 1 else f", virtual stage {virtual}"),
        )
        for forward in (True, False)
        for virtual in sorted({0, vpp - 1})
    ]
    if waits:
        handles.append(Patch(label="waiting", **_WAITING))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
