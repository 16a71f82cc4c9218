"""Encoding in this process, or in several; the order of results is that of the samples either way."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import accumulate, islice, pairwise
from typing import TypeVar

import numpy as np

from megatune.data.bad_rows import RowError
from megatune.data.conversation import Example
from megatune.data.encode import Encoded, Encoder
from megatune.data.pictures import DocumentPicture
from megatune.data.rows import Document
from megatune.data.samples import Sample
from megatune.errors import ExitCode, MegatuneError

T = TypeVar("T")

CHUNK_ROWS = 256
CHUNK_BYTES = 2**24  # of pictures that rows hold
CHUNK_TIMEOUT = 600.0  # seconds for one chunk, the start of its process included
CHUNKS_AT_ONCE = 2  # in one process
CHUNKS_AHEAD = 4  # for each process, so that memory stays bounded
PARENT_LOOK_SECONDS = 1.0  # between looks whether the parent is there

Result = tuple[Sample, Encoded | RowError]
# What a worker sends: tokens and labels of all documents, their lengths and pictures, and for each example its number
# of documents, whether it was cut, its length before, and its margin; or why it has none.
_Compact = tuple[
    np.ndarray, np.ndarray, list[int], list[tuple[DocumentPicture, ...]], list[tuple[int, bool, int, float] | RowError]
]


def encode_all(encoder: Encoder, samples: Iterable[Sample], num_workers: int) -> Generator[Result, None, None]:
    """Yield every sample with its token rows, in order, encoded in `num_workers` processes; up to 1 is this one.

    Raises:
        MegatuneError: a worker process died or hung (exit code 76).
    """
    iterator = iter(samples)
    chunks = iter(lambda: _chunk(iterator), [])
    # Objects come by the million here: the garbage collector's passes over them must not look at every module, too.
    # A heap that is frozen already stays as it is: a rank's is, since its pages are shared.
    frozen_here = gc.get_freeze_count() == 0
    if frozen_here:
        gc.freeze()
    try:
        if num_workers <= 1:
            # Said aloud, so that tokenizers does not warn in the worker processes that a data loader forks later.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
            yield from _encode_in_threads(encoder, chunks)
        else:
            yield from _encode_in_processes(encoder, chunks, num_workers)
    finally:
        if frozen_here:
            gc.unfreeze()


def _chunk(samples: Iterator[Sample]) -> list[Sample]:
    """Take the next samples, fewer where their rows hold the content of large pictures."""
    chunk, size = [], 0
    for sample in islice(samples, CHUNK_ROWS):
        chunk.append(sample)
        if not isinstance(sample.example, RowError | str):
            size += sum(_num_bytes(picture.value) for picture in sample.example.pictures)
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


def _encode_in_threads(encoder: Encoder, chunks: Iterator[list[Sample]]) -> Iterator[Result]:
    """Render one chunk while another is tokenised: tokenising takes most of the time, without Python's lock."""
    pool = ThreadPoolExecutor(CHUNKS_AT_ONCE)
    try:
        yield from _in_order(
            chunks, CHUNKS_AT_ONCE + 1, lambda chunk: pool.submit(encoder.encode, chunk), Future.result
        )
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _encode_in_processes(encoder: Encoder, chunks: Iterator[list[Sample]], num_workers: int) -> Iterator[Result]:
    # Processes are spawned: forking one that has used a GPU, threads or a tokenizer can deadlock.
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, initializer=_start_worker, initargs=(encoder, os.getpid()))
    try:
        ahead = num_workers * CHUNKS_AHEAD
        result = partial(_unpacked, timeout=CHUNK_TIMEOUT)
        yield from _in_order(chunks, ahead, lambda chunk: pool.submit(_encode_chunk, chunk), result)
    except (BrokenProcessPool, TimeoutError) as error:
        what = "was killed, or could not start" if isinstance(error, BrokenProcessPool) else "does not answer"
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        what = f"a process that tokenises {what}; fewer preprocessing_num_workers need less memory"
        raise MegatuneError(what, ExitCode.PROCESS_DIED) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker_encoder: Encoder


def _start_worker(encoder: Encoder, parent: int) -> None:
    global _worker_encoder
    _worker_encoder = encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    gc.freeze()


def _end_with(parent: int) -> None:
    """End with the parent: one that is killed cannot end its processes, and they would wait for work for ever."""
    while os.getppid() == parent:
        time.sleep(PARENT_LOOK_SECONDS)
    os._exit(1)


def _encode_chunk(examples: list[Example]) -> _Compact:
    """Encode to few large arrays: many small ones take longer to send than to make."""
    results = _worker_encoder.encode(examples)
    encoded = [result for result in results if isinstance(result, Encoded)]
    documents = [document for result in encoded for document in result.documents]
    none = np.empty(0, dtype=np.int32)
    return (
        np.concatenate([none, *(document.input_ids for document in documents)]),
        np.concatenate([none, *(document.labels for document in documents)]),
        [len(document.input_ids) for document in documents],
        [document.pictures for document in documents],
        [
            result
            if isinstance(result, RowError)
            else (len(result.documents), result.truncated, result.length, result.margin)
            for result in results
        ],
    )


def _unpacked(future: Future[_Compact], timeout: float) -> list[Encoded | RowError]:
    tokens, labels, sizes, pictures, results = future.result(timeout)
    spans = zip(pairwise(accumulate(sizes, initial=0)), pictures, strict=True)
    documents = (Document(tokens[start:stop], labels[start:stop], found) for (start, stop), found in spans)
    return [
        result if isinstance(result, RowError) else Encoded(tuple(islice(documents, result[0])), *result[1:])
        for result in results
    ]


def _in_order(
    chunks: Iterator[list[Sample]],
    ahead: int,
    submit: Callable[[list[Example]], Future[T]],
    result: Callable[[Future[T]], list[Encoded | RowError]],
) -> Iterator[Result]:
    """Yield results of the samples that are examples, and the samples that are none, in one order."""
    pending: deque[tuple[list[Sample], Future[T]]] = deque()
    while True:
        for chunk in islice(chunks, ahead - len(pending)):
            examples = [sample.example for sample in chunk if not isinstance(sample.example, RowError)]
            pending.append((chunk, submit(examples)))
        if not pending:
            return
        chunk, future = pending.popleft()
        encoded = iter(result(future))
        for sample in chunk:
            yield sample, sample.example if isinstance(sample.example, RowError) else next(encoded)
