"""Objects that actors of the tests are made of."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from typing import Any

from megatune.launch.context import RankContext
from megatune.rl.rollout.server import EngineServer


def server(context: RankContext, start: int = 0) -> EngineServer:
    """Return a worker that runs as engines do."""
    return EngineServer(context, lambda: Worker(context, start))  # type: ignore[arg-type, return-value]


class Worker:
    """Does what tests ask for."""

    def __init__(self, context: RankContext, start: int = 0) -> None:
        self.context, self.number = context, start
        self.taken: dict[str, Any] = {}
        self.version = 0

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

    def weights(self, sizes: list[int], fail_at: int | None = None) -> Iterator[dict[str, Any] | None]:
        import torch

        for index, size in enumerate(sizes):
            self.context.beat("weights", index)
            if index == fail_at:
                raise RuntimeError("a tensor is missing")
            whole = torch.full((size, 2), float(index), dtype=torch.bfloat16)
            yield {f"w{index}": whole} if self.context.rank == 0 else None
            self.number = index + 1

    def begin_update(self, version: int, num_tensors: int) -> None:
        self.taken, self.expected = {}, num_tensors

    def update(self, bucket: Mapping[str, Any]) -> None:
        time.sleep(self.number / 1000)
        self.taken |= {name: (tuple(tensor.shape), float(tensor.float().sum())) for name, tensor in bucket.items()}

    def commit_update(self, version: int) -> None:
        assert len(self.taken) == self.expected
        self.version = version

    def state(self) -> tuple[int, dict[str, Any]]:
        return self.version, self.taken
