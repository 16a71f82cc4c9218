"""Plots the losses of a run into training_loss.png, repeatedly while it runs."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatune.figure import as_png, new_figure
from megatune.training.callbacks.base import Callback, LogReport, TrainSummary
from megatune.training.callbacks.metrics import METRICS_NAME
from megatune.training.storage.files import read_json_lines, write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_NAME = "training_loss.png"
_MIN_INTERVAL = 30.0  # seconds
_FIELDS = {each.name for each in fields(LogReport)}  # all other keys of a record are metrics
_MAX_TIME_FRACTION = 0.01  # of a run's time
# Metrics of preference training and reinforcement learning with a large panel below the loss.
_LARGE_PANELS = ("reward", "rewards/accuracies", "rewards/margins", "accuracy", "margin")
_COLORS = ("tab:blue", "tab:orange")
_Series = tuple[list[int], list[float]]  # steps and values


class LossPlot(Callback):
    """Plots metrics.jsonl, including records before a resume, at most every 30 s and at the end of the run.

    Args:
        small: metrics with small panels; None for all.
    """

    def __init__(self, output_dir: Path, small: Collection[str] | None = None) -> None:
        self._small = small
        self._metrics = output_dir / METRICS_NAME
        self._image = output_dir / PLOT_NAME
        self._next = time.monotonic() + _MIN_INTERVAL

    def on_train_end(self, summary: TrainSummary) -> None:
        draw(self._metrics, self._image, self._small)

    def _draw_if_due(self, report: object) -> None:
        begin = time.monotonic()
        if begin >= self._next:
            draw(self._metrics, self._image, self._small)
            end = time.monotonic()
            self._next = end + max(_MIN_INTERVAL, (end - begin) / _MAX_TIME_FRACTION)

    on_log = on_evaluate = _draw_if_due

    def on_save(self, path: Path) -> None:
        self._draw_if_due(path)


def draw(metrics: Path, image: Path, only: Collection[str] | None = None) -> bool:
    """Plot losses, learning rate, gradient norm and metrics as a PNG; return whether there were any."""
    records = read_json_lines(metrics)
    bad = [record["step"] for record in records if "bad_step" in record]
    records = [record for record in records if "notice" not in record]
    loss, evaluation = _series(records, "loss"), _series(records, "eval_loss")
    if not loss[0] and not evaluation[0]:
        return False

    large = [name for name in _LARGE_PANELS if any(name in record for record in records)]
    small = _small_panels(records, large, only)
    rows = [list(small)[first : first + 2] for first in range(0, len(small), 2)]
    figure = new_figure(9 + 2 * bool(large), 5 + 1.5 * len(rows))
    from matplotlib.ticker import MaxNLocator

    top: list[Any] = [["loss", name] for name in large] or [["loss", "loss"]]
    mosaic = [*top, *([*row, row[-1]][:2] for row in rows)]
    heights = [*[2.6 / len(top)] * len(top), *[1] * len(rows)]
    axes = figure.subplot_mosaic(mosaic, height_ratios=heights)
    for number, step in enumerate(bad):
        label = "bad steps, not trained" if not number else ""
        axes["loss"].axvline(step, color="tab:red", alpha=0.4, linewidth=0.8, label=label)
    _draw_curves(axes["loss"], loss, evaluation, "training loss", "evaluation loss")
    axes["loss"].set_title("training loss")
    per = "trained tokens" if not large else "pairs" if len(large) > 1 else "answers"
    per = "responses" if "reward" in large else per
    axes["loss"].set_ylabel(f"loss (mean over {per})")
    is_filtered = any("reward_unfiltered" in record for record in records)
    kind = "training, groups that the filter keeps" if is_filtered else "training"
    for name in large:
        _draw_curves(axes[name], _series(records, name), _series(records, f"eval_{name}"), kind)
        axes[name].set_ylabel(name)
    for name, lines in small.items():
        for color, (label, series) in zip(_COLORS if len(lines) > 1 else ("tab:gray",), lines.items(), strict=False):
            axes[name].plot(*series, color=color, linewidth=1.2, marker="o" if len(series[0]) == 1 else "", label=label)
        values = [value for _, series in lines.values() for value in series]
        axes[name].set_ylabel(name)
        axes[name].set_ylim(bottom=min([0.0, *values]))
        if len(lines) > 1:
            axes[name].legend(frameon=False)
    for panel in axes.values():
        panel.set_xlabel("optimizer step")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(alpha=0.25)
    write_atomically(image, as_png(figure))
    return True


def _small_panels(
    records: list[dict[str, Any]], large: list[str], only: Collection[str] | None
) -> dict[str, dict[str, _Series]]:
    """Return the lines of each small panel by name. Both answers of a pair share a panel."""
    panels = {"learning rate": {"": _series(records, "learning_rate")}}
    panels["gradient norm"] = {"": _series(records, "grad_norm")}
    names = {key for record in records for key in record if not key.startswith("eval_")} - _FIELDS - {*large}
    for name in sorted(names if only is None else names & {*only}):
        if (series := _series(records, name))[0]:
            panel, _, answer = name.rpartition("/")
            panel, line = (panel, answer) if answer in ("chosen", "rejected") else (name, "")
            panels.setdefault(panel, {})[line] = series
    return panels


def smooth(values: list[float]) -> list[float]:
    """Smooth with exponentially decaying weights to both sides, over about a twentieth of the values."""
    decay = 1 - 1 / max(1.0, len(values) / 20)
    before, after = _decaying_sums(values, decay), _decaying_sums(values[::-1], decay)[::-1]
    return [
        (left + right - value) / (left_weight + right_weight - 1)
        for value, (left, left_weight), (right, right_weight) in zip(values, before, after, strict=True)
    ]


def _decaying_sums(values: list[float], decay: float) -> list[tuple[float, float]]:
    """Return for each value the sum of it and its predecessors weighted by decay ** distance, and of the weights."""
    sums, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = value + decay * total, 1 + decay * weight
        sums.append((total, weight))
    return sums


def _draw_curves(
    axes: Axes, training: _Series, evaluation: _Series, label: str, of_evaluation: str = "evaluation"
) -> None:
    steps, values = training
    marker = "o" if len(steps) < 30 else ""
    if len(steps) > 40:
        axes.plot(steps, values, color="tab:blue", alpha=0.3, linewidth=1, label=label)
        axes.plot(steps, smooth(values), color="tab:blue", linewidth=1.8, label=f"{label}, smoothed")
    elif steps:
        axes.plot(steps, values, color="tab:blue", marker=marker, markersize=3, linewidth=1.5, label=label)
    if evaluation[0]:
        axes.plot(*evaluation, color="tab:orange", marker="o", markersize=4, linewidth=1.5, label=of_evaluation)
    axes.legend(frameon=False)


def _series(records: list[dict[str, Any]], key: str) -> _Series:
    """Return the steps and finite values of a key."""
    points = [(record["step"], record[key]) for record in records if record.get(key) is not None]
    points = [(step, value) for step, value in points if math.isfinite(value)]
    return [step for step, _ in points], [value for _, value in points]
