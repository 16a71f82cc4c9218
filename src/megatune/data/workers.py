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
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, islice, pairwise, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from megatune.data.bad_rows import RowError, UnsupportedRow
from megatune.data.conversation import Example
from megatune.data.encode import Encoded, Encoder
from megatune.data.pictures import DocumentPicture
from megatune.data.rows import Document
from megatune.data.samples import NO_FACTS, Facts, Result, RowReader, Sample
from megatune.errors import ExitCode, MegatuneError
from megatune.processes import when_parent_ends

if TYPE_CHECKING:
    from megatune.data.streaming.sharing import Series

CHUNK_ROWS = 256
CHUNK_BYTES = 2**24  # of pictures that rows hold
MOST_BYTES = 2**28  # of pictures in all chunks that are read and not taken
CHUNK_TIMEOUT = 600.0  # seconds for one chunk, the start of its process included
CHUNKS_AHEAD = 3  # for each process, so that none waits

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


class _Chunk(NamedTuple):
    """Samples that are encoded together, and the bytes of pictures that their rows hold."""

    samples: list[Sample]
    size: int


class _Encoded(Protocol):
    """A chunk that is encoded elsewhere: a future, or a chunk of another machine."""

    def done(self) -> bool: ...

    def result(self, timeout: float | None = None) -> Any: ...


Submit = Callable[[_Chunk], _Encoded]


def encode_all(
    encoder: Encoder,
    samples: Iterable[Sample],
    num_workers: int,
    reader: RowReader | None = None,
    series: Series | None = None,
) -> Generator[Result, None, None]:
    """Yield every sample with its token rows, in order, read and encoded in `num_workers` processes, or in this one.

    Args:
        reader: of samples whose example is not read; it gives them their facts, and the example where this process
            reads it.
        series: shares the work with other machines.

    Raises:
        MegatuneError: a worker process died or hung (exit code 76), or a row needs what is not built (64).
    """
    chunks = _chunked(iter(samples), reader is not None and reader.pictures)
    work = _Work(encoder, reader)
    # Objects come by the million here: the garbage collector's passes over them must not look at every module, too.
    # A heap that is frozen already stays as it is: a rank's is, since its pages are shared.
    frozen_here = gc.get_freeze_count() == 0
    if frozen_here:
        gc.freeze()
    # Said aloud, so that tokenizers does not warn in the worker processes that a data loader forks later.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        first = list(islice(chunks, 1))
        chunks = chain(first, chunks)
        if first and len(first[0].samples) == CHUNK_ROWS:
            encoder.use_words()
        if num_workers > 1:
            yield from _encode_in_processes(work, chunks, num_workers, series)
        elif series is not None:
            ahead = CHUNKS_AHEAD * series.exchange.machines.total
            yield from _in_order(work, chunks, ahead, _shared(series, partial(_encode_now, work)))
        else:
            for chunk in chunks:
                yield from _merged(chunk, work.encode_samples(chunk), reader)
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

    def encode_samples(self, chunk: _Chunk) -> list[Outcome]:
        """Encode those that are not refused already."""
        return self.encode(_items(chunk))

    def compact(self, items: Sequence[Item]) -> _Compact:
        """Encode to few large arrays: many small ones take longer to send than to make."""
        outcomes = self.encode(items)
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

    def _read(self, item: Item) -> tuple[Example | RowError | UnsupportedRow, Facts]:
        if isinstance(item, Mapping):
            assert self.reader is not None
            return self.reader.read(item)
        return item, NO_FACTS


def _items(chunk: _Chunk) -> list[Item]:
    items = (sample.row.fields if sample.example is None else sample.example for sample in chunk.samples)
    return [item for item in items if not isinstance(item, RowError)]


def _merged(chunk: _Chunk, outcomes: Iterable[Outcome], reader: RowReader | None) -> Iterator[Result]:
    """Yield results of the samples that were encoded, and of those that were refused already, in one order."""
    following = iter(outcomes)
    for sample in chunk.samples:
        if isinstance(sample.example, RowError):
            yield sample, sample.example
            continue
        encoded, sample.facts, sample.example = next(following)
        if isinstance(encoded, UnsupportedRow):
            assert reader is not None
            raise reader.refused(sample, encoded) from encoded
        yield sample, encoded


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
    ahead = num_workers * CHUNKS_AHEAD

    def submit(chunk: _Chunk) -> Future[_Compact]:
        return pool.submit(_encode_chunk, _items(chunk))

    try:
        if series is None:
            yield from _in_order(work, chunks, ahead, submit)
        else:
            yield from _in_order(work, chunks, ahead * series.exchange.machines.total, _shared(series, submit))
    except (BrokenProcessPool, TimeoutError) as error:
        what = "was killed, or could not start" if isinstance(error, BrokenProcessPool) else "does not answer"
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        what = f"a process that tokenises {what}; fewer preprocessing_num_workers need less memory"
        raise MegatuneError(what, ExitCode.PROCESS_DIED) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _encode_now(work: _Work, chunk: _Chunk) -> Future[_Compact]:
    """Encode in this process, at once."""
    future: Future[_Compact] = Future()
    future.set_result(work.compact(_items(chunk)))
    return future


def _shared(series: Series, submit: Callable[[_Chunk], Future[_Compact]]) -> Submit:
    """Encode this machine's chunks of a series, and send them to the others; wait for theirs."""

    def submit_own(chunk: _Chunk) -> _Encoded:
        part = series.next(chunk.samples)
        if not part.is_own:
            return part
        future = submit(chunk)
        future.add_done_callback(part.give)
        return future

    return submit_own


_worker_work: _Work


def _start_worker(work: _Work, parent: int) -> None:
    global _worker_work
    _worker_work = work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    when_parent_ends(parent, lambda: os._exit(1))  # it would wait for work for ever
    gc.freeze()


def _encode_chunk(items: list[Item]) -> _Compact:
    return _worker_work.compact(items)


def _outcomes(work: _Work, chunk: _Chunk, encoded: _Encoded) -> list[Outcome]:
    """Return what became of a chunk's samples; one that another machine has made of other rows is encoded here."""
    found = encoded.result(CHUNK_TIMEOUT)
    if found is None:
        return work.encode_samples(chunk)
    tokens, labels, sizes, pictures, results, facts = found
    spans = zip(pairwise(accumulate(sizes, initial=0)), pictures, strict=True)
    documents = (Document(tokens[start:stop], labels[start:stop], found) for (start, stop), found in spans)
    made = [
        Encoded(tuple(islice(documents, result[0])), *result[1:]) if isinstance(result, tuple) else result
        for result in results
    ]
    return list(zip(made, facts, repeat(None), strict=False))


def _in_order(work: _Work, chunks: Iterator[_Chunk], ahead: int, submit: Submit) -> Iterator[Result]:
    """Yield the results of all samples, in one order.

    Args:
        ahead: chunks that are submitted and not taken.
    """
    pending: deque[tuple[_Chunk, _Encoded]] = deque()
    held = 0  # bytes of pictures
    while True:
        while len(pending) < ahead and held < MOST_BYTES and (chunk := next(chunks, None)) is not None:
            pending.append((chunk, submit(chunk)))
            held += chunk.size
        if not pending:
            return
        chunk, first = pending.popleft()
        outcomes = _outcomes(work, chunk, first)
        held -= chunk.size
        yield from _merged(chunk, outcomes, work.reader)
