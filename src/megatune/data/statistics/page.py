"""Statistics in words and bars, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil

from megatune.data.lengths import LengthReport
from megatune.data.report import DatasetReport, TokenReport, table
from megatune.data.rows import Arrangement
from megatune.data.statistics.counts import Statistics

_BAR = 40  # columns of the longest bar


def lines(statistics: Statistics) -> Iterator[str]:
    """Write the statistics in words, for a terminal."""
    report = statistics.report
    template = f", template {statistics.template}" if statistics.template else ""
    yield f"stage {statistics.stage}{template}, cutoff_len {statistics.cutoff_len:,}"
    yield ""
    yield from _datasets(report.datasets, statistics.dataset_tokens)
    if report.lengths is not None:
        yield ""
        fate = ", cut to pieces without loss" if statistics.stage == "pt" and report.lengths.over else ""
        yield from _lengths(report.lengths, fate)
    yield ""
    yield from (f"{name:<11}  {value}" for name, value in _epoch(statistics))
    yield from (f"note: {note}" for note in report.notes)


def _datasets(datasets: Sequence[DatasetReport], tokens: Sequence[int]) -> Iterator[str]:
    head = ("data set", "rows read", "trained", "held out", "dropped", "cut", "samples an epoch", "tokens an epoch")
    untrained = [0] * (len(datasets) - len(tokens))  # those that are only evaluated on come last
    rows = [
        (
            d.name,
            *(f"{n:,}" for n in (d.read, d.trained, d.evaluation, d.dropped.total(), d.truncated, d.samples, count)),
        )
        for d, count in zip(datasets, [*tokens, *untrained], strict=True)
    ]
    yield from table(head, rows)
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
    yield "rows", _rows(train, statistics.arrangement)
    yield "tokens", _tokens(train.tokens, train.trained)
    padding = f"{statistics.padding_share:.1%} of the {steps.computed:,} tokens that the batches of an epoch have"
    yield "padding", padding
    batch = f"{steps.micro_batch_size} a micro-batch × {steps.accumulation} accumulated × {steps.data_parallel_size}"
    size = f"{_count(steps.global_batch_size, 'row')} = {batch} data-parallel"
    yield "step", f"{size}, about {steps.tokens_per_step:,.0f} tokens"
    fewest = "the fewest that hold the model; set num_processes"
    yield "processes", f"{steps.world_size} ({'num_processes' if steps.world_from == 'num_processes' else fewest})"
    yield "epoch", _count(steps.per_epoch, "step")
    tokens = f"about {steps.tokens_per_step * steps.total:,.0f} tokens"
    yield "run", f"{_count(steps.total, 'step')}, {steps.epochs:.4g} epochs, {tokens}"
    yield "largest id", _vocabulary(statistics)
    if (evaluation := statistics.report.evaluation) is not None:
        yield "held out", f"{_count(evaluation.rows, 'row')}, tokens {_tokens(evaluation.tokens, evaluation.trained)}"
    yield "prepared in", statistics.directory


def _rows(train: TokenReport, arrangement: Arrangement) -> str:
    if arrangement == "packed":
        return (
            f"{_count(train.samples, 'sample')} packed into {_count(train.rows, 'row')} of up to {train.capacity:,} "
            f"tokens, {train.packing_efficiency:.1%} full"
        )
    return f"{train.rows:,}" + (" pairs of a chosen and a rejected answer" if arrangement == "pairs" else "")


def _tokens(tokens: int, trained: int) -> str:
    return f"{tokens:,}, {trained:,} of them trained ({trained / max(1, tokens):.1%})"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _vocabulary(statistics: Statistics) -> str:
    largest, model = statistics.largest_id, statistics.vocab_size
    said = f"{largest:,}; the tokenizer knows {statistics.tokenizer_size:,} tokens"
    if model is None:
        return said
    return f"{said}, the model {model:,}" + (": BEYOND THE MODEL'S VOCABULARY" if largest >= model else "")
