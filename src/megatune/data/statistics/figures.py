"""A picture of a run's data: lengths, data sets, and how full rows or batches are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatune.data.statistics.counts import FILL_BINS, Statistics
from megatune.picture import new_figure, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_BARS = 12
_BLUE, _ORANGE, _GREY, _RED = "#3b75af", "#e28b3d", "#9aa0a6", "#c0392b"


def draw(statistics: Statistics, path: Path) -> None:
    """Write a PNG.

    Raises:
        MegatuneError: CANNOT_WRITE.
    """
    figure = new_figure(10, 7)
    axes = figure.subplot_mosaic([["lengths", "lengths"], ["datasets", "fill"]], height_ratios=[1.3, 1])
    template = f", template {statistics.template}" if statistics.template else ""
    train = statistics.report.train
    figure.suptitle(
        f"stage {statistics.stage}{template}: {train.samples:,} samples, {train.tokens:,} tokens an epoch, "
        f"{train.trained / max(1, train.tokens):.0%} trained"
    )
    _draw_lengths(axes["lengths"], statistics)
    _draw_datasets(axes["datasets"], statistics)
    _draw_fill(axes["fill"], statistics)
    write(figure, path)


def _draw_lengths(axes: Axes, statistics: Statistics) -> None:
    """Draw samples by length, and the share of samples up to each length."""
    lengths = statistics.report.lengths
    axes.set(title="length of samples before cutting", xlabel="length (tokens)", ylabel="samples")
    if lengths is None:
        return
    edges, counts = np.asarray(lengths.edges, dtype=float), np.asarray(lengths.counts)
    is_wide = len(edges) > 2 and edges[-1] - edges[-2] > 2 * (edges[1] - edges[0])
    if is_wide:  # the last bin holds all the rest: as wide as the others, and hatched
        edges[-1] = edges[-2] + edges[1]
    bars = axes.bar(edges[:-1], counts, np.diff(edges), align="edge", color=_BLUE, edgecolor="white", linewidth=0.6)
    if is_wide:
        bars[-1].set_hatch("//")
        axes.set_xticks(edges[:-1], [f"{edge:,.0f}" for edge in edges[:-1]])
        axes.set_xticks([edges[-2] + edges[1] / 2], [f"\nup to {lengths.longest:,}"], minor=True)
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(0, max(counts) * 1.15)
    axes.grid(axis="y", alpha=0.25)
    share = axes.twinx()
    share.plot(edges, np.concatenate(([0], np.cumsum(counts))) / lengths.samples * 100, color=_ORANGE, marker=".")
    share.set_ylabel("samples up to this length (%)", color=_ORANGE)
    share.set_ylim(0, 115)
    share.set_yticks(range(0, 101, 20))
    if lengths.cutoff_len <= edges[-1]:
        axes.axvline(lengths.cutoff_len, color=_RED, linestyle="--", linewidth=1.3)
        on_left = lengths.cutoff_len > edges[-1] / 2
        share.annotate(
            f"cutoff_len {lengths.cutoff_len:,}: {lengths.share_over:.1%} are longer",
            (lengths.cutoff_len, 0.98), (-6 if on_left else 6, 0), xycoords=("data", "axes fraction"),
            textcoords="offset points", color=_RED, ha="right" if on_left else "left", va="top",
        )  # fmt: skip


def _draw_datasets(axes: Axes, statistics: Statistics) -> None:
    """Draw how much of an epoch each data set is."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    tokens = statistics.dataset_tokens
    shares = sorted(zip(tokens, statistics.report.datasets, strict=False), key=lambda pair: -pair[0])
    bars = [(_short(dataset.name), count) for count, dataset in shares]
    if len(bars) > _MOST_BARS:
        others = bars[_MOST_BARS - 1 :]
        bars = [*bars[: _MOST_BARS - 1], (f"{len(others)} others", sum(count for _, count in others))]
    places = range(len(bars))
    drawn = axes.barh(places, [count for _, count in bars], color=_BLUE, height=0.6)
    axes.bar_label(drawn, [f" {count / max(1, sum(tokens)):.1%}" for _, count in bars])
    axes.set_yticks(places, [name for name, _ in bars])
    axes.set_ylim(max(len(bars), 3) - 0.5, -0.5)
    axes.set_xlim(0, max(1, *tokens) * 1.2)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set(title="tokens of an epoch by data set", xlabel="tokens an epoch", ylabel="data set")
    axes.grid(axis="x", alpha=0.25)


def _draw_fill(axes: Axes, statistics: Statistics) -> None:
    """Draw how much of packed rows, or of batches, is tokens."""
    edges = np.linspace(0, 100, FILL_BINS + 1)
    axes.bar(edges[:-1], statistics.fill, np.diff(edges), align="edge", color=_GREY, edgecolor="white", linewidth=0.6)
    axes.set_xlim(0, 100)
    axes.grid(axis="y", alpha=0.25)
    if statistics.arrangement == "packed":
        title = f"packed rows: {statistics.report.train.packing_efficiency:.1%} full"
        x, y = f"tokens in the row (% of {statistics.cutoff_len:,})", "rows"
    else:
        title = f"batches: {statistics.padding_share:.1%} padding"
        x, y = "tokens that are no padding (% of a step's batches)", "steps of an epoch"
    axes.set(title=title, xlabel=x, ylabel=y)


def _short(name: str) -> str:
    return name if len(name) <= 24 else f"…{name[-23:]}"
