"""Data sets mixed to one endless stream of samples, and the stream cut to blocks of rows.

A block is the next `buffer_size` samples of an epoch, or what is left of it. All in it follows from the data, the
settings and the state at its start, so that a run can continue from any block as if it had never stopped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from megatune.data.build import RowsBuilder, RowShape
from megatune.data.encode import Encoded
from megatune.data.order import block_order, draws
from megatune.data.pipeline import DatasetReader, DatasetState, Pipeline
from megatune.data.report import DatasetReport, TokenReport, adapter_of, check_bad_rows
from megatune.data.store import write_array
from megatune.errors import ExitCode, Finding, MegatuneError

PART = "train"
ORDER_FILE = "order.npy"  # int64 [rows]: in which order the part's rows are trained
_META_FILE = "meta.json"

Order = Callable[[int], np.ndarray]  # of samples, given their number


@dataclass(frozen=True, slots=True)
class StreamState:
    """Where the stream of all data sets is between two blocks: written beside every block and into every checkpoint."""

    sets: tuple[DatasetState, ...]  # in the order of `dataset`
    block: int = 0  # number of the next one, from 0 over the whole run
    first_row: int = 0  # the first of its rows, from 0 over the whole run
    epoch: int = 0  # of the last sample taken
    draws: int = 0  # data sets drawn in this epoch, by mix_strategy interleave_*
    epoch_first_row: int = 0  # where the epoch began
    epoch_rows: int | None = None  # of the epoch before it, None in the first
    reports: tuple[DatasetReport, ...] = ()  # of the rows read so far, by data set

    def to_json(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return adapter_of(StreamState).dump_python(self, mode="json", by_alias=True)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> StreamState:
        """Return what `to_json` was made of."""
        return adapter_of(StreamState).validate_python(raw)


@dataclass(frozen=True, slots=True)
class BlockMeta:
    """What is known of a block without reading it."""

    tokens: TokenReport
    start: StreamState  # before it
    end: StreamState  # behind it

    @property
    def number(self) -> int:
        """From 0 over the whole run."""
        return self.start.block

    @property
    def stop_row(self) -> int:
        """The first row of the run behind it."""
        return self.end.first_row

    @property
    def dropped(self) -> Counter[str]:
        """How many of the rows that were read for it cannot be trained on, by reason."""
        before, after = (sum((r.dropped for r in s.reports), Counter()) for s in (self.start, self.end))
        return after - before

    def line(self) -> str | None:
        """Return what a user should know; None where nothing was wrong with its rows, or the first epoch had them."""
        dropped = self.dropped
        if not dropped or self.end.epoch:
            return None
        before, after = (sum(report.read for report in state.reports) for state in (self.start, self.end))
        reasons = ", ".join(f"{count} x {reason}" for reason, count in dropped.most_common())
        rows = f"{dropped.total()} of the {after - before} rows read for block {self.number}"
        return f"data: {rows} are left out: {reasons}"

    @classmethod
    def load(cls, folder: Path) -> BlockMeta:
        """Read what is known of the block in a folder."""
        return adapter_of(BlockMeta).validate_json((folder / _META_FILE).read_bytes())


class MixedStream:
    """Samples of several data sets, epoch after epoch, cut to blocks.

    Args:
        state: where to begin; None for the start. As an attribute, that of the next block's start.
        starts: where the data sets begin: behind the rows that are held out; None where none are.
        evaluation: of eval_dataset, one data set after the other, whatever mix_strategy says.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        state: StreamState | None = None,
        starts: Sequence[DatasetState] | None = None,
        *,
        evaluation: bool = False,
    ) -> None:
        sources = pipeline.evaluation if evaluation else pipeline.training
        begins = tuple(starts or (DatasetState() for _ in sources))
        self.state = state = state or StreamState(begins, reports=tuple(DatasetReport(each.name) for each in sources))
        self._pipeline, self._now = pipeline, state  # of what is now only epoch and draws count
        self.strategy = "concat" if evaluation else pipeline.settings.data.mix_strategy
        self.sets = [
            DatasetReader(deepcopy(report), partial(pipeline.stream, source), begin, entry, refuse_empty=True)
            for source, report, begin, entry in zip(sources, state.reports, begins, state.sets, strict=True)
        ]
        self._draws = self._drawn_from(state.draws)

    def next(self) -> Encoded | None:
        """Return the next sample, None at the end of the epoch."""
        if self.strategy == "concat":
            return next((taken for reader in self.sets if (taken := _take(reader)) is not None), None)
        for number in self._draws:
            drawn = self.sets[number]
            self._now = replace(self._now, draws=self._now.draws + 1)
            if not drawn.has_next():
                if self.strategy == "interleave_once":
                    continue
                self._check_bad_rows([drawn])
                drawn.begin(drawn.state.epochs + 1)
            return _take(drawn)
        return None

    def write_block(self, folder: Path) -> BlockMeta:
        """Write the next block to an empty folder.

        Raises:
            MegatuneError: a file cannot be read (exit codes 65 and 66), an epoch has no sample (65), or val_size
                leaves none (64).
        """
        settings, start = self._pipeline.settings, self.state
        shuffled = not settings.data.disable_shuffling
        samples = islice(self._rest_of_epoch(), settings.data.buffer_size)
        tokens = self.write_part(folder, PART, samples, lambda size: self._order(size, shuffled))
        self._check_bad_rows(self.sets)
        # Packing sorts by length; the rows it makes are shuffled once more.
        order = self._order(tokens.rows, shuffled and settings.packing)
        write_array(folder / ORDER_FILE, order)
        self.state = replace(
            self._now,
            block=start.block + 1,
            first_row=start.first_row + tokens.rows,
            sets=tuple(reader.state for reader in self.sets),
            reports=tuple(deepcopy(reader.report) for reader in self.sets),
        )
        meta = BlockMeta(tokens, start, self.state)
        (folder / _META_FILE).write_bytes(adapter_of(BlockMeta).dump_json(meta, by_alias=True))
        return meta

    def write_part(self, folder: Path, part: str, samples: Iterable[Encoded], order: Order) -> TokenReport:
        """Write samples of this stream as the rows of a part, and refuse bad rows among them as on_bad_row says."""
        before = self._num_read()
        with (
            RowsBuilder(folder, RowShape.of(self._pipeline.settings)) as builder,
            self._pipeline.bad_rows(folder) as bad_rows,
        ):
            for reader in self.sets:
                reader.on_bad_row = bad_rows.add
            for encoded in samples:
                builder.add(encoded.documents, encoded.margin, label=encoded.label)
            tokens = builder.write_part(part, order(len(builder)))
        bad_rows.check(self._num_read() - before)
        return tokens

    def nothing_left(self, sets: Sequence[DatasetReader] | None = None) -> MegatuneError:
        """Return the refusal of a val_size that takes all of the training data."""
        name = ", ".join(reader.report.name for reader in sets or self.sets)
        finding = Finding(f"val_size leaves nothing of {name} to train on", fix="make it smaller, or use eval_dataset")
        return MegatuneError(finding, ExitCode.SETTINGS)

    def close(self) -> None:
        """End what reads ahead."""
        for reader in self.sets:
            reader.close()

    def _num_read(self) -> int:
        return sum(reader.report.read for reader in self.sets)

    def _rest_of_epoch(self) -> Iterator[Encoded]:
        """Yield what is left of the epoch, or all of the next one where nothing is."""
        taken = self.next()
        if taken is None:
            self._begin_epoch()
            taken = self.next()
        if taken is None:
            raise self.nothing_left()
        while taken is not None:
            yield taken
            taken = self.next()

    def _check_bad_rows(self, readers: Iterable[DatasetReader]) -> None:
        """Refuse more bad rows than max_bad_rows allows, of data sets in their first pass: later ones repeat them."""
        first = (reader.report for reader in readers if not (self._now.epoch or reader.state.epochs))
        check_bad_rows(first, self._pipeline.settings.data)

    def _begin_epoch(self) -> None:
        self._check_bad_rows(self.sets)
        now, first_row = self._now, self.state.first_row
        rows = first_row - now.epoch_first_row
        self._now = replace(now, epoch=now.epoch + 1, draws=0, epoch_first_row=first_row, epoch_rows=rows)
        self._draws = self._drawn_from(0)
        for reader in self.sets:
            reader.begin(0)

    def _order(self, size: int, shuffled: bool) -> np.ndarray:
        if not shuffled:
            return np.arange(size, dtype=np.int64)
        return block_order(size, self._pipeline.settings.run.seed, self._now.epoch, self.state.block)

    def _drawn_from(self, skipped: int) -> Iterator[int]:
        data, seed = self._pipeline.settings.data, self._pipeline.settings.run.seed

        def num_used_up() -> int:
            return sum(reader.is_used_up for reader in self.sets)

        return draws(len(self.sets), self.strategy, data.interleave_probs, seed, num_used_up, skipped)


def _take(reader: DatasetReader) -> Encoded | None:
    taken = reader.take()
    if taken is None:
        return None
    reader.report.trained += 1
    return taken[1]
