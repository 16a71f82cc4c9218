"""Data sets mixed to one endless stream of samples, and the stream cut to blocks of rows.

A block is the next `buffer_size` samples of an epoch, or what is left of it. All in it follows from the data, the
settings and the state at its start, so that a run can go on from any block as if it had never stopped.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from megatune.data.bad_rows import BadRows
from megatune.data.build import RowsBuilder, RowShape
from megatune.data.encode import Encoded
from megatune.data.mixing import draws
from megatune.data.order import block_order
from megatune.data.report import TokenReport
from megatune.data.streaming.sets import StreamedSet
from megatune.data.streaming.state import StreamState
from megatune.errors import ExitCode, Finding, MegatuneError

PART = "train"
META_FILE = "meta.json"
ORDER_FILE = "order.npy"  # int64 [rows]: in which order the part's rows are trained


@dataclass(frozen=True, slots=True)
class Mixing:
    """How data sets become one sequence; see `data.mixing`."""

    strategy: str
    probabilities: Sequence[float] | None
    seed: int


class MixedStream:
    """Samples of all data sets, epoch after epoch.

    Args:
        sets: as the state left them.
        state: of a block's start.
    """

    def __init__(self, sets: Sequence[StreamedSet], mixing: Mixing, state: StreamState) -> None:
        self.sets = sets
        self._mixing, self._state = mixing, state
        self._draws = self._drawn_from(state.draws)

    @property
    def epoch(self) -> int:
        """Of the next sample, unless this epoch has none left."""
        return self._state.epoch

    def state(self, block: int, first_row: int) -> StreamState:
        """Where the stream stands, as the start of the block of this number, whose first row has that one."""
        sets = tuple(entry.state for entry in self.sets)
        reports = tuple(deepcopy(entry.report) for entry in self.sets)
        return replace(self._state, block=block, first_row=first_row, sets=sets, reports=reports)

    def next(self) -> Encoded | None:
        """The next sample, None at the end of the epoch."""
        if self._mixing.strategy == "concat":
            return next((taken for entry in self.sets if (taken := entry.take()) is not None), None)
        while not self._is_over():
            number = next(self._draws)
            self._state = replace(self._state, draws=self._state.draws + 1)
            drawn = self.sets[number]
            if not drawn.has_next():
                if self._mixing.strategy == "interleave_once":
                    continue
                drawn.begin_again()
            return drawn.take()
        return None

    def begin_epoch(self, first_row: int) -> None:
        """Go on with the next epoch.

        Args:
            first_row: the number of its first row.
        """
        state = self._state
        self._state = replace(
            state,
            epoch=state.epoch + 1,
            draws=0,
            epoch_first_row=first_row,
            epoch_rows=first_row - state.epoch_first_row,
        )
        self._draws = self._drawn_from(0)
        for entry in self.sets:
            entry.begin_epoch()

    def _drawn_from(self, skipped: int) -> Iterator[int]:
        return islice(draws(len(self.sets), self._mixing.probabilities, self._mixing.seed), skipped, None)

    def _is_over(self) -> bool:
        """By the rules of `data.mixing`: what is drawn in turn ends with a round."""
        if self._mixing.probabilities is None and self._state.draws % len(self.sets):
            return False
        over = any if self._mixing.strategy == "interleave_under" else all
        return over(entry.is_used_up for entry in self.sets)


def nothing_left(name: str) -> MegatuneError:
    """The refusal of a val_size that takes all of the training data."""
    finding = Finding(f"val_size leaves nothing of {name} to train on", fix="make it smaller, or use eval_dataset")
    return MegatuneError(finding, ExitCode.SETTINGS)


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
    def read(self) -> int:
        """Rows of files that were read for it."""
        return sum(report.read for report in self.end.reports) - sum(report.read for report in self.start.reports)

    @property
    def dropped(self) -> Counter[str]:
        """How many of them cannot be trained on, by reason."""
        before, after = (sum((r.dropped for r in s.reports), Counter()) for s in (self.start, self.end))
        return after - before

    def save(self, folder: Path) -> None:
        """Write it into the block's folder."""
        content = {**_shallow(self), "tokens": asdict(self.tokens)}
        content |= {"start": self.start.to_json(), "end": self.end.to_json()}
        (folder / META_FILE).write_text(json.dumps(content), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> BlockMeta:
        """Read what `save` wrote."""
        raw = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
        start, end = StreamState.from_json(raw["start"]), StreamState.from_json(raw["end"])
        return cls(**{**raw, "tokens": TokenReport(**raw["tokens"]), "start": start, "end": end})


def _shallow(meta: BlockMeta) -> dict[str, Any]:
    return {name: getattr(meta, name) for name in ("number", "first_row", "rows", "epoch")}


class BlockCutter:
    """Cuts a stream to blocks.

    Args:
        state: where to begin; its reports and sets belong to `stream`.
        shape: of the rows.
        bad_rows: what becomes of bad rows, for the folder of a block.
        buffer_size: samples of a block.
        shuffle: False keeps the order of the data.
    """

    def __init__(
        self,
        stream: MixedStream,
        state: StreamState,
        shape: RowShape,
        bad_rows: Callable[[Path], BadRows],
        buffer_size: int,
        *,
        shuffle: bool = True,
    ) -> None:
        self._stream, self._shape, self._bad_rows = stream, shape, bad_rows
        self._buffer_size, self._shuffle = buffer_size, shuffle
        self._state = state

    @property
    def state(self) -> StreamState:
        """Of the next block's start."""
        return self._state

    def close(self) -> None:
        """End what reads ahead."""
        for entry in self._stream.sets:
            entry.close()

    def write(self, folder: Path, progress: Callable[[int], None] = lambda samples: None) -> BlockMeta:
        """Write the next block.

        Args:
            folder: exists and is empty.
            progress: is told now and then how many samples the block has.

        Raises:
            MegatuneError: a file cannot be read (exit codes 65 and 66), an epoch has no sample (65), or val_size
                leaves none (64).
        """
        start = self._state
        with RowsBuilder(folder, self._shape) as builder, self._bad_rows(folder) as bad_rows:
            for entry in self._stream.sets:
                entry.on_bad_row = bad_rows.add
            self._fill(builder, start.first_row, progress)
            epoch = self._stream.epoch
            tokens = builder.write_part(PART, self._order(len(builder), epoch, shuffled=self._shuffle))
        # Packing sorts by length; the rows it makes are shuffled once more.
        order = self._order(tokens.rows, epoch, shuffled=self._shuffle and self._shape.packing)
        np.save(folder / ORDER_FILE, order, allow_pickle=False)
        self._state = self._stream.state(start.block + 1, start.first_row + tokens.rows)
        meta = BlockMeta(start.block, start.first_row, tokens.rows, epoch, tokens, start, self._state)
        bad_rows.check(meta.read)
        meta.save(folder)
        return meta

    def _order(self, size: int, epoch: int, *, shuffled: bool) -> np.ndarray:
        if not shuffled:
            return np.arange(size, dtype=np.int64)
        return block_order(size, self._shape.seed, epoch, self._state.block)

    def _fill(self, builder: RowsBuilder, first_row: int, progress: Callable[[int], None]) -> None:
        began_epoch = False
        while len(builder) < self._buffer_size:
            taken = self._stream.next()
            if taken is not None:
                builder.add(taken.documents)
                progress(len(builder))
            elif len(builder):
                return
            elif began_epoch:
                raise nothing_left(", ".join(entry.report.name for entry in self._stream.sets))
            else:
                self._stream.begin_epoch(first_row)
                began_epoch = True
