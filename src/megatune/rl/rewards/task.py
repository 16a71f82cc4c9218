"""Scores answers in processes on all machines of the run: Ray actors, each with its reward loaded.

A Ray task takes 5 ms of CPU time per answer, one that reports its start 17 ms; a call of an actor takes 1.5 ms and
scores several. The process enforces the time limit itself, with a Python thread, or a C thread if Python hangs, and
kills its child processes with it; the driver enforces it for processes that are stopped.
"""

from __future__ import annotations

import asyncio
import faulthandler
import itertools
import json
import math
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from megatune.errors import MegatuneError
from megatune.launch.context import die_with_parent
from megatune.rl.rewards.answer import Answer, Reward, RewardError, Verdict
from megatune.rl.rewards.kinds import load_reward

START_SECONDS = 120.0  # timeout of starting a process
GRACE_SECONDS = 5.0  # after the limit, if Python itself hangs

# (spec, answers, seconds for each) -> replies, see `score_answer`; raises TimeoutError, and the errors below
Scorer = Callable[["RewardSpec", Sequence[Answer], float], Awaitable[list[dict[str, Any]]]]


class WorkerDiedError(RewardError):
    """The process ended before it returned a score."""


class NotLoadedError(RewardError):
    """The process cannot load its reward, and another one could not, either."""


@dataclass(frozen=True)
class RewardSpec:
    """The specification of a reward for the process that scores.

    Attributes:
        name: name of the domain.
        kind, function, arguments: see `kinds.load_reward`.
        folder, sys_path: of the driver, for objects that users name by Python path.
        log: file of the process's output; None for Ray's logs.
    """

    name: str
    kind: str
    function: str | None
    arguments: Mapping[str, Any] = field(hash=False)
    folder: str
    sys_path: tuple[str, ...]
    log: Path | None


def score_answer(reward: Reward, answer: Answer) -> dict[str, Any]:
    """Score an answer; return a `verdict_reply`, or an `error_reply` if the reward raises."""
    try:
        return verdict_reply(reward(answer))
    except BaseException as error:  # also SystemExit, and math-verify's TimeoutException
        return error_reply(error)


def verdict_reply(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as a dict, or an error if its numbers are not finite."""
    if not math.isfinite(verdict.score) or not math.isfinite(verdict.correct):
        return {"error": f"the reward is {verdict.score}, correct {verdict.correct}: not a finite number"}
    return {"score": float(verdict.score), "correct": float(verdict.correct), "details": verdict.details}


def error_reply(error: BaseException) -> dict[str, Any]:
    """Return the reason why there is no score: error, and timeout if it took too long."""
    if isinstance(error, RewardError | MegatuneError):
        return {"error": str(error)}
    return {"error": f"{type(error).__name__}: {error}", "timeout": "timeout" in type(error).__name__.lower()}


def ray_scorer(strategies: Sequence[Any]) -> Scorer:
    """Return a scorer that starts processes on the machines of Ray's scheduling strategies, round-robin.

    Processes reserve none of Ray's CPUs, which represent devices. There are as many as score at the same time.
    """
    import ray

    variables = {"OMP_NUM_THREADS": "1"} | {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    fixed = {"num_cpus": 0, "runtime_env": {"env_vars": variables}}
    machines, idle = itertools.cycle(strategies), defaultdict[RewardSpec, list[Any]](list)

    async def started(spec: RewardSpec) -> Any:
        kind = type(f"reward-{spec.name}", (_Worker,), {})  # `ps` shows the name
        worker = ray.remote(kind).options(**fixed, scheduling_strategy=next(machines)).remote(spec)
        try:
            failure = await asyncio.wait_for(asyncio.wrap_future(worker.load.remote().future()), START_SECONDS)
        except (TimeoutError, ray.exceptions.RayError) as error:
            raise WorkerDiedError(f"no process for the reward has started: {error or 'it took too long'}") from error
        if failure:
            raise NotLoadedError(f"the reward cannot be loaded: {failure}")
        return worker

    async def run(spec: RewardSpec, answers: Sequence[Answer], limit: float) -> list[dict[str, Any]]:
        worker = idle[spec].pop() if idle[spec] else await started(spec)
        began = time.monotonic()
        try:
            reply = asyncio.wrap_future(worker.score.remote(list(answers), limit).future())
            found: list[dict[str, Any]] = await asyncio.wait_for(reply, limit * len(answers) + 2 * GRACE_SECONDS)
        except ray.exceptions.RayActorError as error:
            if time.monotonic() - began >= limit:
                raise TimeoutError from error
            log = spec.log or "the logs of Ray"
            raise WorkerDiedError(f"the process of the reward died; its output is in {log}") from error
        except TimeoutError:
            ray.kill(worker)
            raise
        idle[spec].append(worker)
        return found

    return run


class _Worker:
    """A process that scores, one answer at a time."""

    def __init__(self, spec: RewardSpec) -> None:
        self._spec = spec
        die_with_parent(os.getppid())
        if os.getpgrp() != os.getpid():
            os.setsid()  # so that its process group can be killed
        with suppress(OSError):
            os.chdir(spec.folder)
        sys.path += [entry for entry in spec.sys_path if entry not in sys.path]
        if spec.log is not None:
            with spec.log.open("a", buffering=1) as log:
                print(f"=== reward {spec.name}, process {os.getpid()}", file=log)
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)

    def load(self) -> str:
        """Load the reward; return the error, "" without one."""
        try:
            cached_reward(self._spec)
        except MegatuneError as error:
            return str(error)
        return ""

    def score(self, answers: Sequence[Answer], limit: float) -> list[dict[str, Any]]:
        """Score each answer; this process kills itself if one takes longer than `limit` seconds."""
        replies = []
        for answer in answers:
            with _time_limit(limit):
                replies.append(score_answer(cached_reward(self._spec), answer))
        found: list[dict[str, Any]] = json.loads(json.dumps(replies, default=str))  # without a reward's own classes
        return found


@cache
def cached_reward(spec: RewardSpec) -> Reward:
    """Load the reward of a specification, once per process; see `kinds.load_reward`."""
    return load_reward(spec.kind, spec.function, spec.arguments)


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def end() -> None:
        faulthandler.dump_traceback()
        os.killpg(0, signal.SIGKILL)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    # This also ends a reward that hangs outside of Python.
    faulthandler.dump_traceback_later(seconds + GRACE_SECONDS, exit=True)
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()
