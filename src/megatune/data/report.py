"""Reports of data preparation: rows read, trained, held out and dropped, and their tokens."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pydantic import TypeAdapter

from megatune.config.values import counted
from megatune.data.bad_rows import TOO_LONG, RowError
from megatune.data.media_table import MediaCounts
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.config.groups.data import DataSettings

EXAMPLES_PER_REASON = 3
NOTABLE_CUT = 0.1  # share of truncated rows above which users are warned
_BY_LENGTH = (TOO_LONG, "nothing-left")
_MOST_BINS = 16
_BARS = "▁▂▃▄▅▆▇█"
HELD_OUT_COPY = "held-out-copy"
_LEFT_OUT = (TOO_LONG, HELD_OUT_COPY)  # codes of valid rows that are left out by the settings
_ALWAYS_ALLOWED = 10  # bad rows per data set that are allowed if max_bad_rows is a share
_NAMED_REASONS = 3


T = TypeVar("T")


@cache
def adapter_of(kind: type[T]) -> TypeAdapter[T]:
    """Return the JSON adapter of a dataclass, cached, since creating one takes milliseconds."""
    return TypeAdapter(kind)


@dataclass(slots=True)
class DatasetReport:
    """Row counts of one data set; every row read is trained, held out or dropped.

    Attributes:
        samples: samples per epoch, after num_samples, mixing and weights.
        truncated: rows cut to cutoff_len, among those trained or held out.
        tags_added: rows with images or videos without a tag, among those trained or held out.
        tokens: tokens of the rows trained or held out, each row once, after truncation; tokens.npy is ordered by data
            set.
        dropped: number of dropped rows by reason.
        codes: the code of each reason.
        examples: the first few dropped rows for each reason, with their places.
    """

    name: str
    read: int = 0
    trained: int = 0
    evaluation: int = 0
    samples: int = 0
    truncated: int = 0
    tokens: int = 0
    tags_added: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    codes: dict[str, str] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)

    def drop(self, where: str, error: RowError) -> None:
        """Count one dropped row."""
        self.dropped[error.reason] += 1
        self.codes[error.reason] = error.code
        if self.dropped[error.reason] <= EXAMPLES_PER_REASON:
            self.examples.append(f"{where}: {error}")

    def too_many_bad(self, most: float | None) -> Finding | None:
        """Return the finding for more bad rows than `max_bad_rows` allows; None if they are allowed."""
        bad = Counter({reason: n for reason, n in self.dropped.items() if self.codes[reason] not in _LEFT_OUT})
        if most is None or bad.total() <= (max(most * self.read, _ALWAYS_ALLOWED) if 0 < most < 1 else most):
            return None
        what = f"{self.name}: {bad.total():,} of {self.read:,} rows cannot be trained on, max_bad_rows is {most:g}"
        fix = "correct the rows (`megatune data preview` shows them), or raise max_bad_rows; null allows any number"
        return Finding(what, why=self._reasons(bad), fix=fix)

    def dropped_warning(self) -> str:
        """Return one line with the number of dropped rows, reasons and places; "" if there are none except copies of
        held-out rows."""
        lost = Counter({reason: n for reason, n in self.dropped.items() if self.codes[reason] != HELD_OUT_COPY})
        if not lost:
            return ""
        is_are = "is" if lost.total() == 1 else "are"
        return f"{self.name}: {lost.total():,} of {counted(self.read, 'row')} {is_are} dropped: {self._reasons(lost)}"

    def _reasons(self, dropped: Counter[str]) -> str:
        """Return the most frequent reasons, with the places of a few rows."""
        named = dropped.most_common(_NAMED_REASONS)
        reasons = [f"{count:,} x {reason} ({', '.join(self._places(reason))})" for reason, count in named]
        return "; ".join(reasons + [f"{len(dropped) - len(named)} more reasons"] * (len(dropped) > len(named)))

    def _places(self, reason: str) -> list[str]:
        return [place for each in self.examples for place, found, _ in [each.partition(f": {reason}")] if found]

    def dropped_lines(self) -> Iterator[str]:
        """Yield the number of dropped rows for each reason, and the first of them."""
        for reason, count in self.dropped.most_common():
            yield f"{self.name}: dropped {count:,}: {reason} [{self.codes[reason]}]"
        yield from (f"    {example}" for example in dict.fromkeys(self.examples))

    def tags_note(self) -> str:
        """Return a note about rows with images or videos without a tag; "" if there are none."""
        has = "1 row has images" if self.tags_added == 1 else f"{self.tags_added:,} rows have images"
        what = f"{self.name}: {has} or videos without a tag; tags are added in front of the first message"
        return what if self.tags_added else ""

    def leave_out(self, count: int, code: str, reason: str) -> None:
        """Count valid rows that are dropped."""
        if count:
            self.dropped[reason] += count
            self.codes[reason] = code


@dataclass(frozen=True, slots=True)
class TokenReport:
    """Counts of the token rows of training or evaluation.

    Attributes:
        samples: conversations, texts or pairs, counted with repeats.
        documents: one per sample, two per pair, or several for long texts that are split.
        rows: one per document or pair, or fewer with packing.
        capacity: maximum tokens of a packed row; None without packing.
        trained: tokens that contribute to the loss.
        longest: length of the longest document.
        largest_id: the largest token id, which must be in the model's vocabulary.
        desirable: samples with a desirable answer (stage kto); None in other stages.
    """

    samples: int = 0
    documents: int = 0
    rows: int = 0
    capacity: int | None = None
    tokens: int = 0
    trained: int = 0
    longest: int = 0
    largest_id: int = 0
    media: MediaCounts = field(default_factory=MediaCounts)
    desirable: int | None = None

    @property
    def answer_counts(self) -> str:
        """Numbers of desirable and undesirable answers for users; "" except in stage kto."""
        if self.desirable is None:
            return ""
        return f"{self.desirable:,} desirable and {self.samples - self.desirable:,} undesirable answers"

    @property
    def packing_efficiency(self) -> float:
        """Share of packed rows' capacity that is filled with tokens."""
        assert self.capacity is not None
        return self.tokens / (self.rows * self.capacity)

    def line(self) -> str:
        """Return the report as one line."""
        tokens = f"{self.tokens} tokens, {self.trained} of them trained"
        if media := self.media.describe():
            tokens += f"; {media}"
        if self.answer_counts:
            tokens += f"; {self.answer_counts}"
        if self.capacity is None:
            return f"{self.rows} token rows, {tokens}"
        return (
            f"{self.samples} samples packed into {self.rows} rows of up to {self.capacity} tokens, "
            f"{self.packing_efficiency:.1%} full; {tokens}"
        )


