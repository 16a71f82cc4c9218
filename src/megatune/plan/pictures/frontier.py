"""Memory against time of all layouts as a picture: what fits, what does not, and which of them are worth choosing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, log
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatune.picture import new_figure, write
from megatune.plan.estimate import Estimate
from megatune.plan.pages.layouts import spread, worth_seeing
from megatune.plan.pages.units import Unit, bytes_unit, count, seconds_unit
from megatune.plan.pages.words import layout_words, machine_words, recompute_words
from megatune.plan.search import SearchResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_NAMED = 10
# Named dots are at least so far from each other, in parts of the picture's width and height.
_APART = 0.045
_BLUE, _ORANGE, _GREEN, _GREY, _RED = "#3b75af", "#e28b3d", "#4a9a5b", "#9aa0a6", "#c0392b"
_COLOURS = {"nothing": _BLUE, "some": _GREEN, "whole layers": _ORANGE}


def draw_frontier(result: SearchResult, path: Path, own: Estimate | None = None) -> None:
    """Write a PNG.

    Args:
        own: the plan of the user's own settings, marked.

    Raises:
        MegatuneError: CANNOT_WRITE.
    """
    write(frontier_figure(result, own), path)


def frontier_figure(result: SearchResult, own: Estimate | None = None) -> Figure:
    """Layouts as dots, what they recompute as colours, the frontier as a line; beside it the names of its layouts."""
    figure = new_figure(13, 6)
    axes, names = figure.subplots(1, 2, width_ratios=[3, 1.15])
    fitting = list({id(each): each for each in (*result.ranked, *worth_seeing(result.frontier))}.values())
    everything = [*fitting, *result.too_large, *([own] if own else [])]
    case = everything[0].case
    figure.suptitle(
        f"{case.model.name} on {machine_words(case.machine, case.world_size)}, "
        f"a global batch of {count(case.global_batch_size, 'row')} of {case.sequence_length:,} tokens",
        fontsize=11,
    )
    scale = _Scale.of([*fitting, *([own] if own else [])] if fitting else everything, everything)
    for name, colour in _COLOURS.items():
        _scatter(axes, scale, [each for each in fitting if _recomputed(each) == name], s=26, color=colour, alpha=0.65,
                 linewidth=0, label=f"recomputes {name}", zorder=2)  # fmt: skip
    _scatter(axes, scale, result.too_large, s=34, color=_GREY, marker="x", linewidth=1.2, label="too large", zorder=2)
    _scatter(axes, scale, [own] if own else [], s=190, color="black" if own and own.fits else _RED, marker="*",
             edgecolor="white", label="your settings", zorder=5)  # fmt: skip
    _draw_limit(axes, scale)
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


def _draw_limit(axes: Axes, scale: _Scale) -> None:
    """The device's memory, where it is near enough to be seen."""
    text = f"memory of the device: {scale.limit:,.4g} {scale.memory.name}"
    if scale.limit > scale.right:
        axes.text(0.99, 0.02, f"{text}, far to the right", transform=axes.transAxes, ha="right", color=_RED, fontsize=9)
        return
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
    """The fastest, and others that are not on top of each other, the smallest among them where there is room."""
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
