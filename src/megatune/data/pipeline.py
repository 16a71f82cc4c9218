"""Read data sets as encoded samples, both for prepared and for streamed data.

`Pipeline` connects samples.py and workers.py as configured by the settings. `DatasetReader` yields the usable samples
of one data set, counts all of its rows, and tracks its position. prepare.py reads every data set once; streaming/ reads
them concurrently for several epochs, starting at any position. Both pass samples to build.py, which writes token rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from megatune.config.settings import Settings
from megatune.data.bad_rows import BadRows, RowError, no_rows
from megatune.data.conversation import Conversation, Message
from megatune.data.encode import Encoded, Encoder, make_encoder
from megatune.data.report import DatasetReport
from megatune.data.samples import Result, RowReader, Sample, all_filled, read_samples, stream_samples
from megatune.data.sources import DatasetSource, SourcePosition, datasets_of
from megatune.data.vision import VisionInput
from megatune.data.workers import encode_all
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.processes import usable_processes
from megatune.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatune.data.streaming.sharing import Exchange


_SHORTEST = Conversation((Message("user", "a"), Message("assistant", "b")))
_PROGRESS_ROWS = 64  # rows between updates of the progress bar
Results = Generator[Result, None, None]
Read = Callable[[SourcePosition | None, int], Results]  # yields the rows after a position and a number of rows


@dataclass(slots=True)
class DatasetState:
    """The state of reading one data set, saved in checkpoints of streams."""

    position: SourcePosition | None = None  # after the last sample taken; None at the start
    rows: int = 0  # rows read before this position
    usable: int = 0  # samples taken in the current pass over the data set
    # Complete passes within the current epoch of the mixed data; "passes" in checkpoints.
    epochs: Annotated[int, Field(alias="passes")] = 0
    ended: bool = False  # no samples remain in the current pass


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The data sets of a run and their processing; picklable."""

    settings: Settings
    encoder: Encoder
    training: Sequence[DatasetSource]  # from `dataset`
    evaluation: Sequence[DatasetSource]  # from `eval_dataset`
    exchange: Exchange | None = None  # shares the work of a stream with other machines

    @classmethod
    def of(cls, settings: Settings, tokenizer: PreTrainedTokenizerBase, vision: VisionInput | None = None) -> Pipeline:
        """Return the pipeline for these settings.

        Args:
            vision: None for a language model.

        Raises:
            MegatuneError: a data set or template is missing, or the tokenizer does not match (exit codes 64 and 66).
        """
        training = datasets_of(settings)
        evaluation = datasets_of(settings, evaluation=True)
        encoder = make_encoder(settings, tokenizer, vision)
        _check_cutoff(encoder)
        return cls(settings, encoder, training, evaluation)

    def read(self, source: DatasetSource) -> Results:
        """Return all selected rows of a data set, encoded."""
        seed = self.settings.run.seed if self.settings.data.val_size else None
        samples = read_samples(source, self.settings)
        encoded = encode_all(self.encoder, self._reader(source, seed), samples, self._num_workers)
        return _counted(all_filled(encoded), source.name)

    def stream(self, source: DatasetSource, after: SourcePosition | None, taken: int) -> Results:
        """Return the rows of a data set after a position, with `taken` rows before it, encoded."""
        samples = stream_samples(source, self.settings, after, taken)
        # Interleaved data sets are read concurrently, so they share the processes.
        side_by_side = 1 if self.settings.data.mix_strategy == "concat" else len(self.training)
        num_workers = self._num_workers // side_by_side
        series = None if self.exchange is None else self.exchange.series()
        encoded = encode_all(self.encoder, self._reader(source), samples, num_workers, series, side_by_side)
        return all_filled(encoded, at_once=True)

    def bad_rows(self, folder: Path, policy: str | None = None) -> BadRows:
        """Return the collector of bad rows for a folder; the default policy is on_bad_row."""
        data = self.settings.data
        return BadRows(policy or data.on_bad_row, data.truncation_strategy, folder)

    @property
    def _num_workers(self) -> int:
        return usable_processes(self.settings.data.preprocessing_num_workers or 1)[0]

    def _reader(self, source: DatasetSource, seed: int | None = None) -> RowReader:
        return RowReader.of(source, self.settings, media=self.encoder.vision is not None, seed=seed)


