"""Encoding in this process, or in several; the order of results is that of the samples either way."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, islice, pairwise, repeat
from typing import Any, TypeVar

import numpy as np

from megatune.data.bad_rows import RowError, UnsupportedRow
from megatune.data.conversation import Example
from megatune.data.encode import Encoded, Encoder
from megatune.data.pictures import DocumentPicture
from megatune.data.processes import when_parent_ends
from megatune.data.rows import Document
from megatune.data.samples import NO_FACTS, Facts, Result, RowReader, Sample
from megatune.errors import ExitCode, MegatuneError

T = TypeVar("T")

CHUNK_ROWS = 256
CHUNK_BYTES = 2**24  # of pictures that rows hold
CHUNK_TIMEOUT = 600.0  # seconds for one chunk, the start of its process included
CHUNKS_AT_ONCE = 2  # in one process
CHUNKS_AHEAD = 3  # for each other process, so that none waits
MOST_CHUNKS = 64  # for each process, so that memory stays bounded

# What encoding starts from: an example, or the fields of a row that is read first.
Item = Example | Mapping[str, Any]
# What becomes of it, what is known beside, and its example where this process read it; an UnsupportedRow ends the run.
Outcome = tuple[Encoded | RowError | UnsupportedRow, Facts, Example | None]
# What a worker sends: tokens and labels of all documents, their lengths and pictures, and for each item its number of
# documents, whether it was cut, its length before, and its margin, or why it has none; and the facts.
_Compact = tuple[
    np.ndarray,
    np.ndarray,
    list[int],
    list[tuple[DocumentPicture, ...]],
    list[tuple[int, bool, int, float] | RowError | UnsupportedRow],
    list[Facts],
]


def encode_all(
    encoder: Encoder, samples: Iterable[Sample], num_workers: int, reader: RowReader | None = None
) -> Generator[Result, None, None]:
    """Yield every sample with its token rows, in order, read and encoded in `num_workers` processes, of which this is
    one.

    Args:
        reader: of samples whose example is not read; it gives them their facts, and the example where this process
            reads it.

    Raises:
        MegatuneError: a worker process died or hung (exit code 76), or a row needs what is not built (64).
    """
    iterator = iter(samples)
    holds_pictures = reader is not None and reader.pictures
    chunks = iter(lambda: _chunk(iterator, holds_pictures), [])
    work = _Work(encoder, reader)
    # Objects come by the million here: the garbage collector's passes over them must not look at every module, too.
    # A heap that is frozen already stays as it is: a rank's is, since its pages are shared.
    frozen_here = gc.get_freeze_count() == 0
    if frozen_here:
        gc.freeze()
    # Said aloud, so that tokenizers does not warn in the worker processes that a data loader forks later.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        first = next(chunks, [])
        chunks = chain([first], chunks)
        looks_up = len(first) == CHUNK_ROWS and encoder.use_words()
        if num_workers > 1:
            yield from _encode_in_processes(work, chunks, num_workers)
        elif looks_up:
            for chunk in chunks:
                yield from _merged(chunk, work.encode_samples(chunk), reader)
        else:
            yield from _encode_in_threads(work, chunks)
    finally:
        if frozen_here:
            gc.unfreeze()


@dataclass(frozen=True, slots=True)
class _Work:
    """What is done with rows; picklable."""

    encoder: Encoder
    reader: RowReader | None

    def encode(self, items: Sequence[Item]) -> list[Outcome]:
        """Return what becomes of each item."""
        read = [self._read(item) for item in items]
        examples = [each for each, _ in read if not isinstance(each, RowError | UnsupportedRow)]
        encoded = iter(self.encoder.encode(examples))
        return [
            (each, facts, None) if isinstance(each, RowError | UnsupportedRow) else (next(encoded), facts, each)
            for each, facts in read
        ]

    def encode_samples(self, chunk: Sequence[Sample]) -> list[Outcome]:
        """Encode those that are not refused already."""
        return self.encode(_items(chunk))

    def _read(self, item: Item) -> tuple[Example | RowError | UnsupportedRow, Facts]:
        if isinstance(item, Mapping):
            assert self.reader is not None
            return self.reader.read(item)
        return item, NO_FACTS


def _items(chunk: Iterable[Sample]) -> list[Item]:
    items = (sample.row.fields if sample.example is None else sample.example for sample in chunk)
    return [item for item in items if not isinstance(item, RowError)]


def _merged(chunk: list[Sample], outcomes: Iterable[Outcome], reader: RowReader | None) -> Iterator[Result]:
    """Yield results of the samples that were encoded, and of those that were refused already, in one order."""
    following = iter(outcomes)
    for sample in chunk:
        if isinstance(sample.example, RowError):
            yield sample, sample.example
            continue
        encoded, sample.facts, sample.example = next(following)
        if isinstance(encoded, UnsupportedRow):
            assert reader is not None
            raise reader.refused(sample, encoded) from encoded
        yield sample, encoded


def _chunk(samples: Iterator[Sample], holds_pictures: bool) -> list[Sample]:
    """Take the next samples, fewer where their rows hold the content of large pictures."""
    if not holds_pictures:
        return list(islice(samples, CHUNK_ROWS))
    chunk, size = [], 0
    for sample in islice(samples, CHUNK_ROWS):
        chunk.append(sample)
        size += _num_bytes(sample.row.fields)
        if size > CHUNK_BYTES:
            break
    return chunk


def _num_bytes(value: object) -> int:
    """Count what a row holds of a picture."""
    if isinstance(value, Mapping):
        return sum(map(_num_bytes, value.values()))
    if isinstance(value, list):
        return sum(map(_num_bytes, value))
    return len(value) if isinstance(value, bytes | str) else 0


def _encode_in_threads(work: _Work, chunks: Iterator[list[Sample]]) -> Iterator[Result]:
    """Render one chunk while another is tokenised: tokenising takes most of the time, without Python's lock."""
    pool = ThreadPoolExecutor(CHUNKS_AT_ONCE)
    try:
        yield from _in_order(
            chunks,
            CHUNKS_AT_ONCE + 1,
            lambda chunk: pool.submit(work.encode_samples, chunk),
            Future.result,
            work.reader,
        )
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _encode_in_processes(work: _Work, chunks: Iterator[list[Sample]], num_workers: int) -> Iterator[Result]:
    # Processes are spawned: forking one that has used a GPU, threads or a tokenizer can deadlock.
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers - 1, context, initializer=_start_worker, initargs=(work, os.getpid()))
    try:
        yield from _in_order(
            chunks,
            (num_workers - 1) * CHUNKS_AHEAD,
            lambda chunk: pool.submit(_encode_chunk, _items(chunk)),
            partial(_unpacked, timeout=CHUNK_TIMEOUT),
            work.reader,
            here=work.encode_samples,
            most=num_workers * MOST_CHUNKS,
        )
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


