"""Objects that actors of the tests are made of. Only those that send or take weights import torch, which takes longer
than all else that an actor does at its start."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.launch.context import RankContext
from megatune.rl.rollout.server import EngineServer

if TYPE_CHECKING:
    import torch

    from megatune.rl.transport import PackedBucket, Route


def server(context: RankContext, start: int = 0) -> EngineServer:
    """Return a worker that runs as engines do."""
    return EngineServer(context, lambda: Worker(context, start))  # type: ignore[arg-type, return-value]


class Worker:
    """Does what tests ask for."""

    def __init__(self, context: RankContext, start: int = 0) -> None:
        self.context, self.number = context, start
        self.taken: dict[str, Any] = {}
        self.version, self.doomed, self.is_early = 0, 0, False

    def add(self, value: int) -> tuple[int, int]:
        self.number += value
        return self.context.rank, self.number

    def where(self) -> tuple[int, int, str, str | None, str | None]:
        context = self.context
        variables = os.environ.get("MASTER_PORT"), os.environ.get("MARK")
        return context.world_size, context.local_rank, context.master_addr, *variables

    def pid(self) -> int:
        return os.getpid()

    def child(self) -> int:
        return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid

    def work(self, phase: str, step: int, seconds: float, beat: float | None = None) -> None:
        """Take `seconds`, with a beat that allows for so many."""
        self.context.beat(phase, step, limit=beat)
        time.sleep(seconds)

    def refuse(self, text: str) -> None:
        raise MegatuneError(Finding(text), ExitCode.INPUT)

    def fail(self, text: str, seconds: float = 0.0) -> None:
        time.sleep(seconds)
        self.context.beat("train", 7)
        raise RuntimeError(text)

    def join(self) -> None:
        """Meet the other ranks, as a role with a model does."""
        from types import SimpleNamespace

        from megatune.rl.worker.model import ModelWorker

        self.context.beat("join", 0)
        run = SimpleNamespace(ddp_timeout=60)
        ModelWorker.join(SimpleNamespace(context=self.context, settings=SimpleNamespace(run=run)))  # type: ignore

    def size(self, array: Any) -> tuple[int, bool]:
        return len(array), array.flags.writeable

    def plan(self, sizes: list[int], fail_at: int | None = None) -> None:
        """Set what a stream of weights has: a bucket of each size."""
        self.sizes, self.fail_at = sizes, fail_at

    def _weights(self) -> Iterator[dict[str, torch.Tensor]]:
        import torch

        for index, size in enumerate(self.sizes):
            self.context.beat("weights", index)
            if index == self.fail_at:
                raise RuntimeError("a tensor is missing")
            yield {f"w{index}": torch.full((size, 2), index + 0.5, dtype=torch.bfloat16), f"n{index}": torch.tensor(3)}

    def open_route(self, route: Route) -> Route:
        import torch

        from megatune.rl.transport import Sender

        self.sender = Sender(route, torch.device("cpu"))
        return self.sender.open(self.context.master_addr) if self.context.rank == 0 else route

    def join_route(self) -> None:
        if self.context.rank == 0:
            self.sender.join()

    def pack_weights(self, first: bool) -> PackedBucket | None:
        assert self.context.rank == 0
        if first:
            self.stream = self._weights()
        bucket = next(self.stream, None)
        return None if bucket is None else self.sender.pack(bucket)

    def drain_weights(self) -> None:
        assert self.context.rank > 0
        list(self._weights())

    def broadcast_weights(self) -> bool:
        from megatune.rl.broadcast import LostPeerError

        try:
            self.sender.broadcast()
        except LostPeerError:
            return False
        return True

    def free_weights(self) -> None:
        self.sender.free()

    def connect(self, route: Route, first: int) -> None:
        if self.is_early:
            self._end()
        import torch

        from megatune.rl.transport import Receiver

        self.receiver = Receiver(route, first, torch.device("cpu"))

    def begin_update(self, version: int, num_tensors: int) -> None:
        self.taken, self.expected = {}, num_tensors

    def doom(self, signum: int, is_early: bool) -> None:
        """Send this process a signal before it meets the others, or in the next update, before its third bucket; raise
        instead for -1."""
        self.doomed, self.is_early = signum, is_early

    def _end(self) -> None:
        if self.doomed < 0:
            raise RuntimeError("an illegal memory access was encountered")
        if self.doomed:
            os.kill(os.getpid(), self.doomed)

    def update(self, packed: PackedBucket) -> bool:
        from megatune.rl.broadcast import LostPeerError

        time.sleep(0.01 * self.context.rank)
        if len(self.taken) == 4:
            self._end()
        try:
            with self.receiver.opened(packed) as tensors:
                for name, tensor in tensors.items():
                    self.taken[name] = tuple(tensor.shape), str(tensor.dtype), sorted(set(tensor.view(-1).tolist()))
        except LostPeerError:
            return False
        return True

    def commit_update(self, version: int) -> None:
        assert len(self.taken) == self.expected
        self.version = version

    def state(self) -> tuple[int, dict[str, Any]]:
        return self.version, self.taken
