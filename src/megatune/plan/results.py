"""Other results of `megatune plan`: the best layout as a file, figures, lines that start the run, calibration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatune.config.values import counted
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.figure import as_png, new_figure
from megatune.plan.answer import Answer
from megatune.plan.estimate import Estimate
from megatune.plan.launch import JOB_FILES, job_file, torchrun_lines, winner_yaml
from megatune.plan.options import PlanOptions
from megatune.plan.pages.tables import spread, worth_seeing
from megatune.plan.pages.words import (
    bytes_unit,
    describe_layout,
    describe_machine,
    describe_recompute,
    describe_row_length,
    seconds_unit,
)
from megatune.plan.schedule import timeline
from megatune.plan.search import SearchResult
from megatune.plan.uncertainty import memory_bound, safe_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


FRONTIER_NAME, TRACE_NAME = "plan_frontier.png", "plan_schedule.json"
_MOST_NAMED = 6
_MOST_PASSES = 100_000  # in a trace, which viewers can still open quickly
_NEAR = 1.4  # multiple of the device's memory; larger layouts would compress the figure
_COLOURS = {"nothing": "#3b75af", "some": "#4a9a5b", "whole layers": "#e28b3d"}
_GREY, _RED, _PURPLE = "#9aa0a6", "#c0392b", "#7b2d8b"


def write_results(found: Answer, options: PlanOptions) -> list[str]:
    """Write the requested files; return lines with their names, and the lines that start the run.

    Raises:
        MegatuneError: CANNOT_WRITE.
    """
    written: list[str] = []
    if options.figures is not None:
        for name, content in figures(found).items():
            written.append(_write_file(Path(options.figures) / name, content))
    if options.output is not None and found.best is not None:
        text = winner_yaml(found.best, found.question.origins, found.question.written)
        written.append(_write_file(Path(options.output), text.encode()))
    return [*(f"written: {path}" for path in written), *(_launch(found, options) if options.launch is not None else [])]


def _write_file(path: Path, content: bytes) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        finding = Finding("cannot write", str(path), error.strerror or str(error))
        raise MegatuneError(finding, ExitCode.CANNOT_WRITE) from error
    return str(path)


def _launch(found: Answer, options: PlanOptions) -> list[str]:
    chosen = (found.own if options.output is None else None) or found.best
    if chosen is None:
        return []
    file = options.output or found.question.file or "best.yaml"
    if options.launch in JOB_FILES:
        command, text = JOB_FILES[options.launch], job_file(options.launch, chosen.case, file)
        if options.launch_file is not None:
            return [f"written: {_write_file(Path(options.launch_file), text.encode())}, for {command}"]
        return ["", f"# A file for {command}", text]
    lines = torchrun_lines(chosen.case, file)
    if len(lines) == 1:
        return ["", *lines]
    return [part for rank, line in enumerate(lines) for part in ("", f"# On machine {rank}", line)]


def show_calibration(options: PlanOptions) -> None:
    """Fit factors to measured runs, print the errors before and after, and store the factors for later plans.

    Raises:
        MegatuneError: INPUT if plans without factors are more accurate.
    """
    from megatune.plan.calibration import calibrate
    from megatune.plan.catalogue.own import calibration_path, write_calibration

    report = calibrate(options.calibrate)
    path = Path(options.calibration) if options.calibration else calibration_path(report.device)
    print("\n".join(report.lines()))
    if not report.calibration.num_runs:
        what, fix = "no factors are written: plans are more accurate without them", "give more runs, of several sizes"
        raise MegatuneError(Finding(what, why="the fit is refused, see above", fix=fix), ExitCode.INPUT)
    write_calibration(report.calibration, path, report.device)
    print(f"written: {path}; plans for {report.device} use it" + (" with --calibration" if options.calibration else ""))


# --- figures: memory and time as a PNG, and the schedule as a trace for Perfetto -------------------------------------


def figures(found: Answer) -> dict[str, bytes]:
    """Return the figures of an answer by file name: all layouts, and the schedule of the plan."""
    files = {}
    if found.result.ranked or found.result.too_large or found.own is not None:
        files[FRONTIER_NAME] = as_png(frontier_figure(found.result, found.own, found.recommended))
    if (planned := found.own or found.best) is not None:
        files[TRACE_NAME] = json.dumps(schedule_trace(planned)).encode()
    return files


def frontier_figure(result: SearchResult, own: Estimate | None = None, recommended: Estimate | None = None) -> Figure:
    """Draw layouts as dots coloured by recomputation, the frontier as a line with names, the recommended layout and the
    user's own."""
    frontier, mine = worth_seeing(result.frontier), [own] if own else []
    fitting = list({id(each): each for each in (*result.ranked, *frontier)}.values())
    limit = (fitting or mine or result.too_large)[0].case.machine.device.memory
    near = [each for each in result.too_large if not fitting or each.fullest.total < _NEAR * limit]
    everything = [*fitting, *mine, *near]
    case, largest = everything[0].case, max(each.fullest.total for each in everything)
    memory, time = bytes_unit(largest), seconds_unit(min(each.time.total for each in everything))

    figure = new_figure(11, 6)
    axes = figure.subplots()
    rows = f"a global batch of {counted(case.global_batch_size, 'row')} of {describe_row_length(case)}"
    axes.set_title(f"{case.model.name} on {describe_machine(case.machine, case.world_size)}, {rows}", fontsize=10)

    def dots(estimates: Sequence[Estimate], label: str, **style: Any) -> None:
        places = [(each.fullest.total / memory.size, each.time.total / time.size) for each in estimates]
        if places:
            axes.plot(*zip(*places, strict=True), label=label, **{"marker": "o", "linestyle": "", **style})

    for name, colour in _COLOURS.items():
        same = [each for each in fitting if _recomputed(each) == name]
        dots(same, f"recomputes {name}", color=colour, alpha=0.65)
    dots(near, "too large", color=_GREY, marker="x")
    dots(mine, "your settings", color="black" if own and own.fits else _RED, marker="*", markersize=14)
    if recommended is not None:
        label = f"recommended: {describe_layout(recommended.case)}"
        dots([recommended], label, color=_PURPLE, marker="D", markersize=13, markerfacecolor="none")
    line = {"linestyle": "-", "drawstyle": "steps-post", "markerfacecolor": "none", "color": "black"}
    dots(frontier, "no other is faster and smaller", **line)
    for each in spread(frontier, _MOST_NAMED):
        place = (each.fullest.total / memory.size, each.time.total / time.size)
        axes.annotate(describe_layout(each.case), place, (4, 4), textcoords="offset points", fontsize=8)
    if 3 * largest > limit:
        sure, most = safe_bytes(case) / memory.size, limit / memory.size
        more = f"runs hold up to {memory_bound(case):.0%} more than planned"
        axes.axvspan(sure, most, color=_COLOURS["whole layers"], alpha=0.06, label=f"tight: {more}")
        axes.axvline(most, color=_RED, linestyle="--", label=f"memory of the device: {memory.with_name(limit)}")
    axes.set_yscale("log")
    for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        set_formatter(lambda value, _: f"{value:,.4g}")
    axes.set_xlabel(f"memory of the fullest device ({memory.name})")
    axes.set_ylabel(f"time of a step ({time.name})")
    axes.grid(alpha=0.25)
    axes.legend(loc="upper right", fontsize=8.5, framealpha=0.9, markerscale=0.7)
    return figure


def _recomputed(estimate: Estimate) -> str:
    words = describe_recompute(estimate.case.settings.recompute)
    return "nothing" if words == "none" else "whole layers" if words.startswith(("full", "block")) else "some"


def schedule_trace(planned: Estimate) -> dict[str, Any]:
    """Return the passes of every stage in Chrome's trace format, with a process for each stage.

    If a step has too many passes, only its first micro-batches are simulated, in whole rounds of the stages.
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
                details = {"micro_batch": work.micro_batch + 1, "virtual_stage": work.virtual_stage}
                yield {"ph": "X", "name": f"{kind} {work.micro_batch + 1}", "cat": kind, "pid": stage, "tid": 0,
                       "ts": 1e6 * start, "dur": 1e6 * (end - start), "args": details}  # fmt: skip

    about = {"layout": describe_layout(planned.case), "micro_batches": count, "simulated_micro_batches": drawn}
    return {"traceEvents": list(events()), "displayTimeUnit": "ms", "otherData": about}
