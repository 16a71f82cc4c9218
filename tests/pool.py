"""A pool of gloo ranks that is started once and runs many cases, each with as many ranks as it asks for."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

_PRELOAD = ["megatune.verify.measure", "megatune.verify.reference", "transformers.models.auto.modeling_auto"]

COLLECTIVE_SECONDS = 30  # a rank whose peers are gone gives up after this
SETTLE_SECONDS = 2.0  # after a first failure, for others to fail for reasons of their own


class RankPool:
    """Processes forked from one that has imported everything; nothing starts before the first `run`.

    Args:
        size: the most ranks that a case may ask for.
    """

    def __init__(self, size: int) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._size = size
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, limit: float = 60.0) -> list[Any]:
        """Call function(*args) on `world_size` ranks that can talk to each other; answers by rank.

        A rank that fails or has no answer after `limit` seconds fails the case, by its number; the pool starts anew.

        Args:
            function: of a module that can be imported here; test modules can.
        """
        assert world_size <= self._size
        self._start()
        with tempfile.TemporaryDirectory() as folder:
            for rank, (_, pipe) in enumerate(self._workers[:world_size]):
                # The function's module may lie in a folder that pytest put on the path after this process started.
                pipe.send((rank, world_size, os.path.join(folder, "store"), sys.path, pickle.dumps((function, args))))
            answers = self._collect(world_size, limit)
        failed = {rank: text for rank, (text, _) in answers.items() if text}
        silent = [rank for rank in range(world_size) if rank not in answers]
        if failed or silent:
            self.close()
            reports = "\n".join(f"rank {rank}:\n{text}" for rank, text in failed.items())
            raise AssertionError(f"no answer from ranks {silent} in {limit} s\n{reports}" if silent else reports)
        return [answers[rank][1] for rank in range(world_size)]

    def _collect(self, world_size: int, limit: float) -> dict[int, tuple[str, Any]]:
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._workers[:world_size])}
        answers: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + limit
        while len(answers) < world_size:
            waiting = [pipe for pipe, rank in pipes.items() if rank not in answers]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                try:
                    answers[pipes[pipe]] = pipe.recv()
                except EOFError:
                    answers[pipes[pipe]] = ("the process died", None)
            if any(text for text, _ in answers.values()):
                deadline = min(deadline, time.monotonic() + SETTLE_SECONDS)
        return answers

    def _start(self) -> None:
        for _ in range(self._size - len(self._workers)):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def close(self) -> None:
        """End every process."""
        for process, pipe in self._workers:
            process.kill()
            pipe.close()
        for process, _ in self._workers:
            process.join(10)
        self._workers = []


def _serve(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    gc.freeze()
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            pipe.send(_answer(*pipe.recv()))


def _answer(rank: int, world_size: int, store_path: str, path: list[str], call: bytes) -> tuple[str, Any]:
    """Run one case: a traceback, empty where it went well, and the function's answer."""
    import torch

    from megatune.engine import groups

    sys.path[:] = path
    try:
        store = torch.distributed.FileStore(store_path, world_size)
        groups.meet(store, rank, world_size, timeout=COLLECTIVE_SECONDS)
        function, args = pickle.loads(call)
        return "", function(*args)
    except BaseException:
        return traceback.format_exc(), None
    finally:
        with contextlib.suppress(Exception):
            groups.leave()
        # Process groups have threads, and go only with the last model that refers to them.
        gc.collect()