@dataclass(slots=True)
class DataReport:
    """The whole report: `train` and `evaluation` count tokens, `datasets` count rows of files.

    Attributes:
        lengths: lengths of all samples before truncation.
        notes: further notes for the user, one line each.
    """

    datasets: list[DatasetReport]
    train: TokenReport
    evaluation: TokenReport | None = None
    lengths: LengthReport | None = None
    notes: list[str] = field(default_factory=list)

    def lines(self) -> Iterable[str]:
        """Yield the report for a terminal or a log: a table of data sets, reasons, lengths, rows."""
        yield from self.dataset_lines()
        yield from (f"note: {note}" for dataset in self.datasets if (note := dataset.tags_note()))
        if self.lengths is not None:
            yield self.lengths.line()
        for name, tokens in (("train", self.train), ("evaluation", self.evaluation)):
            if tokens is not None:
                yield f"{name}: {tokens.line()}"
        yield from (f"note: {note}" for note in self.notes)
        if warning := self.cut_warning():
            yield f"warning: {warning}"

    def dataset_lines(self, tokens: Sequence[int] | None = None) -> Iterator[str]:
        """Yield a table of the data sets, and the reasons of dropped rows of each.

        Args:
            tokens: tokens per epoch of each training data set, for a separate column.
        """
        head = ["data set", "rows read", "trained", "held out", "dropped", "cut", "samples an epoch"]
        cells = [
            [d.name, *(f"{n:,}" for n in (d.read, d.trained, d.evaluation, d.dropped.total(), d.truncated, d.samples))]
            for d in self.datasets
        ]
        if tokens is not None:
            head.append("tokens an epoch")
            cells = [[*row, f"{count:,}"] for row, count in zip(cells, [*tokens, *repeat(0, len(cells))], strict=False)]
        widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
        for name, *numbers in (head, *cells):
            yield "  ".join([name.ljust(widths[0]), *(n.rjust(w) for n, w in zip(numbers, widths[1:], strict=True))])
        for dataset in self.datasets:
            yield from dataset.dropped_lines()

    def summary(self) -> str:
        """Return one line with the numbers of rows trained, held out, dropped and truncated."""
        names = dict.fromkeys(each.name for each in self.datasets if each.trained)
        parts = [f"{counted(sum(each.trained for each in self.datasets), 'row')} of {', '.join(names)}"]
        for what, number in (
            ("for evaluation", sum(each.evaluation for each in self.datasets)),
            ("dropped", sum(each.dropped.total() for each in self.datasets)),
            ("cut to cutoff_len", sum(each.truncated for each in self.datasets)),
        ):
            parts += [f"{number:,} {what}"] if number else []
        return ", ".join(parts)

    def cut_warning(self) -> str:
        """Return a warning if cutoff_len truncates or drops many rows; otherwise ""."""
        read = sum(dataset.read for dataset in self.datasets)
        cut = sum(dataset.truncated for dataset in self.datasets)
        reasons = [(each.codes[reason], count) for each in self.datasets for reason, count in each.dropped.items()]
        left_out = sum(count for code, count in reasons if code in _BY_LENGTH)
        if self.lengths is None or cut + left_out <= NOTABLE_CUT * read:
            return ""
        done = [f"cuts {cut:,}"] * (cut > 0) + [f"leaves out {left_out:,}"] * (left_out > 0)
        share = (cut + left_out) / read
        return (
            f"cutoff_len {self.lengths.cutoff_len} {' and '.join(done)} of {read:,} rows ({share:.0%});"
            f" cutoff_len: {self.lengths.p99} keeps 99 % of them whole"
        )

    def warnings(self) -> list[str]:
        """Return the warnings to print before the first step, one line each."""
        found = (line for each in self.datasets for line in (each.dropped_warning(), each.tags_note()))
        return [line for line in (*found, *self.notes, self.cut_warning()) if line]

    def raw(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return adapter_of(DataReport).dump_python(self, mode="json")

    def save(self, path: Path) -> None:
        """Write the report as JSON."""
        path.write_text(f"{json.dumps(self.raw(), ensure_ascii=False, indent=2)}\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> DataReport:
        """Read a report written by `save`."""
        return adapter_of(DataReport).validate_json(path.read_text(encoding="utf-8"))


def check_bad_rows(reports: Iterable[DatasetReport], data: DataSettings) -> None:
    """Raise if data sets have more bad rows than max_bad_rows allows; on_bad_row: error has its own check.

    Raises:
        MegatuneError: there are such data sets (exit code 65).
    """
    most = data.max_bad_rows if data.on_bad_row != "error" else None
    if findings := [finding for report in reports if (finding := report.too_many_bad(most)) is not None]:
        raise MegatuneError(findings, ExitCode.DATA)


@dataclass(frozen=True, slots=True)
class LengthReport:
    """Lengths of samples in tokens; the length of a preference pair is that of its longer document."""

    cutoff_len: int
    samples: int  # includes rows dropped for their length, but not copies
    mean: float
    p50: int  # percentiles
    p90: int
    p99: int
    longest: int
    over: int  # samples longer than cutoff_len
    # Histogram edges: bin i has the lengths above edges[i] up to edges[i + 1]. They are multiples of a fraction of
    # cutoff_len, which is an edge itself if lengths reach it; the last edge is the longest length.
    edges: tuple[int, ...]
    counts: tuple[int, ...]  # samples in each bin

    @classmethod
    def of(cls, lengths: np.ndarray, cutoff_len: int) -> LengthReport:
        """Return the report of lengths, int [samples], with at least one sample and lengths of at least 1."""
        ordered = np.sort(lengths)
        longest = int(ordered[-1])
        edges = _edges(longest, cutoff_len)
        up_to = np.searchsorted(ordered, edges, side="right")
        p50, p90, p99 = (int(ordered[-(-len(ordered) * percent // 100) - 1]) for percent in (50, 90, 99))
        over = len(ordered) - int(np.searchsorted(ordered, cutoff_len, side="right"))
        counts = tuple(int(b - a) for a, b in pairwise(up_to))
        mean = float(ordered.mean())
        return cls(cutoff_len, len(ordered), mean, p50, p90, p99, longest, over, tuple(edges), counts)

    @property
    def share_over(self) -> float:
        """Share of samples longer than cutoff_len, 0 to 1."""
        return self.over / self.samples

    def line(self) -> str:
        """Return the report as one line, with a bar for each bin, and a mark at cutoff_len if samples are longer."""
        most = max(self.counts)
        bars = [_BARS[-(-count * len(_BARS) // most) - 1] if count else " " for count in self.counts]
        if self.over:
            bars.insert(self.edges.index(self.cutoff_len), "¦")
        over = f"{self.over} ({self.share_over:.1%}) over" if self.over else "none over"
        return (
            f"lengths: |{''.join(bars)}| to {self.longest} tokens, p50 {self.p50}, p90 {self.p90}, p99 {self.p99}, "
            f"mean {self.mean:.0f}; {over} cutoff_len {self.cutoff_len}"
        )


def _edges(longest: int, cutoff_len: int) -> list[int]:
    """Return 0, multiples of cutoff_len / 2^j up to at most twice cutoff_len, and the longest length."""
    covered = min(longest, 2 * cutoff_len)
    parts = 1
    while 2 * parts <= cutoff_len and 2 * parts * covered <= (_MOST_BINS - 1) * cutoff_len:
        parts *= 2
    inner = [number * cutoff_len // parts for number in range(1, covered * parts // cutoff_len + 1)]
    return [0, *(edge for edge in inner if edge < longest), longest]
