"""Reward processes on other machines of a cluster: an actor on each starts them, and passes answers on."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from megatune.rl.rewards.answer import Answer
from megatune.rl.rewards.pool import Host
from megatune.rl.rewards.process import RewardWorker, Setup, WorkerDiedError

_AT_ONCE = 1024  # calls to an actor that wait at the same time


class RewardHost:
    """Runs on each machine.

    Args:
        folder, sys_path: the driver's, for what users name by Python path.
    """

    def __init__(self, folder: str, sys_path: Sequence[str]) -> None:
        with suppress(OSError):
            os.chdir(folder)
        sys.path += [entry for entry in sys_path if entry not in sys.path]
        self._workers: dict[int, RewardWorker] = {}
        self._numbers = itertools.count()

    def start(self, setup: Setup, log: Path | None) -> int:
        """Start a process, and return its number."""
        number = next(self._numbers)
        self._workers[number] = RewardWorker(setup, log)
        return number

    def score(self, number: int, answer: Answer, limit: float) -> dict[str, Any]:
        """See `RewardWorker.score`."""
        return self._workers[number].score(answer, limit)

    def end(self, number: int) -> None:
        """See `RewardWorker.end`."""
        self._workers.pop(number).end()


class _RemoteWorker:
    """A `RewardWorker` of a host."""

    def __init__(self, host: Any, setup: Setup, log: Path | None) -> None:
        self._host, self._number = host, self._get(host.start.remote(setup, log))

    def score(self, answer: Answer, limit: float) -> dict[str, Any]:
        reply: dict[str, Any] = self._get(self._host.score.remote(self._number, answer, limit))
        return reply

    def end(self) -> None:
        self._host.end.remote(self._number)

    def _get(self, ref: Any) -> Any:
        try:
            return ray.get(ref)
        except RayActorError as error:
            raise WorkerDiedError("the machine of the process is gone") from error


def remote_hosts(strategies: Sequence[Any]) -> list[Host]:
    """Return hosts on the machines that Ray's scheduling strategies place an actor on."""
    options = {"num_cpus": 0, "max_concurrency": _AT_ONCE}
    actors = [
        ray.remote(RewardHost).options(scheduling_strategy=each, **options).remote(os.getcwd(), tuple(sys.path))
        for each in strategies
    ]
    return [lambda setup, log, actor=actor: _RemoteWorker(actor, setup, log) for actor in actors]  # type: ignore[misc]