def _counted(results: Results, name: str) -> Results:
    with Progress("preparing", None, "rows", name=name) as progress:
        for number, result in enumerate(results, 1):
            yield result
            if number % _PROGRESS_ROWS == 0:
                progress.to(number)


def _check_cutoff(encoder: Encoder) -> None:
    """Refuse a cutoff_len without room for an answer: every row would be cut to the template's own tokens."""
    if encoder.template is None:
        return
    (shortest,) = replace(encoder, cutoff_len=sys.maxsize, vision=None).encode([_SHORTEST])
    if isinstance(shortest, Encoded) and shortest.length > encoder.cutoff_len:
        what = f"cutoff_len: {encoder.cutoff_len} leaves no room for an answer"
        why = f"a question and an answer of one letter each take {shortest.length} tokens in this template"
        fix = "`megatune data stats FILE.yaml` shows how long the rows are; 2048 fits most conversations"
        raise MegatuneError(Finding(what, "", why, fix), ExitCode.SETTINGS)


class DatasetReader:
    """Reads the usable samples of one data set, for any number of passes.

    Its state is after the last row that was taken or skipped, regardless of read-ahead.

    Args:
        report: counts rows over all passes.
        start: where every pass begins: after the rows held out for evaluation.
        state: where to continue.
        refuse_empty: raise at the end of a pass without a usable row (exit code 65).

    Attributes:
        on_bad_row: called with skipped rows.
    """

    def __init__(
        self,
        report: DatasetReport,
        read: Read,
        start: DatasetState,
        state: DatasetState | None = None,
        *,
        refuse_empty: bool = False,
    ) -> None:
        self.report, self._read, self._start, self._refuse_empty = report, read, start, refuse_empty
        self.on_bad_row: Callable[[Sample, RowError], None] = lambda sample, error: None
        self._results: Results | None = None
        self._next: tuple[Sample, Encoded] | None = None
        self._state = replace(state or start)  # a copy, which is updated in place

    @property
    def state(self) -> DatasetState:
        """A copy of the current state."""
        return replace(self._state)

    @property
    def is_used_up(self) -> bool:
        """Whether every sample was taken at least once in this epoch."""
        return self._state.epochs > 0 or not self.has_next()

    def has_next(self) -> bool:
        """Return whether samples remain in this pass."""
        if self._next is None and not self._state.ended:
            self._next = self._find()
        return self._next is not None

    def take(self) -> tuple[Sample, Encoded] | None:
        """Return the next usable sample, None at the end of the pass."""
        if not self.has_next():
            return None
        taken, self._next = self._next, None
        assert taken is not None
        self._state.usable += 1
        self.report.truncated += taken[1].truncated
        self.report.tags_added += taken[0].metadata.tags_added
        self._advance(taken[0])
        return taken

    def begin(self, epochs: int) -> None:
        """Begin another pass, after `epochs` passes in this epoch."""
        self.close()
        self._state = DatasetState(self._start.position, self._start.rows, epochs=epochs)

    def close(self) -> None:
        """Stop reading ahead."""
        results, self._results, self._next = self._results, None, None
        if results is not None:
            results.close()

    def nothing_usable(self) -> Finding | None:
        """Return the finding if the pass has ended without a usable row; None otherwise."""
        # If rows are held out, there are usable ones.
        if not self._state.ended or self._state.usable or self._start.rows:
            return None
        report = self.report
        why = "; ".join(f"{count} x {reason}" for reason, count in report.dropped.most_common())
        if not report.examples:
            return no_rows(report.name)
        what, fix = f"{report.name}: 0 usable of {self._state.rows} rows", "correct the rows, or remove the data set"
        return Finding(what, "", f"{why}; the first: {report.examples[0]}", fix)

    def _find(self) -> tuple[Sample, Encoded] | None:
        if self._results is None:
            self._results = self._read(self._state.position, self._state.rows)
        for sample, encoded in self._results:
            if not isinstance(encoded, RowError):
                return sample, encoded
            self.report.drop(sample.row.where, encoded)
            self._advance(sample)
            self.on_bad_row(sample, encoded)
        self._state.ended = True
        if self._refuse_empty and (finding := self.nothing_usable()) is not None:
            raise MegatuneError(finding, ExitCode.DATA)
        return None

    def _advance(self, sample: Sample) -> None:
        self.report.read += 1
        self._state.position = sample.position
        self._state.rows += 1
