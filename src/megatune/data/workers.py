"""Encoding in this process, or in several; the order of results is that of the samples either way."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice

from megatune.data.encode import Encoded, Encoder
from megatune.data.formats import Example, RowError
from megatune.data.samples import Sample
from megatune.errors import ExitCode, MegatuneError

CHUNK_ROWS = 256
CHUNK_TIMEOUT = 600.0  # seconds for one chunk, the start of its process included
CHUNKS_AHEAD = 4  # for each process, so that memory stays bounded

Result = tuple[Sample, Encoded | RowError]


def encode_all(encoder: Encoder, samples: Iterable[Sample], num_workers: int) -> Iterator[Result]:
    """Every sample with its token rows, in order.

    Args:
        num_workers: processes to encode in; up to 1 encodes in this process.

    Raises:
        MegatuneError: a worker process died or hung (exit code 76).
    """
    chunks = _chunks(samples)
    if num_workers <= 1:
        # Said aloud, so that tokenizers does not warn in the worker processes that a data loader forks later.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        for chunk in chunks:
            yield from _merged(chunk, encoder.encode(_examples(chunk)))
    else:
        yield from _encode_in_processes(encoder, chunks, num_workers)


def _encode_in_processes(encoder: Encoder, chunks: Iterator[list[Sample]], num_workers: int) -> Iterator[Result]:
    # Processes are spawned: forking one that has used a GPU, threads or a tokenizer can deadlock.
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, initializer=_start_worker, initargs=(encoder,))
    pending: deque[tuple[list[Sample], Future[list[Encoded | RowError]]]] = deque()
    try:
        while True:
            for chunk in islice(chunks, num_workers * CHUNKS_AHEAD - len(pending)):
                pending.append((chunk, pool.submit(_encode_chunk, _examples(chunk))))
            if not pending:
                return
            chunk, future = pending.popleft()
            yield from _merged(chunk, future.result(timeout=CHUNK_TIMEOUT))
    except (BrokenProcessPool, TimeoutError) as error:
        what = "was killed, or could not start" if isinstance(error, BrokenProcessPool) else "does not answer"
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        raise MegatuneError(
            f"a process that tokenises {what}; fewer preprocessing_num_workers need less memory", ExitCode.PROCESS_DIED
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker_encoder: Encoder


def _start_worker(encoder: Encoder) -> None:
    global _worker_encoder
    _worker_encoder = encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle


def _encode_chunk(examples: list[Example]) -> list[Encoded | RowError]:
    return _worker_encoder.encode(examples)


def _chunks(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    iterator = iter(samples)
    while chunk := list(islice(iterator, CHUNK_ROWS)):
        yield chunk


def _examples(chunk: list[Sample]) -> list[Example]:
    return [sample.example for sample in chunk if not isinstance(sample.example, RowError)]


def _merged(chunk: list[Sample], encoded: list[Encoded | RowError]) -> Iterator[Result]:
    """Results for the samples that are examples, and the samples that are not, in one order."""
    results = iter(encoded)
    for sample in chunk:
        yield sample, sample.example if isinstance(sample.example, RowError) else next(results)
