"""A rank's end of a stream: starts, waits for and watches the producer, and makes steps of its blocks."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatune.data.rows import Document, ExtraColumn, TokenRows
from megatune.data.streaming import producer
from megatune.data.streaming.blocks import ORDER_FILE, PART, BlockMeta, StreamState
from megatune.data.streaming.folder import READY_NOTE, BlockPlace, Meanwhile, StreamFolder
from megatune.data.streaming.producer import END_SECONDS, END_SIGNAL, EVALUATION, HeldOut, StreamRequest
from megatune.errors import ExitCode, Finding, MegatuneError

_MOST_OPEN = 4  # blocks


class Stream:
    """What one rank does with the stream of its machine, beside taking rows from it.

    Args:
        folder: that the producer fills.
        limit: seconds to wait for the producer.
        process: the producer, in the rank that started it.

    Attributes:
        held_out: the evaluation rows, once `wait_ready` has returned; None without evaluation.
        key: of all that determines the rows.
    """

    def __init__(self, folder: StreamFolder, key: str, limit: float, process: subprocess.Popen[bytes] | None = None):
        self.folder, self.key = folder, key
        self.held_out: HeldOut | None = None
        self._limit, self._process = limit, process
        self._meta: BlockMeta | None = None  # of the last block that a step has come to

    @classmethod
    def start(cls, request: StreamRequest) -> Stream:
        """Start the producer. It ends with `close`, and with this process."""
        place = (str(os.getpid()), str(request.folder.path))
        command = [sys.executable, "-P", "-m", producer.__name__, *place]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert process.stdin is not None
        with process.stdin as pipe, contextlib.suppress(BrokenPipeError):
            pickle.dump(request, pipe)
        return cls(request.folder, request.key, request.pipeline.settings.run.ddp_timeout, process)

    def close(self) -> None:
        """End the producer, and remove what it made, in the rank that started it."""
        if self._process is None:
            return
        self._process.send_signal(END_SIGNAL)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.folder.remove()

    def _failure(self) -> MegatuneError | None:
        """Return why the producer has ended, which is noted for all ranks; None while it lives, and in other ranks."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        if (noted := self.folder.failure()) is not None:
            return noted
        what = f"the process that reads the data {f'was killed by signal {-code}' if code < 0 else 'ended'}"
        why, resume = f"its last report: {self.folder.doing()}", "the same command continues from the last checkpoint"
        fix = f"if it was killed for its memory, lower preprocessing_num_workers; {resume}"
        died = MegatuneError(Finding(what, why=why, fix=fix), ExitCode.PROCESS_DIED)
        self.folder.fail(died)
        return died

    def _watching(self, meanwhile: Meanwhile) -> Meanwhile:
        def watch() -> None:
            meanwhile()
            self._failure()

        return watch

    def wait_ready(self, meanwhile: Meanwhile) -> TokenRows | None:
        """Wait for the evaluation rows. They may take any time, as long as the producer makes progress.

        Raises:
            MegatuneError: as `StreamFolder.wait_for`.
        """
        look = partial(self.folder.noted, READY_NOTE)
        ready = self.folder.wait_for(look, self._limit, "evaluation data", self._watching(meanwhile), patient=True)
        if ready["evaluation"] is None:
            return None
        self.held_out = HeldOut.load(Path(ready["evaluation"]))
        return TokenRows(self.held_out.folder / EVALUATION)

    def steps(self, global_batch_size: int, *, is_packed: bool, is_pairs: bool = False) -> StreamedSteps:
        """Return the rows of each step."""
        # Loader processes wait longer than `before` does: what it raises says more than what comes from them.
        return StreamedSteps(self.folder, global_batch_size, is_packed, self._limit + 60, is_pairs)

    def before(self, first: int, stop: int, last: int, meanwhile: Meanwhile) -> Iterator[tuple[BlockMeta, Path]]:
        """Wait for the rows of a step.

        Args:
            first, stop: the step's rows, numbered over the whole run.
            last: the end of the run's last step.

        Yields:
            The blocks that this is the first step to come to, and their folders.

        Raises:
            MegatuneError: as `StreamFolder.wait_for`, and as soon as the producer is gone and the run needs more of it.
        """
        failure = self._failure()
        if failure is not None and max((block.stop_row for block in self.folder.blocks()), default=0) < last:
            raise failure
        while self._meta is None or self._meta.stop_row < stop:
            row = first if self._meta is None else self._meta.stop_row
            place = self.folder.wait_for_row(row, self._limit, self._watching(meanwhile))
            self._meta = BlockMeta.load(place.folder)
            yield self._meta, place.folder

    def after(self, first: int) -> None:
        """Delete what ends before the rows of a step that all ranks have trained."""
        if self._process is not None:
            self.folder.release(first)

    def state(self, row: int) -> StreamState:
        """Return where a run continues whose next row is this one, the first that the last step has not trained."""
        assert self._meta is not None, "no step yet"
        return self._meta.start if row < self._meta.stop_row else self._meta.end

    def epoch_after(self, row: int) -> float | None:
        """Return the epochs done when the rows before this one are trained; None in the first, of unknown length."""
        assert self._meta is not None, "no step yet"
        meta = self._meta.end
        if meta.epoch_rows is None:
            return None
        return meta.epoch + min(max(row - meta.epoch_first_row, 0) / meta.epoch_rows, 1.0)

    def summary(self) -> Iterator[str]:
        """Yield what became of every row read for the blocks that steps have come to, in words."""
        for report in self._meta.end.reports if self._meta is not None else ():
            yield (
                f"data: {report.name}: {report.read} rows read, {report.trained} for training, "
                f"{report.dropped.total()} left out, {report.truncated} cut to cutoff_len"
            )
            yield from ([f"    note: {note}"] if (note := report.tags_note()) else [])
            yield from (f"    left out {count}: {reason}" for reason, count in report.dropped.most_common())
            yield from (f"        {example}" for example in dict.fromkeys(report.examples))


class StreamedSteps:
    """`StepRows` of a stream: step s trains rows s * global_batch_size and following, across blocks and epochs.

    Each process that has one maps the blocks that it needs; it waits `limit` seconds for one that is still to come.
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
        return {}  # nothing is computed beside streamed rows

    def names(self, step: int) -> list[str]:
        places = [(number, self._place(number)) for number in self._numbers(step)]
        return [f"row {number - place.first_row} of block {place.number}" for number, place in places]

    def _numbers(self, step: int) -> range:
        return range(step * self.global_batch_size, (step + 1) * self.global_batch_size)

    def _find(self, number: int) -> tuple[TokenRows, int]:
        """Return the rows of a row's block, and which of them it is."""
        place = self._place(number)
        rows, order = self._open[place]
        return rows, int(order[number - place.first_row])

    def _place(self, number: int) -> BlockPlace:
        for place in self._open:
            if place.first_row <= number < place.stop_row:
                return place
        place = self._folder.wait_for_row(number, self._limit, lambda: None)
        self._open[place] = TokenRows(place.folder / PART), np.load(place.folder / ORDER_FILE, allow_pickle=False)
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)
        return place