def _encode_chunk(items: list[Item]) -> _Compact:
    """Encode to few large arrays: many small ones take longer to send than to make."""
    outcomes = _worker_work.encode(items)
    encoded = [result for result, _, _ in outcomes if isinstance(result, Encoded)]
    documents = [document for result in encoded for document in result.documents]
    none = np.empty(0, dtype=np.int32)
    return (
        np.concatenate([none, *(document.input_ids for document in documents)]),
        np.concatenate([none, *(document.labels for document in documents)]),
        [len(document.input_ids) for document in documents],
        [document.pictures for document in documents],
        [
            (len(result.documents), result.truncated, result.length, result.margin)
            if isinstance(result, Encoded)
            else result
            for result, _, _ in outcomes
        ],
        [facts for _, facts, _ in outcomes],
    )


def _unpacked(future: Future[_Compact], timeout: float) -> list[Outcome]:
    tokens, labels, sizes, pictures, results, facts = future.result(timeout)
    spans = zip(pairwise(accumulate(sizes, initial=0)), pictures, strict=True)
    documents = (Document(tokens[start:stop], labels[start:stop], found) for (start, stop), found in spans)
    encoded = [
        Encoded(tuple(islice(documents, result[0])), *result[1:]) if isinstance(result, tuple) else result
        for result in results
    ]
    return list(zip(encoded, facts, repeat(None), strict=False))


def _in_order(
    chunks: Iterator[list[Sample]],
    ahead: int,
    submit: Callable[[list[Sample]], Future[T]],
    result: Callable[[Future[T]], list[Outcome]],
    reader: RowReader | None,
    here: Callable[[list[Sample]], list[Outcome]] | None = None,
    most: int = 0,
) -> Iterator[Result]:
    """Yield the results of all samples, in one order.

    Args:
        ahead: chunks that are submitted and not done.
        here: encodes a chunk in this process, while the next one to yield is not done.
        most: chunks that are kept, those done here included.
    """
    pending: deque[tuple[list[Sample], Future[T] | list[Outcome]]] = deque()
    while True:
        open_ones = sum(isinstance(each, Future) and not each.done() for _, each in pending)
        for chunk in islice(chunks, ahead - open_ones):
            pending.append((chunk, submit(chunk)))
        if not pending:
            return
        chunk, first = pending[0]
        if isinstance(first, Future):
            if here is not None and not first.done() and len(pending) < most and (own := next(chunks, None)):
                pending.append((own, here(own)))
                continue
            outcomes = result(first)
        else:
            outcomes = first
        pending.popleft()
        yield from _merged(chunk, outcomes, reader)
