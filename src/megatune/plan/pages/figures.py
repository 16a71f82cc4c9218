"""Memory against time as a PNG, and the schedule of a step as a trace that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatune.config.values import counted
from megatune.picture import as_png, new_figure
from megatune.plan.estimate import Estimate
from megatune.plan.pages.tables import spread, worth_seeing
from megatune.plan.pages.words import bytes_unit, layout_words, machine_words, recompute_words, row_words, seconds_unit
from megatune.plan.schedule import timeline
from megatune.plan.search import SearchResult
from megatune.plan.uncertainty import memory_bound, safe_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from megatune.plan.answer import Answer

FRONTIER_NAME, TRACE_NAME = "plan_frontier.png", "plan_schedule.json"
_MOST_NAMED = 10
_MOST_PASSES = 100_000  # of a trace, which viewers still open at once
_NEAR = 1.4  # times the device's memory; larger layouts would press the others together
_COLOURS = {"nothing": "#3b75af", "some": "#4a9a5b", "whole layers": "#e28b3d"}
_GREY, _RED, _PURPLE = "#9aa0a6", "#c0392b", "#7b2d8b"


def figures(found: Answer) -> dict[str, bytes]:
    """Return the files that an answer has, by name: all layouts, and the schedule of what was planned."""
    files = {}
    if found.result.ranked or found.result.too_large or found.own is not None:
        files[FRONTIER_NAME] = as_png(frontier_figure(found.result, found.own, found.recommended))
    if (planned := found.own or found.best) is not None:
        files[TRACE_NAME] = json.dumps(schedule_trace(planned)).encode()
    return files


def frontier_figure(result: SearchResult, own: Estimate | None = None, recommended: Estimate | None = None) -> Figure:
    """Draw layouts as dots coloured by what they recompute, the frontier as a line and its names next to it, what is
    recommended, and the user's own."""
    frontier, mine = worth_seeing(result.frontier), [own] if own else []
    fitting = list({id(each): each for each in (*result.ranked, *frontier)}.values())
    limit = (fitting or mine or result.too_large)[0].case.machine.device.memory
    near = [each for each in result.too_large if not fitting or each.fullest.total < _NEAR * limit]
    everything = [*fitting, *mine, *near]
    case, largest = everything[0].case, max(each.fullest.total for each in everything)
    memory, time = bytes_unit(largest), seconds_unit(min(each.time.total for each in everything))

    figure = new_figure(13, 6)
    axes, names = figure.subplots(1, 2, width_ratios=[3, 1.15])
    rows = f"a global batch of {counted(case.global_batch_size, 'row')} of {row_words(case)}"
    figure.suptitle(f"{case.model.name} on {machine_words(case.machine, case.world_size)}, {rows}", fontsize=11)

    def places(estimates: Sequence[Estimate]) -> list[tuple[float, float]]:
        return [(each.fullest.total / memory.size, each.time.total / time.size) for each in estimates]

    def dots(estimates: Sequence[Estimate], **how: Any) -> None:
        if estimates:
            axes.scatter(*zip(*places(estimates), strict=True), **how)

    for name, colour in _COLOURS.items():
        dots([each for each in fitting if _recomputed(each) == name], s=26, color=colour, alpha=0.65,
             label=f"recomputes {name}")  # fmt: skip
    dots(near, s=34, color=_GREY, marker="x", label="too large")
    dots(mine, s=190, color="black" if own and own.fits else _RED, marker="*", label="your settings", zorder=5)
    if recommended is not None:
        dots([recommended], s=210, facecolor="none", edgecolor=_PURPLE, marker="D", linewidth=2.2,
             label=f"recommended: {layout_words(recommended.case)}", zorder=6)  # fmt: skip
    if frontier:
        axes.plot(*zip(*places(frontier), strict=True), "o-", color="black", markerfacecolor="none", linewidth=1.0,
                  drawstyle="steps-post", zorder=3, label="no other is faster and smaller")  # fmt: skip
    if 3 * largest > limit:
        sure, most = safe_bytes(case) / memory.size, limit / memory.size
        more = f"runs hold up to {memory_bound(case):.0%} more than planned"
        axes.axvspan(sure, most, color=_COLOURS["whole layers"], alpha=0.06, label=f"tight: {more}")
        axes.axvline(most, color=_RED, linestyle="--", label=f"memory of the device: {memory.with_name(limit)}")
    _name(axes, names, frontier, places)
    axes.set_yscale("log")
    for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        set_formatter(lambda value, _: f"{value:,.4g}")
    axes.set_xlabel(f"memory of the fullest device ({memory.name})")
    axes.set_ylabel(f"time of a step ({time.name})")
    axes.grid(alpha=0.25)
    axes.legend(loc="upper right", fontsize=8.5, framealpha=0.9, markerscale=0.7)
    return figure


def _name(axes: Axes, names: Axes, frontier: Sequence[Estimate], places: Any) -> None:
    """Number some layouts of the frontier, and name them next to the picture."""
    names.set_axis_off()
    if not frontier:
        return
    names.text(0, 1, "from the fastest to the smallest", fontsize=9, va="top", transform=names.transAxes)
    named = spread(sorted(frontier, key=lambda each: each.time.total), _MOST_NAMED)
    for number, (each, place) in enumerate(zip(named, places(named), strict=True), 1):
        axes.annotate(f"{number}", place, (-4, -4), textcoords="offset points", fontsize=9, ha="right", va="top")
        case, held, takes = each.case, each.fullest.total, each.time.total
        text = f"{number}  {layout_words(case)}\n     {case.micro_batch_size}×{case.num_micro_batches}, "
        text += f"recompute {recompute_words(case.settings.recompute)}\n     "
        text += f"{bytes_unit(held).with_name(held)}, {seconds_unit(takes).with_name(takes)}"
        names.text(0, 1.045 - 0.095 * number, text, fontsize=8, va="top", transform=names.transAxes, linespacing=1.15)


def _recomputed(estimate: Estimate) -> str:
    words = recompute_words(estimate.case.settings.recompute)
    return "nothing" if words == "none" else "whole layers" if words.startswith(("full", "block")) else "some"


def schedule_trace(planned: Estimate) -> dict[str, Any]:
    """Return the passes of every stage in Chrome's format of traces, each stage a process.

    Of a step with very many passes the first micro-batches are simulated, in whole rounds of the stages.
    """
    chunks, count = planned.time.chunks, planned.case.num_micro_batches
    stages = len(chunks)
    most = max(_MOST_PASSES // (2 * stages * len(chunks[0])) // stages, 2) * stages
    drawn = min(count, most)

    def events() -> Iterator[dict[str, Any]]:
        for stage, slots in enumerate(timeline(chunks, drawn)):
            yield {"ph": "M", "name": "process_name", "pid": stage, "args": {"name": f"stage {stage}"}}
            for work, start, end in slots:
                kind = "forward" if work.forward else "backward"
                said = {"micro_batch": work.micro_batch + 1, "virtual_stage": work.virtual_stage}
                yield {"ph": "X", "name": f"{kind} {work.micro_batch + 1}", "cat": kind, "pid": stage, "tid": 0,
                       "ts": 1e6 * start, "dur": 1e6 * (end - start), "args": said}  # fmt: skip

    about = {"layout": layout_words(planned.case), "micro_batches": count, "simulated_micro_batches": drawn}
    return {"traceEvents": list(events()), "displayTimeUnit": "ms", "otherData": about}
