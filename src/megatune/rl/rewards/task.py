"""Scores an answer as a task of Ray's, on any machine of the run: in a process that ends where it takes too long.

The process keeps the time limit itself, with a thread, or with one of C where Python does not go on; the driver keeps
it, too, for a process that is stopped. Nothing of Ray is imported before a task is made.
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
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from megatune.errors import MegatuneError
from megatune.launch.context import die_with_parent
from megatune.rl.rewards.answer import Answer, Reward, RewardError
from megatune.rl.rewards.kinds import load_reward

START_SECONDS = 120.0  # that a process may take before it scores
GRACE_SECONDS = 5.0  # after its limit, where Python itself does not go on

# (job, answer, seconds) -> what `judged` returns; raises TimeoutError and WorkerDiedError
Scorer = Callable[["Job", Answer, float], Awaitable[dict[str, Any]]]


class WorkerDiedError(Exception):
    """The process ended before it answered."""


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
    """Return what a reward says of an answer, or why it says nothing: keys score, correct and details, or error."""
    try:
        verdict = reward(answer)
        if not math.isfinite(verdict.score) or not math.isfinite(verdict.correct):
            return {"error": f"the reward is {verdict.score}, correct {verdict.correct}: not a finite number"}
    except (RewardError, MegatuneError) as error:
        return {"error": str(error)}
    except BaseException as error:  # also SystemExit, and math-verify's TimeoutException
        return {"error": f"{type(error).__name__}: {error}", "timeout": "timeout" in type(error).__name__.lower()}
    return {"score": float(verdict.score), "correct": float(verdict.correct), "details": verdict.details}


def ray_scorer(strategies: Sequence[Any]) -> Scorer:
    """Return what scores by tasks, on the machines that Ray's scheduling strategies name, by turns.

    A task needs no CPU that Ray counts: those are the devices. How many run at a time is up to who asks.
    """
    import ray

    variables = {"OMP_NUM_THREADS": "1"} | {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    fixed = {"num_cpus": 0, "max_retries": 0, "num_returns": "streaming", "runtime_env": {"env_vars": variables}}
    task, machines, stored = ray.remote(score), itertools.cycle(strategies), cache(ray.put)

    async def run(job: Job, answer: Answer, limit: float) -> dict[str, Any]:
        options = {**fixed, "scheduling_strategy": next(machines), "name": f"reward-{job.name}"}
        said = task.options(**options).remote(stored(job), answer, limit)
        began = math.inf
        try:
            began = (await asyncio.wait_for(_next(said), START_SECONDS))["began"]
            return await asyncio.wait_for(_next(said), limit + 2 * GRACE_SECONDS)
        except ray.exceptions.RayTaskError as error:
            return {"error": f"the answer cannot be scored: {error.cause}"}
        except ray.exceptions.RayError as error:
            if time.time() - began >= limit:
                raise TimeoutError from error
            raise WorkerDiedError("the process of the reward was killed") from error
        except TimeoutError:
            ray.cancel(said, force=True)
            if began == math.inf:
                raise WorkerDiedError(f"no process for the reward started within {START_SECONDS:g} seconds") from None
            raise

    return run


async def _next(said: Any) -> dict[str, Any]:
    found: dict[str, Any] = await (await anext(said))
    return found


def score(job: Job, answer: Answer, limit: float) -> Iterator[dict[str, Any]]:
    """Yield when it begins, {"began": seconds of the epoch}, and what `judged` says; `limit` seconds later this process
    ends, with all that it has started."""
    _settle(job.folder, job.sys_path)
    _print_to(job)
    try:
        reward = load_job(job)
    except MegatuneError as error:
        yield from ({"began": time.time()}, {"error": f"the reward cannot be loaded: {error}"})
        return
    yield {"began": time.time()}
    with _ending_after(limit):
        reply = judged(reward, answer)
    yield json.loads(json.dumps(reply, default=str))  # the driver may not know a reward's own classes


@cache
def load_job(job: Job) -> Reward:
    """Return a job's reward, loaded once in a process; see `kinds.load_reward`."""
    return load_reward(job.kind, job.function, job.arguments)


@lru_cache(maxsize=1)
def _settle(folder: str, sys_path: Sequence[str]) -> None:
    """Let this process find what the driver finds, end with Ray's daemon, and have a session of its own."""
    die_with_parent(os.getppid())
    if os.getpgrp() != os.getpid():
        os.setsid()
    with suppress(OSError):
        os.chdir(folder)
    sys.path += [entry for entry in sys_path if entry not in sys.path]


@lru_cache(maxsize=1)
def _print_to(job: Job) -> None:
    if job.log is not None:
        with job.log.open("a", buffering=1) as log:
            print(f"=== reward {job.name}, process {os.getpid()}", file=log)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)


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
