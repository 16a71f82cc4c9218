"""Scores answers in processes on all machines of the run: actors of Ray's, each of which has its reward loaded.

A plain task of Ray's takes 5 ms of CPU time for an answer, one that says when it begins 17; a call of an actor takes
1.5, and scores several. The process keeps the time limit itself, with a thread, or with one of C where Python does not
go on, and ends with all that it has started; the driver keeps it, too, for a process that is stopped.
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

START_SECONDS = 120.0  # that a process may take before it scores
GRACE_SECONDS = 5.0  # after its limit, where Python itself does not go on

# (job, answers, seconds for each) -> what `judged` returns of each; raises TimeoutError, and the errors below
Scorer = Callable[["Job", Sequence[Answer], float], Awaitable[list[dict[str, Any]]]]


class WorkerDiedError(RewardError):
    """The process ended before it answered."""


class NotLoadedError(RewardError):
    """The process cannot load its reward; another one could not, either."""


@dataclass(frozen=True)
class Job:
    """A reward, as the process that scores is told of it.

    Attributes:
        name: of its domain.
        kind, function, arguments: see `kinds.load_reward`.
        folder, sys_path: the driver's, for what users name by Python path.
        log: what the process prints is appended there; None: to Ray's own logs.
    """

    name: str
    kind: str
    function: str | None
    arguments: Mapping[str, Any] = field(hash=False)
    folder: str
    sys_path: tuple[str, ...]
    log: Path | None


def judged(reward: Reward, answer: Answer) -> dict[str, Any]:
    """Return what a reward says of an answer, or why it says nothing; see `reply_of` and `failure_of`."""
    try:
        return reply_of(reward(answer))
    except BaseException as error:  # also SystemExit, and math-verify's TimeoutException
        return failure_of(error)


def reply_of(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict by the names of its fields, or an error."""
    if not math.isfinite(verdict.score) or not math.isfinite(verdict.correct):
        return {"error": f"the reward is {verdict.score}, correct {verdict.correct}: not a finite number"}
    return {"score": float(verdict.score), "correct": float(verdict.correct), "details": verdict.details}


def failure_of(error: BaseException) -> dict[str, Any]:
    """Return why a reward says nothing: error, and timeout where it took too long."""
    if isinstance(error, RewardError | MegatuneError):
        return {"error": str(error)}
    return {"error": f"{type(error).__name__}: {error}", "timeout": "timeout" in type(error).__name__.lower()}


def ray_scorer(strategies: Sequence[Any]) -> Scorer:
    """Return what scores on the machines that Ray's scheduling strategies name, by turns.

    Processes need no CPU that Ray counts: those are the devices. There are as many as score at the same time.
    """
    import ray

    variables = {"OMP_NUM_THREADS": "1"} | {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    fixed = {"num_cpus": 0, "runtime_env": {"env_vars": variables}}
    machines, idle = itertools.cycle(strategies), defaultdict[Job, list[Any]](list)

    async def started(job: Job) -> Any:
        kind = type(f"reward-{job.name}", (_Worker,), {})  # the name is what `ps` shows
        worker = ray.remote(kind).options(**fixed, scheduling_strategy=next(machines)).remote(job)
        try:
            failure = await asyncio.wait_for(asyncio.wrap_future(worker.load.remote().future()), START_SECONDS)
        except (TimeoutError, ray.exceptions.RayError) as error:
            raise WorkerDiedError(f"no process for the reward has started: {error or 'it took too long'}") from error
        if failure:
            raise NotLoadedError(f"the reward cannot be loaded: {failure}")
        return worker

    async def run(job: Job, answers: Sequence[Answer], limit: float) -> list[dict[str, Any]]:
        worker = idle[job].pop() if idle[job] else await started(job)
        began = time.monotonic()
        try:
            reply = asyncio.wrap_future(worker.score.remote(list(answers), limit).future())
            found: list[dict[str, Any]] = await asyncio.wait_for(reply, limit * len(answers) + 2 * GRACE_SECONDS)
        except ray.exceptions.RayActorError as error:
            if time.monotonic() - began >= limit:
                raise TimeoutError from error
            raise WorkerDiedError(
                f"the process of the reward died; its output is in {job.log or 'the logs of Ray'}"
            ) from error
        except TimeoutError:
            ray.kill(worker)
            raise
        idle[job].append(worker)
        return found

    return run


class _Worker:
    """A process that scores, one answer at a time."""

    def __init__(self, job: Job) -> None:
        self._job = job
        die_with_parent(os.getppid())
        if os.getpgrp() != os.getpid():
            os.setsid()  # so that it can end with all that it has started
        with suppress(OSError):
            os.chdir(job.folder)
        sys.path += [entry for entry in job.sys_path if entry not in sys.path]
        if job.log is not None:
            with job.log.open("a", buffering=1) as log:
                print(f"=== reward {job.name}, process {os.getpid()}", file=log)
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)

    def load(self) -> str:
        """Load the reward, and return why that cannot be."""
        try:
            load_job(self._job)
        except MegatuneError as error:
            return str(error)
        return ""

    def score(self, answers: Sequence[Answer], limit: float) -> list[dict[str, Any]]:
        """Return what `judged` says of each; this process ends where one takes longer than `limit` seconds."""
        replies = []
        for answer in answers:
            with _ending_after(limit):
                replies.append(judged(load_job(self._job), answer))
        found: list[dict[str, Any]] = json.loads(json.dumps(replies, default=str))  # of a reward's own classes
        return found


@cache
def load_job(job: Job) -> Reward:
    """Return a job's reward, loaded once in a process; see `kinds.load_reward`."""
    return load_reward(job.kind, job.function, job.arguments)


@contextmanager
def _ending_after(seconds: float) -> Iterator[None]:
    def end() -> None:
        faulthandler.dump_traceback()
        os.killpg(0, signal.SIGKILL)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    # A reward that hangs outside of Python ends this way, too.
    faulthandler.dump_traceback_later(seconds + GRACE_SECONDS, exit=True)
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()
