"""A rank's end of a stream: the producer is started, waited for, watched and ended from here."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from megatune.data.rows import TokenRows
from megatune.data.streaming import producer
from megatune.data.streaming.blocks import BlockMeta
from megatune.data.streaming.evaluation import PART, HeldOut
from megatune.data.streaming.folder import READY_NOTE, BlockPlace, StreamFolder
from megatune.data.streaming.producer import END_SECONDS, END_SIGNAL, Request
from megatune.data.streaming.state import StreamState
from megatune.data.streaming.steps import StreamedSteps
from megatune.data.streaming.waiting import died, wait_for, wait_for_row


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
    def start(cls, request: Request) -> Stream:
        """Start the producer. It ends with `close`, and with this process."""
        lock = request.folder.lock()
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", producer.__name__, str(os.getpid()), str(request.folder.path)],
                stdin=subprocess.PIPE,
                pass_fds=[lock],
            )
        finally:
            os.close(lock)
        assert process.stdin is not None
        with process.stdin as pipe, contextlib.suppress(BrokenPipeError):
            pickle.dump(request, pipe)
        return cls(request.folder, request.key, request.settings.run.ddp_timeout, process)

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

    def wait_ready(self, meanwhile: Callable[[], None]) -> TokenRows | None:
        """The evaluation rows. They may take any time, as long as the producer gets on with them.

        Args:
            meanwhile: called now and then.

        Raises:
            MegatuneError: as `waiting.wait_for`.
        """
        ready = wait_for(
            self.folder, lambda: self.folder.noted(READY_NOTE), self._limit, "evaluation data", meanwhile, patient=True
        )
        if ready["evaluation"] is None:
            return None
        self.held_out = HeldOut.load(Path(ready["evaluation"]))
        return TokenRows(self.held_out.folder / PART)

    def steps(self, global_batch_size: int, *, is_packed: bool) -> StreamedSteps:
        """The rows of each step."""
        # Loader processes wait longer than `before` does: what it raises says more than what comes from them.
        return StreamedSteps(self.folder, global_batch_size, is_packed=is_packed, limit=self._limit + 60)

    def before(self, first: int, stop: int, last: int, meanwhile: Callable[[], None]) -> Iterator[BlockMeta]:
        """Wait for the rows of a step.

        Args:
            first, stop: the step's rows, numbered over the whole run.
            last: the end of the run's last step.
            meanwhile: called now and then while waiting.

        Yields:
            The blocks that this is the first step to come to.

        Raises:
            MegatuneError: as `waiting.wait_for`, and as soon as the producer is gone and the run needs more of it.
        """
        self._check_producer(last)
        while self._meta is None or self._end < stop:
            row = first if self._meta is None else self._end
            place = wait_for_row(self.folder, row, self._limit, meanwhile)
            self._meta = BlockMeta.load(place.folder)
            yield self._meta

    def after(self, first: int) -> None:
        """Delete what ends before the rows of a step that all ranks have trained."""
        if self._process is not None:
            self.folder.release(first)

    def state(self, row: int) -> StreamState:
        """Where a run has to go on whose next row is this one, the first that the last step has not trained."""
        assert self._meta is not None, "no step yet"
        return self._meta.start if row < self._end else self._meta.end

    def epoch_after(self, row: int) -> float | None:
        """Epochs done when the rows before this one are trained; None in the first, whose length is not known."""
        assert self._meta is not None, "no step yet"
        meta = self._meta.end
        if meta.epoch_rows is None:
            return None
        return meta.epoch + min(max(row - meta.epoch_first_row, 0) / meta.epoch_rows, 1.0)

    def summary(self) -> Iterator[str]:
        """What became of every row read for the blocks that steps have come to, in words."""
        return iter(()) if self._meta is None else _summary(self._meta.end)

    @property
    def _end(self) -> int:
        assert self._meta is not None
        return self._meta.first_row + self._meta.rows

    def _check_producer(self, last: int) -> None:
        if self._process is None or self._process.poll() is None:
            return
        blocks: list[BlockPlace] = self.folder.blocks()
        if blocks and blocks[-1].end >= last:
            return
        code = self._process.returncode
        how = f"was killed by signal {-code}" if code < 0 else "ended"
        raise self.folder.failure() or died(self.folder, "the next block of rows", how)


def block_line(meta: BlockMeta) -> str | None:
    """What a user should know about a block; None where nothing was wrong with its rows, or the first epoch had it."""
    dropped = meta.dropped
    if not dropped or meta.epoch:
        return None
    reasons = ", ".join(f"{count} x {reason}" for reason, count in dropped.most_common())
    return f"data: {dropped.total()} of the {meta.read} rows read for block {meta.number} are left out: {reasons}"


def _summary(state: StreamState) -> Iterator[str]:
    for report in state.reports:
        yield (
            f"data: {report.name}: {report.read} rows read, {report.trained} for training, "
            f"{report.dropped.total()} left out, {report.truncated} cut to cutoff_len"
        )
        yield from (f"    left out {count}: {reason}" for reason, count in report.dropped.most_common())
        yield from (f"        {example}" for example in dict.fromkeys(report.examples))
