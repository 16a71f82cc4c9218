"""Encode samples in this process or in worker processes; results are in the order of the samples."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from megatune.data.bad_rows import RowError, UnsupportedRow
from megatune.data.encode import Encoded, Encoder
from megatune.data.samples import Result, RowMetadata, RowReader, Sample
from megatune.errors import ExitCode, MegatuneError
from megatune.processes import when_parent_ends

if TYPE_CHECKING:
    from megatune.data.streaming.sharing import Chunk as SharedChunk
    from megatune.data.streaming.sharing import Series

CHUNK_ROWS = 256
CHUNK_BYTES = 2**24  # of images and videos inside rows
MOST_BYTES = 2**28  # of images and videos in all pending chunks
CHUNK_TIMEOUT = 600.0  # seconds for one chunk, including the start of its process
CHUNKS_AHEAD = 3  # pending chunks per process, so that none is idle


class _Chunk(NamedTuple):
    """Samples that are encoded together, and the size in bytes of images and videos inside their rows."""

    samples: list[Sample]
    size: int

    @property
    def rows(self) -> list[Mapping[str, Any]]:
        """The rows to encode: those that could be read."""
        return [sample.row.fields for sample in self.samples if sample.row.error is None]


# The result and the metadata of each row; an UnsupportedRow ends the run.
EncodedRows = list[tuple[Encoded | RowError | UnsupportedRow, RowMetadata]]


def encode_all(
    encoder: Encoder,
    reader: RowReader,
    samples: Iterable[Sample],
    num_workers: int = 1,
    series: Series | None = None,
    side_by_side: int = 1,
) -> Generator[Result, None, None]:
    """Yield every encoded sample in order; encoding is done in `num_workers` processes, or in this one.

    Args:
        reader: parses the samples' rows, and sets their metadata.
        series: shares the work with other machines.
        side_by_side: number of data sets that are read at the same time, and share MOST_BYTES.

    Raises:
        MegatuneError: a worker process died or hung (exit code 76), or a row needs an unsupported feature (64).
    """
    chunks = _chunked(iter(samples), reader.media)
    work = _Work(encoder, reader, MOST_BYTES // side_by_side)
    # Set explicitly, so that tokenizers does not warn in the processes that a data loader forks later.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    # Otherwise the garbage collector, which runs often for millions of new objects, would traverse all modules.
    if not gc.get_freeze_count():
        gc.freeze()
    if num_workers > 1:
        yield from _encode_in_processes(work, chunks, num_workers, series)
    else:
        yield from _in_order(work, chunks, 1 if series is None else CHUNKS_AHEAD, work.submit, series)


@dataclass(frozen=True, slots=True)
class _Work:
    """Parses and encodes rows; picklable."""

    encoder: Encoder
    reader: RowReader
    most_bytes: int  # see MOST_BYTES

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> EncodedRows:
        """Parse and encode rows."""
        read = [self.reader.read(row) for row in rows]
        examples = [each for each, _ in read if not isinstance(each, RowError | UnsupportedRow)]
        encoded = iter(self.encoder.encode(examples))
        return [
            (each if isinstance(each, RowError | UnsupportedRow) else next(encoded), metadata)
            for each, metadata in read
        ]

    def submit(self, chunk: _Chunk) -> Future[EncodedRows]:
        """Encode in this process, at once."""
        future: Future[EncodedRows] = Future()
        future.set_result(self.encode(chunk.rows))
        return future


def _chunked(samples: Iterator[Sample], holds_media: bool) -> Iterator[_Chunk]:
    """Yield chunks of samples, with fewer samples if their rows contain large images or videos."""
    while taken := list(islice(samples, 1 if holds_media else CHUNK_ROWS)):
        size = 0
        if holds_media:
            size = _num_bytes(taken[0].row.fields)
            while size <= CHUNK_BYTES and len(taken) < CHUNK_ROWS and (sample := next(samples, None)) is not None:
                taken.append(sample)
                size += _num_bytes(sample.row.fields)
        yield _Chunk(taken, size)


def _num_bytes(value: object) -> int:
    """Return the bytes of images and videos inside a row's value."""
    if isinstance(value, Mapping):
        return sum(map(_num_bytes, value.values()))
    if isinstance(value, list):
        return sum(map(_num_bytes, value))
    return len(value) if isinstance(value, bytes | str) else 0


def _encode_in_processes(
    work: _Work, chunks: Iterator[_Chunk], num_workers: int, series: Series | None
) -> Iterator[Result]:
    # Spawned: forking a process that has used a GPU, threads or a tokenizer can deadlock.
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, initializer=_start_worker, initargs=(work, os.getpid()))
    try:
        ahead = num_workers * CHUNKS_AHEAD
        yield from _in_order(work, chunks, ahead, lambda chunk: pool.submit(_encode_in_worker, chunk.rows), series)
    except (BrokenProcessPool, TimeoutError) as error:
        what = "was killed, or could not start" if isinstance(error, BrokenProcessPool) else "does not answer"
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        what = f"a process that tokenizes {what}; fewer preprocessing_num_workers need less memory"
        raise MegatuneError(what, ExitCode.PROCESS_DIED) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker_work: _Work


def _start_worker(work: _Work, parent: int) -> None:
    global _worker_work
    _worker_work = work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are parallel already
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    when_parent_ends(parent, lambda: os._exit(1))  # otherwise it would wait for work forever
    gc.freeze()


def _encode_in_worker(rows: list[Mapping[str, Any]]) -> EncodedRows:
    return _worker_work.encode(rows)


def _in_order(
    work: _Work,
    chunks: Iterator[_Chunk],
    ahead: int,
    submit: Callable[[_Chunk], Future[EncodedRows]],
    series: Series | None,
) -> Iterator[Result]:
    """Yield the results of all samples, in their order.

    Args:
        ahead: maximum number of pending chunks on this machine.
        series: decides which chunks are encoded here and sent to the other machines; the others are received.
    """
    ahead *= 1 if series is None else series.exchange.machines.total
    pending: deque[tuple[_Chunk, Future[EncodedRows] | SharedChunk]] = deque()
    held = 0  # bytes of images and videos
    while True:
        while len(pending) < ahead and (held < work.most_bytes or not pending):
            if (chunk := next(chunks, None)) is None:
                break
            part = None if series is None else series.next(chunk.samples)
            if part is not None and not part.is_own:
                pending.append((chunk, part))
            else:
                future = submit(chunk)
                if part is not None:
                    future.add_done_callback(part.give)
                pending.append((chunk, future))
            held += chunk.size
        if not pending:
            return
        chunk, result = pending.popleft()
        # None if another machine has read other rows: then the chunk is encoded here.
        encoded_rows = result.result(CHUNK_TIMEOUT)
        following = iter(work.encode(chunk.rows) if encoded_rows is None else encoded_rows)
        held -= chunk.size
        for sample in chunk.samples:
            if sample.row.error is not None:
                yield sample, sample.row.error
                continue
            encoded, sample.metadata = next(following)
            if isinstance(encoded, UnsupportedRow):
                raise work.reader.refused(sample.row.where, encoded) from encoded
            yield sample, encoded
