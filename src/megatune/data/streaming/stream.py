"""A rank's interface to a stream: starts and monitors the producer, waits for blocks, and returns the rows of steps."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatune.data.rows import Document, ExtraColumn, TokenRows
from megatune.data.store import Column
from megatune.data.streaming.blocks import ORDER_FILE, PART, BlockMeta, StreamState
from megatune.data.streaming.producer import (
    END_SECONDS,
    END_SIGNAL,
    BlockPlace,
    HeldOut,
    StreamFolder,
    StreamRequest,
    produce,
)
from megatune.errors import ExitCode, Finding, MegatuneError

BLOCKS_AHEAD = 2  # blocks requested ahead of the one that is being trained
_MOST_OPEN = 4  # blocks


class Stream:
    """The stream of a machine, as used by its ranks.

    Args:
        folder: the producer's folder.
        key: cache key of the rows.
        held_out: the evaluation rows; None without evaluation.
        limit: timeout in seconds for a block.
    """

    def __init__(self, folder: StreamFolder, key: str, held_out: HeldOut | None, limit: float) -> None:
        self.folder, self.key, self.held_out, self._limit = folder, key, held_out, limit
        self._meta: BlockMeta | None = None  # of the last block that steps have reached

    def close(self) -> None:
        """Stop the producer, in the rank that started it."""

    def _ask(self, last: int) -> None:
        """Request the blocks up to this one, in the rank that started the producer."""

    def _failure(self) -> MegatuneError | None:
        """Return why the producer has failed, in the rank that started it; otherwise None."""
        return None

    def steps(self, global_batch_size: int, *, is_packed: bool, is_pairs: bool = False) -> StreamedSteps:
        """Return the rows of each step."""
        # Data loader processes wait longer than `before`, whose errors are more informative than theirs.
        return StreamedSteps(self.folder, global_batch_size, is_packed, self._limit + 60, is_pairs)

    def before(
        self, first: int, stop: int, last: int, meanwhile: Callable[[], None]
    ) -> Iterator[tuple[BlockMeta, Path]]:
        """Wait for the rows of a step.

        Args:
            first, stop: the step's rows, counted over the whole run.
            last: the end of the run's last step.

        Yields:
            The blocks that this step is the first to use, and their folders.

        Raises:
            MegatuneError: as `StreamFolder.wait_for_row`; or the producer has failed and the run needs more blocks.
        """

        def look() -> MegatuneError | None:
            meanwhile()
            return self._failure()

        failure = self._failure()
        if failure is not None and max((block.stop_row for block in self.folder.blocks()), default=0) < last:
            raise failure
        while self._meta is None or self._meta.stop_row < stop:
            row = first if self._meta is None else self._meta.stop_row
            place = self.folder.wait_for_row(row, self._limit, look)
            self._meta = BlockMeta.load(place.folder)
            self._ask(place.number + BLOCKS_AHEAD)
            yield self._meta, place.folder

    def after(self, first: int) -> None:
        """Delete the blocks that end before a step that all ranks have trained, in the rank that started the
        producer."""

    def state(self, row: int) -> StreamState:
        """Return the state to resume from if this row, the first after the last trained step, is the next one."""
        assert self._meta is not None, "no step yet"
        return self._meta.start if row < self._meta.stop_row else self._meta.end

    def epoch_after(self, row: int) -> float | None:
        """Return the fraction of epochs completed before this row; None in the first epoch, of unknown length."""
        meta = self._meta.end if self._meta is not None else None  # None if evaluation comes before the first step
        if meta is None or meta.epoch_rows is None:
            return None
        return meta.epoch + min(max(row - meta.epoch_first_row, 0) / meta.epoch_rows, 1.0)

    def summary(self) -> Iterator[str]:
        """Yield lines with the counts of rows read for the blocks used so far."""
        for report in self._meta.end.reports if self._meta is not None else ():
            yield (
                f"data: {report.name}: {report.read} rows read, {report.trained} for training, "
                f"{report.dropped.total()} left out, {report.truncated} cut to cutoff_len"
            )
            yield from ([f"    note: {note}"] if (note := report.tags_note()) else [])
            yield from (f"    {line}" for line in report.dropped_lines())


class StartedStream(Stream):
    """The stream in the rank that starts and stops the producer."""

    def __init__(self, request: StreamRequest) -> None:
        try:
            held_out = request.held_out()
        except BaseException:
            request.folder.remove()
            raise
        super().__init__(request.folder, request.key, held_out, request.pipeline.settings.run.ddp_timeout)
        self._asked = request.state.block - 1 if request.state is not None else -1  # the last requested block
        self._error: MegatuneError | None = None  # of the producer
        # Spawned: forking a rank that has used a GPU, threads or a tokenizer can deadlock.
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=produce, args=(request, held_out, theirs, os.getpid()))
        self._process.start()
        theirs.close()
        self._ask(self._asked + BLOCKS_AHEAD)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid or 0, END_SIGNAL)
        self._process.join(END_SECONDS)
        self._process.kill()
        self.folder.remove()

    def after(self, first: int) -> None:
        self.folder.release(first)

    def _ask(self, last: int) -> None:
        with contextlib.suppress(OSError):  # the producer has ended, which `_failure` reports
            while self._asked < last:
                self._connection.send(None)
                self._asked += 1

    def _failure(self) -> MegatuneError | None:
        with contextlib.suppress(EOFError, OSError):  # the producer was killed
            if self._connection.poll():
                self._error = self._connection.recv()
        return self._error or (None if self._process.is_alive() else self._died())

    def _died(self) -> MegatuneError:
        code = self._process.exitcode or 0
        what = f"the process that reads the data {f'was killed by signal {-code}' if code < 0 else 'ended'}"
        why, resume = (
            f"its last report: {self.folder.activity()}",
            "the same command continues from the last checkpoint",
        )
        fix = f"if it was killed for its memory, lower preprocessing_num_workers; {resume}"
        return MegatuneError(Finding(what, why=why, fix=fix), ExitCode.PROCESS_DIED)


class StreamedSteps:
    """`StepRows` of a stream: step s trains the rows from s * global_batch_size on, across blocks and epochs.

    Each process maps the blocks that it needs, and waits up to `limit` seconds for each.
    """

    def __init__(
        self, folder: StreamFolder, global_batch_size: int, is_packed: bool, limit: float, is_pairs: bool = False
    ) -> None:
        self.global_batch_size, self.is_packed, self.is_pairs = global_batch_size, is_packed, is_pairs
        self._folder, self._limit = folder, limit
        self._open: OrderedDict[BlockPlace, tuple[TokenRows, np.ndarray]] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._folder, self.global_batch_size, self.is_packed, self._limit, self.is_pairs)

    def lengths(self, step: int) -> list[np.ndarray]:
        return [rows.document_lengths([row]) for rows, row in map(self._find, self._numbers(step))]

    def documents(self, step: int, places: Sequence[int]) -> list[tuple[Document, ...]]:
        numbers = self._numbers(step)
        return [rows[row] for rows, row in (self._find(numbers[place]) for place in places)]

    def extras(self, step: int, places: Sequence[int]) -> Mapping[str, ExtraColumn]:
        return {}  # not supported for streamed rows

    def names(self, step: int) -> list[str]:
        places = [(number, self._place(number)) for number in self._numbers(step)]
        return [f"row {number - place.first_row} of block {place.number}" for number, place in places]

    def _numbers(self, step: int) -> range:
        return range(step * self.global_batch_size, (step + 1) * self.global_batch_size)

    def _find(self, number: int) -> tuple[TokenRows, int]:
        """Return the rows of the block with this row, and its index in them."""
        place = self._place(number)
        rows, order = self._open[place]
        return rows, int(order[number - place.first_row])

    def _place(self, number: int) -> BlockPlace:
        for place in self._open:
            if place.first_row <= number < place.stop_row:
                return place
        place = self._folder.wait_for_row(number, self._limit, lambda: None)
        self._open[place] = TokenRows(place.folder / PART), Column(place.folder / ORDER_FILE).whole()
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)
        return place
