"""Compute, print and plot the statistics of `megatune data stats`: rows, lengths, tokens, padding and steps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatune.config.model import open_changed
from megatune.config.values import counted
from megatune.data.order import PreparedSteps, steps_per_epoch
from megatune.data.report import DataReport, DatasetReport, LengthReport, adapter_of
from megatune.data.rows import Arrangement, TokenRows
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import load_architecture
from megatune.figure import new_figure, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from transformers import PreTrainedTokenizerBase

    from megatune.config.settings import Settings
    from megatune.data.prepare import Prepared

FILL_BINS = 20
_BAR = 40  # columns of the longest bar
_MOST_BARS = 12
_BLUE, _ORANGE, _GREY, _RED = "#3b75af", "#e28b3d", "#9aa0a6", "#c0392b"


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a run.

    Attributes:
        world_size: number of processes.
        world_from: "num_processes", or "smallest" for the fewest that hold the model.
        data_parallel_size: number of data-parallel replicas.
        global_batch_size: rows per step.
        tokens_per_step: mean number of tokens without padding.
        total: number of steps of the run.
        epochs: number of epochs in these steps.
        computed: tokens of the batches of epoch 0, padding included.
    """

    world_size: int
    world_from: str
    data_parallel_size: int
    micro_batch_size: int
    accumulation: int
    global_batch_size: int
    per_epoch: int
    tokens_per_step: float
    total: int
    epochs: float
    computed: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """The statistics that `megatune data stats` reports.

    Attributes:
        fill: int [FILL_BINS], histogram in equal bins from 0 to 1: packed rows by how full they are, or, without
            packing, the steps of epoch 0 by the share of tokens in their batches that are not padding.
        dataset_tokens: tokens per epoch of each data set of `dataset`, copies included.
        tokenizer_size: vocabulary size of the tokenizer.
        vocab_size: rows of the model's embedding; None if the model's config cannot be read.
        directory: the folder of the prepared rows.
    """

    stage: str
    template: str | None
    cutoff_len: int
    arrangement: Arrangement
    report: DataReport
    steps: Steps
    fill: tuple[int, ...]
    dataset_tokens: tuple[int, ...]
    tokenizer_size: int
    vocab_size: int | None
    directory: str

    @property
    def is_packed(self) -> bool:
        """Whether rows hold several packed samples."""
        return self.report.train.capacity is not None

    @property
    def padding_share(self) -> float:
        """Share of computed tokens that are padding, in epoch 0."""
        return 1 - self.report.train.tokens / self.steps.computed

    @property
    def largest_id(self) -> int:
        """The largest token id of all rows."""
        return max(part.largest_id for part in (self.report.train, self.report.evaluation) if part is not None)

    def to_json(self) -> str:
        """Return one JSON object, with the names of the attributes."""
        own: dict[str, Any] = adapter_of(Statistics).dump_python(self, mode="json")
        own |= {"padding_share": self.padding_share, "largest_id": self.largest_id}
        if self.is_packed:
            own["packing_efficiency"] = self.report.train.packing_efficiency
        return json.dumps(own, ensure_ascii=False, indent=2)


