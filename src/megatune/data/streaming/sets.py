"""The usable samples of one data set, one after the other, from any place on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from megatune.data.bad_rows import RowError
from megatune.data.encode import Encoded
from megatune.data.report import DatasetReport
from megatune.data.samples import Sample
from megatune.data.sources import SourcePosition
from megatune.data.streaming.state import SetState
from megatune.errors import ExitCode, Finding, MegatuneError

Result = tuple[Sample, Encoded | RowError]
# The rows of a data set behind a position, of which so many come before, encoded.
Read = Callable[[SourcePosition | None, int], Iterator[Result]]


class StreamedSet:
    """One data set. Its state is behind the last row that was taken or passed over, however many were read ahead.

    Args:
        report: counts rows, for the whole run.
        read: its rows from a place on.
        start: where every pass begins: behind the rows held out for evaluation.
        state: where to go on.

    Attributes:
        on_bad_row: is told of rows that are passed over.
    """

    def __init__(self, report: DatasetReport, read: Read, start: SetState, state: SetState) -> None:
        self.report, self.state = report, state
        self.on_bad_row: Callable[[Sample, RowError], None] = lambda sample, error: None
        self._read, self._start = read, start
        self._results: Iterator[Result] | None = None
        self._next: tuple[Sample, Encoded] | None = None

    @property
    def is_used_up(self) -> bool:
        """Whether every sample was taken in this epoch."""
        return self.state.passes > 0 or not self.has_next()

    def has_next(self) -> bool:
        """Whether this pass has a sample left.

        Raises:
            MegatuneError: it ends, and not one of its rows was usable (exit code 65).
        """
        if self._next is None and not self.state.ended:
            self._next = self._find()
        return self._next is not None

    def take(self) -> Encoded | None:
        """The next usable sample, None at the end of the pass."""
        if not self.has_next():
            return None
        assert self._next is not None
        (sample, encoded), self._next = self._next, None
        self.report.read += 1
        self.report.trained += 1
        self.report.truncated += encoded.truncated
        self._pass_by(sample, usable=1)
        return encoded

    def begin_again(self) -> None:
        """Another pass in the same epoch."""
        self._begin(self.state.passes + 1)

    def begin_epoch(self) -> None:
        """The first pass of a new epoch."""
        self._begin(0)

    def close(self) -> None:
        """End what reads ahead."""
        results, self._results, self._next = self._results, None, None
        close = getattr(results, "close", None)
        if close is not None:
            close()

    def _begin(self, passes: int) -> None:
        self.close()
        self.state = replace(self._start, usable=0, passes=passes, ended=False)

    def _find(self) -> tuple[Sample, Encoded] | None:
        if self._results is None:
            self._results = self._read(self.state.position, self.state.rows)
        for sample, encoded in self._results:
            if not isinstance(encoded, RowError):
                return sample, encoded
            self.report.read += 1
            self.report.drop(sample.where, encoded)
            self._pass_by(sample, usable=0)
            self.on_bad_row(sample, encoded)
        self.state = replace(self.state, ended=True)
        # Where rows are held out there are usable ones, if none but those.
        if not self.state.usable and not self._start.rows:
            raise self._nothing_usable()
        return None

    def _pass_by(self, sample: Sample, usable: int) -> None:
        state = self.state
        self.state = replace(state, position=sample.position, rows=state.rows + 1, usable=state.usable + usable)

    def _nothing_usable(self) -> MegatuneError:
        report = self.report
        return MegatuneError(
            Finding(
                f"{report.name}: 0 usable of {self.state.rows} rows",
                why="; ".join(f"{count} x {reason}" for reason, count in report.dropped.most_common()),
                fix=f"the first: {report.examples[0]}" if report.examples else "the files have no rows",
            ),
            ExitCode.DATA,
        )
