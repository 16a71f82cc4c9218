"""Mix data sets to one endless stream of samples, divided into blocks of rows.

A block has the next `buffer_size` samples of an epoch, or the remaining ones. It is determined by the data, the
settings and the state at its start, so a run can resume exactly from any block.
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
ORDER_FILE = "order.npy"  # int64 [rows]: the order in which the part's rows are trained
_META_FILE = "meta.json"

Order = Callable[[int], np.ndarray]  # returns a permutation of this size


@dataclass(frozen=True, slots=True)
class StreamState:
    """The state of the stream between two blocks, stored with every block and in every checkpoint."""

    sets: tuple[DatasetState, ...]  # in the order of `dataset`
    block: int = 0  # index of the next block, from 0 over the whole run
    first_row: int = 0  # its first row, from 0 over the whole run
    epoch: int = 0  # epoch of the last sample taken
    draws: int = 0  # number of draws of a data set in this epoch, with mix_strategy interleave_*
    epoch_first_row: int = 0  # first row of the epoch
    epoch_rows: int | None = None  # rows of the previous epoch; None in the first
    reports: tuple[DatasetReport, ...] = ()  # counts of rows read so far, by data set

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return adapter_of(StreamState).dump_python(self, mode="json", by_alias=True)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> StreamState:
        """Return the state that `to_json` has converted."""
        return adapter_of(StreamState).validate_python(raw)


@dataclass(frozen=True, slots=True)
class BlockMeta:
    """Metadata of a block."""

    tokens: TokenReport
    start: StreamState  # before the block
    end: StreamState  # after the block

    @property
    def number(self) -> int:
        """Its index, from 0 over the whole run."""
        return self.start.block

    @property
    def stop_row(self) -> int:
        """The first row of the run after it."""
        return self.end.first_row

    @property
    def dropped(self) -> Counter[str]:
        """Number of rows read for it that cannot be trained on, by reason."""
        before, after = (sum((r.dropped for r in s.reports), Counter()) for s in (self.start, self.end))
        return after - before

    def line(self) -> str | None:
        """Return a line about dropped rows; None if there are none, or after the first epoch, which repeats them."""
        dropped = self.dropped
        if not dropped or self.end.epoch:
            return None
        before, after = (sum(report.read for report in state.reports) for state in (self.start, self.end))
        reasons = ", ".join(f"{count} x {reason}" for reason, count in dropped.most_common())
        rows = f"{dropped.total()} of the {after - before} rows read for block {self.number}"
        return f"data: {rows} are left out: {reasons}"

    @classmethod
    def load(cls, folder: Path) -> BlockMeta:
        """Read the metadata of the block in a folder."""
        return adapter_of(BlockMeta).validate_json((folder / _META_FILE).read_bytes())


class MixedStream:
    """Mixes the samples of several data sets, for any number of epochs, and writes them as blocks.

    Args:
        state: where to begin; None for the start. The attribute is the state at the start of the next block.
        starts: where each data set begins: after its held-out rows; None if there are none.
        evaluation: read the data sets of eval_dataset, concatenated regardless of mix_strategy.
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
        self._pipeline, self._now = pipeline, state  # in _now only the fields of epochs and draws are current
        self.strategy = "concat" if evaluation else pipeline.settings.data.mix_strategy
        self.sets = [
            DatasetReader(deepcopy(report), partial(pipeline.stream, source), begin, entry, refuse_empty=True)
            for source, report, begin, entry in zip(sources, state.reports, begins, state.sets, strict=True)
        ]
        self._draws = self._drawn_from(state.draws)

    def next(self) -> Encoded | None:
        """Return the next sample; None at the end of the epoch."""
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
            MegatuneError: a file cannot be read (exit codes 65 and 66), an epoch has no samples (65), or val_size
                leaves none (64).
        """
        settings, start = self._pipeline.settings, self.state
        shuffled = not settings.data.disable_shuffling
        samples = islice(self._rest_of_epoch(), settings.data.buffer_size)
        tokens = self.write_part(folder, PART, samples, lambda size: self._order(size, shuffled))
        self._check_bad_rows(self.sets)
        # Packing sorts by length, so packed rows are shuffled again.
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
        """Write samples of this stream as the rows of a part, and raise if on_bad_row refuses bad rows among them."""
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
        """Return the error for a val_size that leaves no training data."""
        name = ", ".join(reader.report.name for reader in sets or self.sets)
        finding = Finding(f"val_size leaves nothing of {name} to train on", fix="make it smaller, or use eval_dataset")
        return MegatuneError(finding, ExitCode.SETTINGS)

    def close(self) -> None:
        """Stop reading ahead."""
        for reader in self.sets:
            reader.close()

    def _num_read(self) -> int:
        return sum(reader.report.read for reader in self.sets)

    def _rest_of_epoch(self) -> Iterator[Encoded]:
        """Yield the remaining samples of the epoch, or those of the next one if none remain."""
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
        """Check max_bad_rows for data sets in their first pass; later passes repeat the same bad rows."""
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
