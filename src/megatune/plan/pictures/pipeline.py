"""The pipeline's schedule as a picture: who computes what when, and who waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatune.picture import new_figure, write
from megatune.plan.estimate import Estimate
from megatune.plan.pages.units import Unit, count, seconds_unit
from megatune.plan.pages.words import layout_words
from megatune.plan.pictures.windows import View, view_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _ROW = 13.0, 0.42
# Pale for the first virtual stage, dark for the last.
_PALE_BLUE, _DARK_BLUE = (0.62, 0.78, 0.92), (0.10, 0.30, 0.55)
_PALE_ORANGE, _DARK_ORANGE = (0.99, 0.80, 0.55), (0.75, 0.36, 0.05)
_WAITING: dict[str, Any] = {"facecolor": "#f4f4f4", "hatch": "////", "edgecolor": "#cfcfcf"}
_ROOM_FOR_A_DIGIT = 0.085  # inches


def draw_pipeline(estimate: Estimate, path: Path) -> None:
    """Write a PNG.

    Raises:
        MegatuneError: CANNOT_WRITE.
    """
    view = view_of(estimate)
    title = (
        f"{estimate.case.model.name}, {layout_words(estimate.case)}: a step of "
        f"{count(estimate.case.num_micro_batches, 'micro-batch').replace('batchs', 'batches')}. "
    )
    waits = f"Stages wait {view.bubble:.1%} of the time, the busiest of them {view.least_bubble:.1%}"
    title += waits if len(view.drawn.stages) > 1 else "One stage never waits"
    write(pipeline_figure(view, title), path)


def pipeline_figure(view: View, title: str) -> Figure:
    """Stages as rows, the first at the top; forward passes blue, backward passes orange, waiting hatched."""
    stages = len(view.drawn.stages)
    figure = new_figure(_WIDTH, 1.55 + _ROW * max(stages, 2))
    figure.suptitle(title, fontsize=11)
    lengths = [end - begin for begin, end in view.windows]
    panels: Sequence[Axes] = list(figure.subplots(1, len(lengths), sharey=True, squeeze=False, width_ratios=lengths)[0])
    unit = seconds_unit(view.begins[-1] + lengths[-1])
    vpp = 1 + max(slot.work.virtual_stage for slot in view.drawn.stages[0])
    for window, axes in enumerate(panels):
        _draw_window(axes, view, window, vpp, _WIDTH * 0.92 * lengths[window] / sum(lengths))
        axes.xaxis.set_major_formatter(_seconds_in(unit))
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


def _seconds_in(unit: Unit) -> Callable[[float, float], str]:
    """Labels of an axis in this unit."""
    return lambda seconds, _: f"{seconds / unit.size:.6g}"


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

    handles = []
    for forward, name in ((True, "forward"), (False, "backward")):
        ends = [0] if vpp == 1 else [0, vpp - 1]
        for virtual in ends:
            which = "" if vpp == 1 else f", virtual stage {virtual}"
            handles.append(Patch(color=_colour(forward, virtual, vpp), label=f"{name}{which}"))
    if waits:
        handles.append(Patch(label="waiting", **_WAITING))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
