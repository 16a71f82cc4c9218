"""Encoding in this process, or in several; the order of results is that of the samples either way."""

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
CHUNK_BYTES = 2**24  # of pictures that rows hold
MOST_BYTES = 2**28  # of pictures in all chunks that are read and not taken
CHUNK_TIMEOUT = 600.0  # seconds for one chunk, the start of its process included
CHUNKS_AHEAD = 3  # for each process, so that none waits

_num_frozen = 0  # calls at work that keep the heap frozen, which was not


class _Chunk(NamedTuple):
    """Samples that are encoded together, and the bytes of pictures that their rows hold."""

    samples: list[Sample]
    size: int

    @property
    def rows(self) -> list[Mapping[str, Any]]:
        """What is to be encoded: rows that could be read."""
        return [sample.row.fields for sample in self.samples if sample.row.error is None]


class EncodedItems(NamedTuple):
    """What became of rows, in few large arrays: many small ones take longer to send than to make.

    Attributes:
        tokens, labels: int32, of all documents, one after the other.
        sizes, pictures: tokens and pictures of each document.
        results: of each row its number of documents, whether it was cut, its length before, its margin and
            its label; or why it has none. An UnsupportedRow ends the run.
        metadata: of each row.
    """

    tokens: np.ndarray
    labels: np.ndarray
    sizes: list[int]
    pictures: list[tuple[DocumentPicture, ...]]
    results: list[tuple[int, bool, int, float, tuple[float, ...] | None] | RowError | UnsupportedRow]
    metadata: list[RowMetadata]

    def each(self) -> Iterator[tuple[Encoded | RowError | UnsupportedRow, RowMetadata]]:
        """Yield what became of each row, and what else is known of it."""
        spans = zip(pairwise(accumulate(self.sizes, initial=0)), self.pictures, strict=True)
        documents = (
            Document(self.tokens[start:stop], self.labels[start:stop], found) for (start, stop), found in spans
        )
        for result, metadata in zip(self.results, self.metadata, strict=True):
            if isinstance(result, tuple):
                yield Encoded(tuple(islice(documents, result[0])), *result[1:]), metadata
            else:
                yield result, metadata


class _Promise(Protocol):
    """A chunk that is encoded elsewhere: a future, or a chunk of another machine."""

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
    """Yield every sample with its token rows, in order, read and encoded in `num_workers` processes, or in this one.

    Args:
        reader: of the samples' rows; it gives them their metadata.
        series: shares the work with other machines.
        side_by_side: data sets that are read at the same time, and share MOST_BYTES.

    Raises:
        MegatuneError: a worker process died or hung (exit code 76), or a row needs what is not built (64).
    """
    chunks = _chunked(iter(samples), reader.pictures)
    work = _Work(encoder, reader, MOST_BYTES // side_by_side)
    # Said aloud, so that tokenizers does not warn in the worker processes that a data loader forks later.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    with _frozen_heap():
        if num_workers > 1:
            yield from _encode_in_processes(work, chunks, num_workers, series)
        else:
            yield from _in_order(work, chunks, 1 if series is None else CHUNKS_AHEAD, work.submit, series)


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """Objects come by the million inside: the garbage collector's passes over them must not look at every module, too.
    A heap that is frozen already stays as it is: a rank's is, since its pages are shared."""
    global _num_frozen
    # To count what is frozen takes tens of milliseconds, and data sets that are mixed are read at the same time.
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
    """What is done with rows; picklable."""

    encoder: Encoder
    reader: RowReader
    most_bytes: int  # see MOST_BYTES

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> EncodedItems:
        """Return what becomes of each row."""
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
    """Yield chunks of samples, of fewer where their rows hold the content of large pictures."""
    while taken := list(islice(samples, 1 if holds_pictures else CHUNK_ROWS)):
        size = 0
        if holds_pictures:
            size = _num_bytes(taken[0].row.fields)
            while size <= CHUNK_BYTES and len(taken) < CHUNK_ROWS and (sample := next(samples, None)) is not None:
                taken.append(sample)
                size += _num_bytes(sample.row.fields)
        yield _Chunk(taken, size)


def _num_bytes(value: object) -> int:
    """Count what a row holds of a picture."""
    if isinstance(value, Mapping):
        return sum(map(_num_bytes, value.values()))
    if isinstance(value, list):
        return sum(map(_num_bytes, value))
    return len(value) if isinstance(value, bytes | str) else 0


def _encode_in_processes(
    work: _Work, chunks: Iterator[_Chunk], num_workers: int, series: Series | None
) -> Iterator[Result]:
    # Processes are spawned: forking one that has used a GPU, threads or a tokenizer can deadlock.
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
        what = f"a process that tokenises {what}; fewer preprocessing_num_workers need less memory"
        raise MegatuneError(what, ExitCode.PROCESS_DIED) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker_work: _Work


def _start_worker(work: _Work, parent: int) -> None:
    global _worker_work
    _worker_work = work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    when_parent_ends(parent, lambda: os._exit(1))  # it would wait for work for ever
    gc.freeze()


def _encode_in_worker(rows: list[Mapping[str, Any]]) -> EncodedItems:
    return _worker_work.encode(rows)


def _in_order(
    work: _Work, chunks: Iterator[_Chunk], ahead: int, submit: Submit, series: Series | None
) -> Iterator[Result]:
    """Yield the results of all samples, in one order.

    Args:
        ahead: chunks that are submitted here and not taken.
        series: says which chunks are encoded here; they are sent to the other machines, and theirs waited for.
    """
    ahead *= 1 if series is None else series.exchange.machines.total
    pending: deque[tuple[_Chunk, _Promise]] = deque()
    held = 0  # bytes of pictures
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
        chunk, promise = pending.popleft()
        # What another machine has made of other rows is encoded here.
        following = (promise.result(CHUNK_TIMEOUT) or work.encode(chunk.rows)).each()
        held -= chunk.size
        for sample in chunk.samples:
            if sample.row.error is not None:
                yield sample, sample.row.error
                continue
            encoded, sample.metadata = next(following)
            if isinstance(encoded, UnsupportedRow):
                raise work.reader.refused(sample.row.where, encoded) from encoded
            yield sample, encoded
