"""The producer process of a machine, which reads, tokenizes and writes blocks ahead of the machine's ranks.

Local rank 0 requests blocks, and the process keeps the stream open between requests. It ignores the signals that stop a
run, since ranks need rows until their last step. Ranks and their data loader processes share its folder:

    FOLDER/block-NUMBER-FIRST-ROWS/  a complete block, with rows FIRST to FIRST + ROWS - 1 of the run
    FOLDER/doing.json                the producer's current activity, for users

The names are the index: no file is read to find the block of a row. Blocks and files appear atomically, by a rename.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatune.data.cache import free_space, get_or_build, is_full
from megatune.data.cache.files import owned_folder, remove_abandoned
from megatune.data.cache.key import versioned
from megatune.data.pipeline import DatasetState, Pipeline
from megatune.data.report import DatasetReport, TokenReport, adapter_of, check_bad_rows
from megatune.data.rows import TokenRows
from megatune.data.streaming.blocks import BlockMeta, MixedStream, StreamState
from megatune.data.streaming.sharing import Exchange, Machines
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.processes import when_parent_ends

Look = Callable[[], MegatuneError | None]  # polled while waiting; returns an error if no more blocks will come

END_SIGNAL = signal.SIGUSR1
END_SECONDS = 3.0  # time to exit after the signal
EVALUATION = "evaluation"  # the part with held-out rows

_EVALUATION_META = "evaluation.json"
_BLOCK = re.compile(r"block-(\d+)-(\d+)-(\d+)")
_DOING_FILE = "doing.json"
_POLL_SECONDS = 0.02
_LOOK_SECONDS = 0.5


class BlockPlace(NamedTuple):
    """The folder of a block, and its rows of the run."""

    number: int
    first_row: int
    rows: int
    folder: Path

    @property
    def stop_row(self) -> int:
        """The first row after it."""
        return self.first_row + self.rows


@dataclass(frozen=True, slots=True)
class StreamFolder:
    """The folder of blocks; picklable for data loader processes."""

    path: Path

    @classmethod
    def make(cls, parent: Path, name: str) -> StreamFolder:
        """Create a folder in the cache or, if that is not writable, in the directory for temporary files.

        Raises:
            MegatuneError: neither is writable (exit code 73).
        """
        try:
            parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(parent)
            return cls(owned_folder(parent, name))
        except OSError as error:
            try:
                return cls(Path(tempfile.mkdtemp(prefix=f"megatune-stream-{name}-")))
            except OSError:
                what, why = "cannot write the rows that are read ahead", error.strerror or str(error)
                raise MegatuneError(Finding(what, str(parent), why), ExitCode.CANNOT_WRITE) from error

    def remove(self) -> None:
        """Delete the folder, ignoring errors."""
        shutil.rmtree(self.path, ignore_errors=True)

    def blocks(self) -> list[BlockPlace]:
        """Return the existing blocks, by number."""
        matches = filter(None, map(_BLOCK.fullmatch, os.listdir(self.path)))
        return sorted(BlockPlace(int(m[1]), int(m[2]), int(m[3]), self.path / m.string) for m in matches)

    def publish(self, draft: Path, number: int, first_row: int, rows: int) -> None:
        """Make a written block visible."""
        draft.rename(self.path / f"block-{number:08}-{first_row:012}-{rows}")

    def release(self, row: int) -> None:
        """Delete the blocks that end before this row, and touch the folder to show other machines that it is in use."""
        with contextlib.suppress(OSError):
            os.utime(self.path)
        for block in self.blocks():
            if block.stop_row > row:
                return
            shutil.rmtree(block.folder, ignore_errors=True)

    def set_activity(self, activity: str) -> None:
        """Record the producer's current activity."""
        draft = self.path / f".{_DOING_FILE}"
        draft.write_text(json.dumps(activity), encoding="utf-8")
        draft.replace(self.path / _DOING_FILE)

    def activity(self) -> str:
        """Return the producer's last recorded activity."""
        try:
            return str(json.loads((self.path / _DOING_FILE).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return "it has not started to read"

    def wait_for_row(self, row: int, limit: float, look: Look) -> BlockPlace:
        """Wait for the block with a row of the run.

        Args:
            limit: timeout in seconds.

        Raises:
            MegatuneError: the error that `look` returns; the timeout is reached (exit code 76).
        """
        look_at = time.monotonic()
        deadline = look_at + limit
        failure: MegatuneError | None = None
        while (found := next((b for b in self.blocks() if b.first_row <= row < b.stop_row), None)) is None:
            if failure is not None:
                raise failure
            now = time.monotonic()
            if now >= look_at:
                look_at = now + _LOOK_SECONDS
                failure = look()  # raised only if the block has still not arrived
            if now > deadline:
                why = f"{self.activity()}; ddp_timeout is {limit:g} seconds"
                fix = "raise ddp_timeout, lower buffer_size, or give it more processes with preprocessing_num_workers"
                what = "the next block of rows has not arrived from the process that reads the data"
                raise MegatuneError(Finding(what, why=why, fix=fix), ExitCode.PROCESS_DIED)
            time.sleep(_POLL_SECONDS)
        return found


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Rows held out for evaluation."""

    folder: Path  # contains the part EVALUATION
    tokens: TokenReport
    reports: tuple[DatasetReport, ...]  # their data sets: those of training with val_size, else of eval_dataset
    starts: tuple[DatasetState, ...] | None  # where training begins in each data set; None for the start

    @classmethod
    def load(cls, folder: Path) -> HeldOut:
        """Read the metadata of the rows in a folder.

        Raises:
            MegatuneError: the folder is incomplete (exit code 66).
        """
        TokenRows(folder / EVALUATION)
        try:
            content = json.loads((folder / _EVALUATION_META).read_text(encoding="utf-8"))
            return adapter_of(HeldOut).validate_python({**content, "folder": folder})
        except (OSError, ValueError, TypeError) as error:
            finding = Finding("the folder of evaluation rows is incomplete", str(folder), str(error))
            raise MegatuneError(finding, ExitCode.INPUT) from error

    def lines(self) -> list[str]:
        """Return the report as lines."""
        dropped = (line for report in self.reports for line in report.dropped_lines())
        return [f"evaluation: {self.tokens.line()}", *dropped]


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """The configuration of a producer."""

    folder: StreamFolder
    pipeline: Pipeline
    key: str  # cache key of the rows
    state: StreamState | None  # where to begin; None for the start
    machines: Machines | None = None  # machines that share the work; None for this one alone

    def held_out(self) -> HeldOut | None:
        """Return the evaluation rows, from the cache or created now; None without evaluation."""
        settings = self.pipeline.settings
        if not settings.data.val_size and not self.pipeline.evaluation:
            return None
        held_out = get_or_build(settings, f"{versioned(self.key)}-evaluation", self._hold_out, HeldOut.load)
        check_bad_rows(held_out.reports, settings.data)
        return held_out

    def _hold_out(self, folder: Path) -> None:
        """Write the first samples of the training data, which are excluded from training; or all of eval_dataset."""
        count = None if self.pipeline.evaluation else int(self.pipeline.settings.data.val_size)
        with contextlib.closing(MixedStream(self.pipeline, evaluation=count is None)) as stream:
            tokens = stream.write_part(folder, EVALUATION, islice(iter(stream.next, None), count), np.arange)
            if count is not None and tokens.samples < count:
                raise stream.nothing_left()
            # Copied before `_starts` reads further rows.
            reports = tuple(replace(deepcopy(e.report), trained=0, evaluation=e.report.trained) for e in stream.sets)
            held_out = HeldOut(folder, tokens, reports, None if count is None else _starts(stream))
        (folder / _EVALUATION_META).write_bytes(
            adapter_of(HeldOut).dump_json(held_out, exclude={"folder"}, by_alias=True)
        )

    def stream(self, held_out: HeldOut | None, exchange: Exchange | None = None) -> MixedStream:
        """Return the training data after the held-out rows."""
        pipeline = replace(self.pipeline, exchange=exchange)
        return MixedStream(pipeline, self.state, held_out.starts if held_out else None)

    def write(self, stream: MixedStream) -> BlockMeta:
        """Write the next block and publish it."""
        state = stream.state
        self.folder.set_activity(f"it was filling block {state.block} of rows, in epoch {state.epoch} of the data")
        with tempfile.TemporaryDirectory(prefix="draft-", dir=self.folder.path, ignore_cleanup_errors=True) as draft:
            meta = stream.write_block(Path(draft))
            self.folder.publish(Path(draft), meta.number, meta.start.first_row, meta.tokens.rows)
        return meta


def produce(request: StreamRequest, held_out: HeldOut | None, connection: Connection, parent: int) -> None:
    """Write a block for each message of the connection, until END_SIGNAL is received or the parent has exited.

    Args:
        connection: to the parent; the MegatuneError with the reason is sent if no more blocks will come.
        parent: the process id of the parent.
    """
    stream: MixedStream | None = None
    exchange: Exchange | None = None

    def end(*_: object) -> None:
        if stream is not None:
            with contextlib.suppress(ValueError):  # the generator is running, and stops its processes when it exits
                stream.close()
        request.folder.remove()
        sys.exit()

    def end_soon() -> None:
        os.kill(os.getpid(), END_SIGNAL)
        time.sleep(END_SECONDS)
        os._exit(0)  # the main thread hangs

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # ranks use the other cores
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(END_SIGNAL, end)
    when_parent_ends(parent, end_soon)
    try:
        exchange = None if request.machines is None else Exchange(request.machines)
        stream = request.stream(held_out, exchange)
        with contextlib.suppress(EOFError):  # the parent has ended
            while True:
                connection.recv()
                request.write(stream)
    except Exception as error:
        if exchange is not None:
            with contextlib.suppress(RuntimeError):  # the store is gone, too
                exchange.fail(str(error))
        with contextlib.suppress(OSError):  # the parent has ended
            connection.send(_as_finding(error, request.folder.path))
    signal.pause()


def _starts(stream: MixedStream) -> tuple[DatasetState, ...]:
    """Return where training begins in each data set, after the samples taken so far."""
    repeated = [entry for entry in stream.sets if entry.state.epochs]
    starts = tuple(DatasetState(entry.state.position, entry.state.rows) for entry in stream.sets)
    for entry in stream.sets:  # training reports the bad rows after the held-out ones
        entry.on_bad_row = lambda sample, error: None
    used_up = [entry for entry in stream.sets if not entry.has_next()]
    # With mix_strategy concat all of a data set may be held out.
    if repeated or (used_up and stream.strategy != "concat") or len(used_up) == len(stream.sets):
        raise stream.nothing_left(repeated or used_up)
    return starts


def _as_finding(error: Exception, folder: Path) -> MegatuneError:
    if isinstance(error, MegatuneError):
        return error
    if isinstance(error, OSError) and is_full(error):
        what = "no room for the rows that are read ahead"
        fix = "name a folder with more room as $MEGATUNE_CACHE, or make buffer_size smaller"
        return MegatuneError(Finding(what, str(folder), free_space(folder), fix), ExitCode.CANNOT_WRITE)
    traceback.print_exception(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = traceback.format_exception_only(error)[-1].strip()
    code = ExitCode.OUT_OF_MEMORY if isinstance(error, MemoryError) else ExitCode.INTERNAL
    finding = Finding("the process that reads the data failed", f"{Path(frame.filename).name}:{frame.lineno}", text)
    return MegatuneError(finding, code)
