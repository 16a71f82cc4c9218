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
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from megatune.data.bad_rows import RowError, UnsupportedRow
from megatune.data.encode import Encoded, Encoder
from megatune.data.pictures import DocumentPicture
from megatune.data.rows import Document
from megatune.data.samples import Result, RowMetadata, RowReader, Sample
from megatune.errors import ExitCode, MegatuneError
from megatune.processes import when_parent_ends

if TYPE_CHECKING:
    from megatune.data.streaming.sharing import Series

CHUNK_ROWS = 256
CHUNK_BYTES = 2**24  # of images and videos inside rows
MOST_BYTES = 2**28  # of images and videos in all pending chunks
CHUNK_TIMEOUT = 600.0  # seconds for one chunk, including the start of its process
CHUNKS_AHEAD = 3  # pending chunks per process, so that none is idle

_num_frozen = 0  # active calls that need the heap frozen


class _Chunk(NamedTuple):
    """Samples that are encoded together, and the size in bytes of images and videos inside their rows."""

    samples: list[Sample]
    size: int

    @property
    def rows(self) -> list[Mapping[str, Any]]:
        """The rows to encode: those that could be read."""
        return [sample.row.fields for sample in self.samples if sample.row.error is None]


class EncodedItems(NamedTuple):
    """Encoded rows in a few large arrays, which are faster to send between processes than many small ones.

    Attributes:
        tokens, labels: int32, concatenated over documents.
        sizes, pictures: length, and images and videos, of each document.
        results: for each row its number of documents, whether it was truncated, its length before truncation, its
            margin and its label; or its error. An UnsupportedRow ends the run.
        metadata: the metadata of each row.
    """

    tokens: np.ndarray
    labels: np.ndarray
    sizes: list[int]
    pictures: list[tuple[DocumentPicture, ...]]
    results: list[tuple[int, bool, int, float, tuple[float, ...] | None] | RowError | UnsupportedRow]
    metadata: list[RowMetadata]

    def each(self) -> Iterator[tuple[Encoded | RowError | UnsupportedRow, RowMetadata]]:
        """Yield the result and the metadata of each row."""
        spans = zip(pairwise(accumulate(self.sizes, initial=0)), self.pictures, strict=True)
        documents = (
            Document(self.tokens[start:stop], self.labels[start:stop], found) for (start, stop), found in spans
        )
        for result, metadata in zip(self.results, self.metadata, strict=True):
            if isinstance(result, tuple):
                yield Encoded(tuple(islice(documents, result[0])), *result[1:]), metadata
            else:
                yield result, metadata


class _Pending(Protocol):
    """A chunk that is being encoded: a future, or a chunk of another machine."""

    def result(self, timeout: float | None = None) -> EncodedItems | None: ...


Submit = Callable[[_Chunk], "Future[EncodedItems]"]


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
    chunks = _chunked(iter(samples), reader.pictures)
    work = _Work(encoder, reader, MOST_BYTES // side_by_side)
    # Set explicitly, so that tokenizers does not warn in the processes that a data loader forks later.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    with _frozen_heap():
        if num_workers > 1:
            yield from _encode_in_processes(work, chunks, num_workers, series)
        else:
            yield from _in_order(work, chunks, 1 if series is None else CHUNKS_AHEAD, work.submit, series)


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """Freeze the heap, so that the garbage collector, which runs often for millions of new objects, does not traverse
    all modules. A heap that is frozen already, such as a rank's, whose pages are shared, is left alone."""
    global _num_frozen
    # Counting frozen objects takes tens of milliseconds, and mixed data sets are read at the same time.
    frozen_here = _num_frozen > 0 or gc.get_freeze_count() == 0
    if frozen_here:
        if _num_frozen == 0:
            gc.freeze()
        _num_frozen += 1
    try:
        yield
    finally:
        if frozen_here:
            _num_frozen -= 1
            if _num_frozen == 0:
                gc.unfreeze()


@dataclass(frozen=True, slots=True)
class _Work:
    """Parses and encodes rows; picklable."""

    encoder: Encoder
    reader: RowReader
    most_bytes: int  # see MOST_BYTES

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> EncodedItems:
        """Parse and encode rows."""
        read = [self.reader.read(row) for row in rows]
        examples = [each for each, _ in read if not isinstance(each, RowError | UnsupportedRow)]
        encoded = self.encoder.encode(examples)
        documents = [one for each in encoded if isinstance(each, Encoded) for one in each.documents]
        following, none = iter(encoded), np.empty(0, dtype=np.int32)
        results = [each if isinstance(each, RowError | UnsupportedRow) else next(following) for each, _ in read]
        return EncodedItems(
            np.concatenate([none, *(document.input_ids for document in documents)]),
            np.concatenate([none, *(document.labels for document in documents)]),
            [len(document.input_ids) for document in documents],
            [document.pictures for document in documents],
            [
                (len(each.documents), each.truncated, each.length, each.margin, each.label)
                if isinstance(each, Encoded)
                else each
                for each in results
            ],
            [metadata for _, metadata in read],
        )

    def submit(self, chunk: _Chunk) -> Future[EncodedItems]:
        """Encode in this process, at once."""
        future: Future[EncodedItems] = Future()
        future.set_result(self.encode(chunk.rows))
        return future


def _chunked(samples: Iterator[Sample], holds_pictures: bool) -> Iterator[_Chunk]:
    """Yield chunks of samples, with fewer samples if their rows contain large images or videos."""
    while taken := list(islice(samples, 1 if holds_pictures else CHUNK_ROWS)):
        size = 0
        if holds_pictures:
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


def _encode_in_worker(rows: list[Mapping[str, Any]]) -> EncodedItems:
    return _worker_work.encode(rows)


def _in_order(
    work: _Work, chunks: Iterator[_Chunk], ahead: int, submit: Submit, series: Series | None
) -> Iterator[Result]:
    """Yield the results of all samples, in their order.

    Args:
        ahead: maximum number of pending chunks on this machine.
        series: decides which chunks are encoded here and sent to the other machines; the others are received.
    """
    ahead *= 1 if series is None else series.exchange.machines.total
    pending: deque[tuple[_Chunk, _Pending]] = deque()
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
        following = (result.result(CHUNK_TIMEOUT) or work.encode(chunk.rows)).each()
        held -= chunk.size
        for sample in chunk.samples:
            if sample.row.error is not None:
                yield sample, sample.row.error
                continue
            encoded, sample.metadata = next(following)
            if isinstance(encoded, UnsupportedRow):
                raise work.reader.refused(sample.row.where, encoded) from encoded
            yield sample, encoded