def describe(settings: Settings, tokenizer: PreTrainedTokenizerBase, prepared: Prepared) -> Statistics:
    """Compute the statistics of prepared rows, for the parallel layout of the settings."""
    parallel, batch, run = settings.parallel, settings.batch, settings.run
    world_size = run.num_processes or parallel.smallest_world
    data_parallel_size = max(1, world_size // parallel.model_parallel_size)
    per_device, accumulation = batch.per_device_train_batch_size, batch.gradient_accumulation_steps
    global_batch_size = per_device * accumulation * data_parallel_size
    rows, tokens = prepared.train, prepared.report.train.tokens
    per_epoch = steps_per_epoch(len(rows), global_batch_size)
    optimizer = settings.optimizer
    total = optimizer.max_steps if optimizer.max_steps > 0 else ceil(optimizer.num_train_epochs * per_epoch)
    real, computed = step_tokens(settings, rows, data_parallel_size)
    capacity = prepared.report.train.capacity
    fill = real / computed if capacity is None else rows.row_lengths() / capacity
    counts, _ = np.histogram(np.minimum(fill, 1.0), bins=FILL_BINS, range=(0, 1))
    return Statistics(
        stage=run.stage,
        template=None if run.stage == "pt" else settings.data.template or "of the tokenizer",
        cutoff_len=settings.data.cutoff_len,
        arrangement=rows.arrangement,
        report=prepared.report,
        steps=Steps(
            world_size=world_size,
            world_from="num_processes" if run.num_processes else "smallest",
            data_parallel_size=data_parallel_size,
            micro_batch_size=per_device,
            accumulation=accumulation,
            global_batch_size=global_batch_size,
            per_epoch=per_epoch,
            tokens_per_step=tokens / per_epoch,
            total=total,
            epochs=total / per_epoch,
            computed=int(computed.sum()),
        ),
        fill=tuple(counts.tolist()),
        dataset_tokens=_tokens_by_dataset(rows, prepared.report.datasets[: len(settings.data.dataset)]),
        tokenizer_size=len(tokenizer),
        vocab_size=_vocab_size(settings),
        directory=str(prepared.directory),
    )


def step_tokens(settings: Settings, rows: TokenRows, data_parallel_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Count tokens without and with padding of every step of epoch 0, over all ranks: int64 [steps] each.

    As in `data.batches.Collator`, packed rows of a micro-batch are joined, and other rows are padded to the longest
    document.
    """
    parallel, size = settings.parallel, settings.batch.per_device_train_batch_size
    micro_batches = settings.batch.gradient_accumulation_steps * data_parallel_size
    real, needed, documents = _row_sizes(rows, parallel.document_multiple)
    prepared = PreparedSteps.from_settings(rows, settings, size * micro_batches)
    steps = prepared.steps_per_epoch
    order = np.concatenate([prepared.row_ids(step) for step in range(steps)])
    filled = np.full(steps * micro_batches * size, -1)  # slots beyond the rows of the last batch stay empty
    filled[: len(order)] = order
    slots = filled.reshape(steps, micro_batches, size)
    taken = np.where(slots < 0, 0, needed[slots])
    lengths = np.maximum(taken.sum(axis=2) if rows.is_packed else taken.max(axis=2), 1)  # [steps, micro_batches]
    multiple = parallel.sequence_multiple
    lengths = -(-lengths // multiple) * multiple
    if parallel.pipeline_model_parallel_size > 1:  # pipeline stages need one shape
        lengths[:] = lengths.max(axis=1, keepdims=True)
    sequences = 1 if rows.is_packed else size * documents
    return np.where(slots < 0, 0, real[slots]).sum(axis=(1, 2)), lengths.sum(axis=1) * sequences


def _row_sizes(rows: TokenRows, multiple: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the tokens of each row, the length that it needs in a micro-batch, and the documents per row, 1 if
    packed."""
    real = rows.row_lengths()
    if rows.arrangement == "pairs":
        return real, rows.batch_lengths(), 2
    if rows.is_packed and multiple > 1:
        padded = (int((-(-rows.document_lengths([row]) // multiple) * multiple).sum()) for row in range(len(rows)))
        return real, np.fromiter(padded, dtype=np.int64, count=len(rows)), 1
    return real, real, 1


def _tokens_by_dataset(rows: TokenRows, datasets: Sequence[DatasetReport]) -> tuple[int, ...]:
    """Sum tokens by data set, which follows from a document's position in tokens.npy."""
    spans = rows.spans
    ends = np.cumsum([dataset.tokens for dataset in datasets])
    which = np.searchsorted(ends, spans[:, 0], side="right")
    tokens = np.bincount(which, weights=spans[:, 1] - spans[:, 0], minlength=len(datasets))
    return tuple(int(count) for count in tokens)


def _vocab_size(settings: Settings) -> int | None:
    model = settings.model
    assert model.model_name_or_path is not None
    try:
        folder = open_changed(settings, model.model_name_or_path, model.model_revision).config_dir()
        return load_architecture(folder).vocab_size
    except MegatuneError:
        return None


def refuse_streaming(settings: Settings) -> None:
    """Refuse streamed data (exit code 64), which is not prepared before training."""
    if settings.data.streaming:
        why = "it prepares and counts all rows, and streamed ones are read while training"
        fix = "write streaming=false, and max_samples=10000 for the first rows of each data set"
        raise MegatuneError(Finding("data stats does not support streaming: true", why=why, fix=fix), ExitCode.SETTINGS)


def lines(statistics: Statistics) -> Iterator[str]:
    """Yield the statistics as lines for a terminal."""
    report = statistics.report
    template = f", template {statistics.template}" if statistics.template else ""
    yield f"stage {statistics.stage}{template}, cutoff_len {statistics.cutoff_len:,}"
    yield ""
    yield from report.dataset_lines(statistics.dataset_tokens)
    if report.lengths is not None:
        yield ""
        handling = ", split without loss" if statistics.stage == "pt" and report.lengths.over else ""
        yield from _lengths(report.lengths, handling)
    yield ""
    yield from (f"{name:<11}  {value}" for name, value in _epoch(statistics))
    yield from (f"note: {note}" for note in report.notes)


def _lengths(lengths: LengthReport, handling: str) -> Iterator[str]:
    """Yield a line for each bin, and one at cutoff_len; `handling` is what is done with longer samples."""
    yield f"tokens of a sample before cutting: {lengths.samples:,} samples"
    width, most = len(f"{lengths.edges[-1]:,}"), max(lengths.counts)
    for (low, high), count in zip(pairwise(lengths.edges), lengths.counts, strict=True):
        bar = "█" * ceil(count * _BAR / most)
        yield f"  {low + 1:>{width},} to {high:>{width},}  {bar:<{_BAR}}  {count:,}".rstrip()
        if high == lengths.cutoff_len and high != lengths.edges[-1]:
            yield f"  {'cutoff_len ':╌<{2 * width + 4 + _BAR + 8}}"
    yield (
        f"  mean {lengths.mean:,.0f}, p50 {lengths.p50:,}, p90 {lengths.p90:,}, p99 {lengths.p99:,}, "
        f"longest {lengths.longest:,}; {lengths.over:,} ({lengths.share_over:.1%}) over cutoff_len{handling}"
    )


def _epoch(statistics: Statistics) -> Iterator[tuple[str, str]]:
    train, steps = statistics.report.train, statistics.steps
    rows = f"{train.rows:,}" + (" pairs of a chosen and a rejected answer" if statistics.arrangement == "pairs" else "")
    if statistics.is_packed:
        sample = "pair" if statistics.arrangement == "packed_pairs" else "sample"
        packed = f"{counted(train.samples, sample)} packed into {counted(train.rows, 'row')}"
        rows = f"{packed} of up to {train.capacity:,} tokens, {train.packing_efficiency:.1%} full"
    yield "rows", rows
    if train.answer_counts:
        yield "answers", train.answer_counts
    yield "tokens", _tokens(train.tokens, train.trained)
    if media := train.media.describe():
        yield "media", f"{media}; {train.media.tokens / train.tokens:.1%} of all tokens"
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
    """Plot the statistics to a PNG.

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
    """Plot samples by length, and the share of samples up to each length."""
    lengths = statistics.report.lengths
    axes.set(title="length of samples before cutting", xlabel="length (tokens)", ylabel="samples")
    if lengths is None:
        return
    edges, counts = np.asarray(lengths.edges, dtype=float), np.asarray(lengths.counts)
    is_wide = len(edges) > 2 and edges[-1] - edges[-2] > 2 * (edges[1] - edges[0])
    if is_wide:  # the last bin has all longer samples: draw it as wide as the others, and hatched
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
    """Plot the tokens of an epoch by data set."""
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
    """Plot the share of tokens that are not padding, of packed rows or of batches."""
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
