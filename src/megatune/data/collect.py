"""Every row of the data sets through the encoder, once: usable ones are written, the others are counted and kept."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from megatune.data.bad_rows import BadRows, LengthError, RowError
from megatune.data.build import RowsBuilder
from megatune.data.encode import Encoder
from megatune.data.hold_out import rank
from megatune.data.report import DatasetReport
from megatune.data.samples import read_samples
from megatune.data.sources import DatasetSource
from megatune.data.workers import encode_all
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.config.settings import Settings


@dataclass(slots=True)
class Collected:
    """The usable rows of one data set, by a few bytes each.

    Attributes:
        first: the number of the first one among all samples written; the others follow it.
        copies: how often each is trained in an epoch.
        ranks: see `hold_out.rank`; empty where nothing is held out.
    """

    report: DatasetReport
    first: int
    copies: array[int] = field(default_factory=lambda: array("i"))
    ranks: array[int] = field(default_factory=lambda: array("Q"))

    def __len__(self) -> int:
        return len(self.copies)

    @property
    def numbers(self) -> np.ndarray:
        """Their numbers among all samples written: int64 [rows]."""
        return np.arange(self.first, self.first + len(self), dtype=np.int64)


class Collector:
    """Reads, encodes and writes data sets, one after the other."""

    def __init__(self, settings: Settings, encoder: Encoder, builder: RowsBuilder, bad_rows: BadRows) -> None:
        self._settings, self._encoder, self._builder, self._bad_rows = settings, encoder, builder, bad_rows
        self._lengths = array("i")
        self._reports: list[DatasetReport] = []

    def collect(self, source: DatasetSource) -> Collected:
        """Write the usable rows of one data set.

        Raises:
            MegatuneError: a file cannot be read as a whole, or the settings do not fit the data.
        """
        data, run = self._settings.data, self._settings.run
        collected = Collected(DatasetReport(source.name), len(self._builder))
        self._reports.append(collected.report)
        samples = read_samples(
            source,
            stage=run.stage,
            seed=run.seed,
            max_samples=data.max_samples,
            placeholders={"{{name}}": data.model_name, "{{author}}": data.model_author},
        )
        for sample, encoded in encode_all(self._encoder, samples, data.preprocessing_num_workers or 1):
            collected.report.read += 1
            if isinstance(encoded, RowError):
                collected.report.drop(sample.where, encoded)
                self._bad_rows.add(sample, encoded)
                if isinstance(encoded, LengthError):
                    self._lengths.append(encoded.length)
                continue
            assert not isinstance(sample.example, RowError)
            self._lengths.append(encoded.length)
            self._builder.add(encoded.documents)
            collected.report.truncated += encoded.truncated
            collected.report.tokens += sum(len(document.input_ids) for document in encoded.documents)
            collected.copies.append(sample.copies)
            if data.val_size:
                collected.ranks.append(rank(sample.example, run.seed))
        return collected

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every row before cutting, those that were too long included: int32 [rows]."""
        return np.asarray(self._lengths)

    def check(self) -> None:
        """Call when all data sets are collected.

        Raises:
            MegatuneError: rows that the settings refuse, or data sets without a usable row (exit code 65); all are
                named.
        """
        self._bad_rows.check(sum(report.read for report in self._reports))
        _check_usable(self._reports)


def _check_usable(reports: Sequence[DatasetReport]) -> None:
    findings = [
        Finding(
            f"{report.name}: 0 usable of {report.read} rows",
            why="; ".join(f"{count} x {reason}" for reason, count in report.dropped.most_common()),
            fix=f"the first: {report.examples[0]}" if report.examples else "the files have no rows",
        )
        for report in reports
        if report.read == report.dropped.total()
    ]
    if findings:
        raise MegatuneError(findings, ExitCode.DATA)
