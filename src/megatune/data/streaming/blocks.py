"""Data sets mixed to one endless stream of samples, and the stream cut to blocks of rows.

A block is the next `buffer_size` samples of an epoch, or what is left of it. All in it follows from the data, the
settings and the state at its start, so that a run can continue from any block as if it had never stopped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from megatune.data.build import RowsBuilder
from megatune.data.encode import Encoded
from megatune.data.mixing import draws
from megatune.data.order import block_order
from megatune.data.pipeline import DatasetReader, Pipeline, SetState
from megatune.data.report import DatasetReport, TokenReport
from megatune.data.sources import DatasetSource
from megatune.errors import ExitCode, Finding, MegatuneError

PART = "train"
ORDER_FILE = "order.npy"  # int64 [rows]: in which order the part's rows are trained
_META_FILE = "meta.json"


@dataclass(frozen=True, slots=True)
class StreamState:
    """Where the stream of all data sets is, between two blocks: written beside every block and into every checkpoint.

    Attributes:
        block: number of the next one, from 0 over the whole run.
        first_row: the first of its rows, from 0 over the whole run.
        epoch: of the last sample taken.
        draws: data sets drawn in this epoch, by mix_strategy interleave_*.
        sets: in the order of `dataset`.
        epoch_first_row: where the epoch began.
        epoch_rows: rows of the epoch before it, None in the first.
        reports: of the rows read so far, by data set.
    """

    sets: tuple[SetState, ...]
    block: int = 0
    first_row: int = 0
    epoch: int = 0
    draws: int = 0
    epoch_first_row: int = 0
    epoch_rows: int | None = None
    reports: tuple[DatasetReport, ...] = field(default=())

    @classmethod
    def at_start(cls, sources: Sequence[DatasetSource], starts: Sequence[SetState] | None = None) -> StreamState:
        """Before the first block; behind `starts`, where rows are held out."""
        sets = tuple(starts or (SetState() for _ in sources))
        return cls(sets, reports=tuple(DatasetReport(source.name) for source in sources))

    def to_json(self) -> dict[str, Any]:
        """For a file."""
        content: dict[str, Any] = TypeAdapter(StreamState).dump_python(self, mode="json")
        return content

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> StreamState:
        """Return what `to_json` made, also after its way through a file."""
        return TypeAdapter(StreamState).validate_python(raw)


@dataclass(frozen=True, slots=True)
class BlockMeta:
    """What is known of a block without reading it.

    Attributes:
        number: from 0 over the whole run.
        first_row, rows: which rows of the run it holds.
        epoch: of its samples.
        tokens: what it holds.
        start, end: of the stream, before it and behind it.
    """

    number: int
    first_row: int
    rows: int
    epoch: int
    tokens: TokenReport
    start: StreamState
    end: StreamState

    @property
    def stop_row(self) -> int:
        """The first row of the run behind it."""
        return self.first_row + self.rows

    @property
    def read(self) -> int:
        """Rows of files that were read for it."""
        return sum(report.read for report in self.end.reports) - sum(report.read for report in self.start.reports)

    @property
    def dropped(self) -> Counter[str]:
        """How many of them cannot be trained on, by reason."""
        before, after = (sum((r.dropped for r in s.reports), Counter()) for s in (self.start, self.end))
        return after - before

    def line(self) -> str | None:
        """Return what a user should know; None where nothing was wrong with its rows, or the first epoch had them."""
        dropped = self.dropped
        if not dropped or self.epoch:
            return None
        reasons = ", ".join(f"{count} x {reason}" for reason, count in dropped.most_common())
        return f"data: {dropped.total()} of the {self.read} rows read for block {self.number} are left out: {reasons}"

    def save(self, folder: Path) -> None:
        """Write it into the block's folder."""
        (folder / _META_FILE).write_bytes(TypeAdapter(BlockMeta).dump_json(self))

    @classmethod
    def load(cls, folder: Path) -> BlockMeta:
        """Read what `save` wrote."""
        return TypeAdapter(BlockMeta).validate_json((folder / _META_FILE).read_bytes())


