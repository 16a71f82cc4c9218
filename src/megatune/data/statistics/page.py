"""Statistics in words and bars, for a terminal; and as a picture: lengths, data sets, how full rows or batches are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatune.data.report import DatasetReport, LengthReport, counted, table
from megatune.data.statistics.counts import FILL_BINS, Statistics
from megatune.picture import new_figure, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BAR = 40  # columns of the longest bar
_MOST_BARS = 12
_BLUE, _ORANGE, _GREY, _RED = "#3b75af", "#e28b3d", "#9aa0a6", "#c0392b"


def lines(statistics: Statistics) -> Iterator[str]:
    """Write the statistics in words, for a terminal."""
    report = statistics.report
    template = f", template {statistics.template}" if statistics.template else ""
    yield f"stage {statistics.stage}{template}, cutoff_len {statistics.cutoff_len:,}"
    yield ""
    yield from _datasets(report.datasets, statistics.dataset_tokens)
    if report.lengths is not None:
        yield ""
        fate = ", split without loss" if statistics.stage == "pt" and report.lengths.over else ""
        yield from _lengths(report.lengths, fate)
    yield ""
    yield from (f"{name:<11}  {value}" for name, value in _epoch(statistics))
    yield from (f"note: {note}" for note in report.notes)


def _datasets(datasets: Sequence[DatasetReport], tokens: Sequence[int]) -> Iterator[str]:
    head = ("data set", "rows read", "trained", "held out", "dropped", "cut", "samples an epoch", "tokens an epoch")
    untrained = [0] * (len(datasets) - len(tokens))  # those that are only evaluated on come last
    numbers = ((d.read, d.trained, d.evaluation, d.dropped.total(), d.truncated, d.samples) for d in datasets)
    columns = zip(datasets, numbers, [*tokens, *untrained], strict=True)
    yield from table(head, [(d.name, *(f"{n:,}" for n in (*row, count))) for d, row, count in columns])
    for dataset in datasets:
        for reason, count in dataset.dropped.most_common():
            yield f"{dataset.name}: dropped {count:,}: {reason} [{dataset.codes[reason]}]"
        yield from (f"    {example}" for example in dataset.examples)


def _lengths(lengths: LengthReport, fate: str) -> Iterator[str]:
    """Write a line for each bin, and where cutoff_len is among them; `fate` is what is done with longer samples."""
    yield f"tokens of a sample before cutting: {lengths.samples:,} samples"
    width, most = len(f"{lengths.edges[-1]:,}"), max(lengths.counts)
    for (low, high), count in zip(pairwise(lengths.edges), lengths.counts, strict=True):
        bar = "█" * ceil(count * _BAR / most)
        yield f"  {low + 1:>{width},} to {high:>{width},}  {bar:<{_BAR}}  {count:,}".rstrip()
        if high == lengths.cutoff_len and high != lengths.edges[-1]:
            yield f"  {'cutoff_len ':╌<{2 * width + 4 + _BAR + 8}}"
    yield (
        f"  mean {lengths.mean:,.0f}, p50 {lengths.p50:,}, p90 {lengths.p90:,}, p99 {lengths.p99:,}, "
        f"longest {lengths.longest:,}; {lengths.over:,} ({lengths.share_over:.1%}) over cutoff_len{fate}"
    )


def _epoch(statistics: Statistics) -> Iterator[tuple[str, str]]:
    train, steps = statistics.report.train, statistics.steps
    rows = f"{train.rows:,}" + (" pairs of a chosen and a rejected answer" if statistics.arrangement == "pairs" else "")
    if statistics.is_packed:
        sample = "pair" if statistics.arrangement == "packed_pairs" else "sample"
        packed = f"{counted(train.samples, sample)} packed into {counted(train.rows, 'row')}"
        rows = f"{packed} of up to {train.capacity:,} tokens, {train.packing_efficiency:.1%} full"
    yield "rows", rows
    if train.judged:
        yield "answers", train.judged
    yield "tokens", _tokens(train.tokens, train.trained)
    if pictures := train.pictures.words():
        yield "pictures", f"{pictures}; {train.pictures.tokens / train.tokens:.1%} of all tokens"
    padding = f"{statistics.padding_share:.1%} of the {steps.computed:,} tokens that the batches of an epoch have"
    yield "padding", padding
    batch = f"{steps.micro_batch_size} a micro-batch × {steps.accumulation} accumulated × {steps.data_parallel_size}"
    size = f"{counted(steps.global_batch_size, 'row')} = {batch} data-parallel"
    yield "step", f"{size}, about {steps.tokens_per_step:,.0f} tokens"
    fewest = "the fewest that hold the model; set num_processes"
    yield "processes", f"{steps.world_size} ({'num_processes' if steps.world_from == 'num_processes' else fewest})"
    yield "epoch", counted(steps.per_epoch, "step")
    tokens = f"about {steps.tokens_per_step * steps.total:,.0f} tokens"
    yield "run", f"{counted(steps.total, 'step')}, {steps.epochs:.4g} epochs, {tokens}"
    largest, model = statistics.largest_id, statistics.vocab_size
    vocabulary = "" if model is None else f", the model {model:,}"
    if model is not None and largest >= model:
        vocabulary += ": BEYOND THE MODEL'S VOCABULARY"
    yield "largest id", f"{largest:,}; the tokenizer knows {statistics.tokenizer_size:,} tokens{vocabulary}"
    if (evaluation := statistics.report.evaluation) is not None:
        yield "held out", f"{counted(evaluation.rows, 'row')}, tokens {_tokens(evaluation.tokens, evaluation.trained)}"
    yield "prepared in", statistics.directory


def _tokens(tokens: int, trained: int) -> str:
    return f"{tokens:,}, {trained:,} of them trained ({trained / max(1, tokens):.1%})"


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
    names = [each.name if len(each.name) <= 24 else f"…{each.name[-23:]}" for _, each in shares]
    bars = [(name, count) for name, (count, _) in zip(names, shares, strict=True)]
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
    if statistics.is_packed:
        title = f"packed rows: {statistics.report.train.packing_efficiency:.1%} full"
        x, y = f"tokens in the row (% of {statistics.report.train.capacity:,})", "rows"
    else:
        title = f"batches: {statistics.padding_share:.1%} padding"
        x, y = "tokens that are not padding (% of a step's batches)", "steps of an epoch"
    axes.set(title=title, xlabel=x, ylabel=y)
