"""A pool of gloo ranks that is started once and runs many cases, each with as many ranks as it asks for."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import psutil

_PRELOAD = ["megatune.training.run", "megatune.verify.measure", "megatune.verify.reference", "pytest", "hypothesis"]

COLLECTIVE_SECONDS = 300  # on a busy machine a peer may be slow; one that hangs is noticed sooner, by its idleness
LOOK_SECONDS = 1.0  # between looks at what the ranks use
IDLE_SHARE = 0.01  # of a core, of all ranks together: less means that they wait for each other
SLOW_FACTOR = 10  # a machine that others use, too, may take so many times as long
SETTLE_SECONDS = 2.0  # after a first failure, for others to fail for reasons of their own


class _Worker(NamedTuple):
    """A process, our end of its pipe, and the file for where it hangs."""

    process: Any
    pipe: Connection
    stack: Path


class RankPool:
    """Processes forked from one that has imported everything; each starts with the first `run` that needs it.

    Args:
        size: the most ranks that a case may ask for.
    """

    def __init__(self, size: int) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._size = size
        self._workers: list[_Worker] = []
        self._num_started = 0
        self._stacks = tempfile.TemporaryDirectory()

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, limit: float = 30.0) -> list[Any]:
        """Call function(*args) on `world_size` ranks that can talk to each other; answers by rank.

        A rank that fails or that hangs fails the case, by its number; the case's processes end, and others start when
        they are needed. Ranks hang when together they have used no processor time to speak of for `limit` seconds: a
        busy machine makes them slow, not idle.

        Args:
            function: of a module that can be imported here; test modules can.
            limit: seconds without work; a case that works ends after SLOW_FACTOR times as long.
        """
        assert world_size <= self._size
        _check_devices(world_size)
        self._start(world_size)
        with tempfile.TemporaryDirectory() as folder:
            for rank, worker in enumerate(self._workers[:world_size]):
                # The function's module may lie in a folder that pytest put on the path after this process started, and
                # the process may have started in a folder of another test's.
                here = (os.getcwd(), sys.path)
                store = os.path.join(folder, "store")
                worker.pipe.send((rank, world_size, store, here, pickle.dumps((function, args))))
            answers = self._collect(world_size, limit)
        failed = {rank: text for rank, (text, _) in answers.items() if text}
        silent = [rank for rank in range(world_size) if rank not in answers]
        if failed or silent:
            stacks = {} if failed else {rank: self._stack(rank) for rank in silent}
            self._end(world_size)
            reports = "\n".join(f"rank {rank}:\n{text}" for rank, text in {**failed, **stacks}.items())
            raise AssertionError(f"no answer from ranks {silent}\n{reports}" if silent else reports)
        return [answers[rank][1] for rank in range(world_size)]

    def _collect(self, world_size: int, limit: float) -> dict[int, tuple[str, Any]]:
        pipes = {worker.pipe: rank for rank, worker in enumerate(self._workers[:world_size])}
        answers: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + SLOW_FACTOR * limit
        idle = _Idleness([worker.process.pid for worker in self._workers[:world_size]], limit)
        while len(answers) < world_size and time.monotonic() < deadline and not idle.too_long():
            for pipe in wait([pipe for pipe, rank in pipes.items() if rank not in answers], LOOK_SECONDS):
                try:
                    answers[pipes[pipe]] = pipe.recv()
                except EOFError:
                    answers[pipes[pipe]] = ("the process died", None)
            if any(text for text, _ in answers.values()):
                deadline = min(deadline, time.monotonic() + SETTLE_SECONDS)
        return answers

    def _start(self, world_size: int) -> None:
        for _ in range(world_size - len(self._workers)):
            ours, theirs = self._context.Pipe()
            stack = Path(self._stacks.name, str(self._num_started))
            self._num_started += 1
            # A rank may have processes of its own, which load its data; it ends with its pipe.
            process = self._context.Process(target=_serve, args=(theirs, str(stack)), daemon=False)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours, stack))

    def _stack(self, rank: int) -> str:
        """Where a rank hangs."""
        worker = self._workers[rank]
        os.kill(worker.process.pid, signal.SIGUSR1)
        time.sleep(0.2)
        return worker.stack.read_text()

    def close(self) -> None:
        """End every process."""
        self._end(len(self._workers))

    def _end(self, count: int) -> None:
        """End the first processes; those behind them had no part in what failed."""
        ended, self._workers = self._workers[:count], self._workers[count:]
        for worker in ended:
            worker.process.kill()
            worker.pipe.close()
        for worker in ended:
            worker.process.join(10)


def on_device(function: Callable[..., Any], *args: Any) -> Any:
    """Call a case that makes its tensors where the ranks compute."""
    from megatune.engine import device

    with device.current():
        return function(*args)


def _check_devices(world_size: int) -> None:
    """Skip a test of more ranks than there are GPUs: NCCL refuses two on one."""
    import pytest
    import torch

    if torch.cuda.is_available() and world_size > torch.cuda.device_count():
        pytest.skip("each rank needs a GPU of its own")


class _Idleness:
    """Whether processes have used hardly any processor time for `limit` seconds."""

    def __init__(self, pids: Sequence[int], limit: float) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]
        self._limit = limit
        self._began, self._used = time.monotonic(), self._processor_seconds()

    def too_long(self) -> bool:
        used, now = self._processor_seconds(), time.monotonic()
        if used - self._used > IDLE_SHARE * self._limit:
            self._began, self._used = now, used
        return now - self._began > self._limit

    def _processor_seconds(self) -> float:
        seconds = 0.0
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                seconds += times.user + times.system
        return seconds


def _serve(pipe: Connection, stack: str) -> None:
    import torch

    torch.set_num_threads(1)
    gc.freeze()
    # A run of the training loop freezes its model, which is to go here once it has ended.
    gc.freeze = lambda: None
    with contextlib.suppress(EOFError, KeyboardInterrupt), open(stack, "w") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=False)
        while True:
            pipe.send(_answer(*pipe.recv()))


def _answer(rank: int, world_size: int, store_path: str, here: tuple[str, list[str]], call: bytes) -> tuple[str, Any]:
    """Run one case: a traceback, empty where it went well, and the function's answer."""
    import torch

    from megatune.engine import device, groups

    folder, sys.path[:] = here
    try:
        os.chdir(folder)
        device.select(rank)
        store = torch.distributed.FileStore(store_path, world_size)
        groups.init_process_group(store, rank, world_size, timeout=COLLECTIVE_SECONDS)
        function, args = pickle.loads(call)
        return "", function(*args)
    except BaseException:
        return traceback.format_exc(), None
    finally:
        with contextlib.suppress(Exception):
            groups.leave()
        # Process groups have threads, which wake up a hundred times a second, and go only with the last model that
        # refers to them.
        gc.collect()