class MixedStream:
    """Samples of several data sets, epoch after epoch, cut to blocks.

    Args:
        state: where to begin.
        starts: where the data sets begin: behind the rows that are held out; None where none are.
        concatenate: one data set after the other, whatever mix_strategy says.

    Attributes:
        state: of the next block's start.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        sources: Sequence[DatasetSource],
        state: StreamState,
        starts: Sequence[SetState] | None = None,
        *,
        concatenate: bool = False,
    ) -> None:
        data = pipeline.settings.data
        self.state = state
        self._pipeline, self._now = pipeline, state  # of what is now only epoch and draws count
        self.strategy = "concat" if concatenate else data.mix_strategy
        begins = starts or [SetState() for _ in sources]
        self.sets = [
            DatasetReader(
                deepcopy(report),
                partial(pipeline.stream, source),
                begin,
                entry,
                refuse_empty=True,
            )
            for source, report, begin, entry in zip(sources, state.reports, begins, state.sets, strict=True)
        ]
        self._draws = self._drawn_from(state.draws)

    def next(self) -> Encoded | None:
        """Return the next sample, None at the end of the epoch."""
        if self.strategy == "concat":
            return next((taken for reader in self.sets if (taken := _take(reader)) is not None), None)
        while not self._is_over():
            drawn = self.sets[next(self._draws)]
            self._now = replace(self._now, draws=self._now.draws + 1)
            if not drawn.has_next():
                if self.strategy == "interleave_once":
                    continue
                drawn.begin(drawn.state.passes + 1)
            return _take(drawn)
        return None

    def write_block(self, folder: Path, progress: Callable[[int], None] = lambda samples: None) -> BlockMeta:
        """Write the next block.

        Args:
            folder: exists and is empty.
            progress: gets the number of samples that the block has so far.

        Raises:
            MegatuneError: a file cannot be read (exit codes 65 and 66), an epoch has no sample (65), or val_size
                leaves none (64).
        """
        settings, start = self._pipeline.settings, self.state
        shuffled = not settings.data.disable_shuffling
        samples = islice(self._rest_of_epoch(), settings.data.buffer_size)
        tokens = self.write_part(folder, PART, samples, progress, lambda size: self._order(size, shuffled))
        # Packing sorts by length; the rows it makes are shuffled once more.
        order = self._order(tokens.rows, shuffled and settings.packing)
        np.save(folder / ORDER_FILE, order, allow_pickle=False)
        self.state = replace(
            self._now,
            block=start.block + 1,
            first_row=start.first_row + tokens.rows,
            sets=tuple(reader.state for reader in self.sets),
            reports=tuple(deepcopy(reader.report) for reader in self.sets),
        )
        meta = BlockMeta(start.block, start.first_row, tokens.rows, self._now.epoch, tokens, start, self.state)
        meta.save(folder)
        return meta

    def write_part(
        self,
        folder: Path,
        part: str,
        samples: Iterable[Encoded],
        progress: Callable[[int], None],
        order: Callable[[int], np.ndarray],
    ) -> TokenReport:
        """Write samples of this stream as the rows of a part, and refuse bad rows among them as on_bad_row says.

        Args:
            folder: exists and is empty.
            progress: gets the number of samples so far.
            order: of the samples, given their number.
        """
        before = self._num_read()
        with RowsBuilder(folder, self._pipeline.shape) as builder, self._pipeline.bad_rows(folder) as bad_rows:
            for reader in self.sets:
                reader.on_bad_row = bad_rows.add
            for encoded in samples:
                progress(builder.add(encoded.documents) + 1)
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

    def _begin_epoch(self) -> None:
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
        return islice(draws(len(self.sets), data.interleave_probs, seed), skipped, None)

    def _is_over(self) -> bool:
        """By the rules of `data.mixing`: what is drawn in turn ends with a round."""
        if self._pipeline.settings.data.interleave_probs is None and self._now.draws % len(self.sets):
            return False
        over = any if self.strategy == "interleave_under" else all
        return over(reader.is_used_up for reader in self.sets)


def _take(reader: DatasetReader) -> Encoded | None:
    taken = reader.take()
    if taken is None:
        return None
    reader.report.trained += 1
    return taken[1]
