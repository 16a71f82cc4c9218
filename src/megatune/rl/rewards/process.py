"""A process that scores: `RewardWorker` is its parent's view, `python -m megatune.rl.rewards.process FD` what it runs.

Through a pipe come pickles: the reward's kind, function and arguments, then (Answer, limit in seconds) one at a time.
JSON goes back for each: {} when the reward is ready, then score, correct and details, or error. What the reward prints
goes to stderr.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatune.errors import MegatuneError
from megatune.launch.context import set_process_name
from megatune.processes import when_parent_ends
from megatune.rl.rewards.answer import Answer, Reward, RewardError
from megatune.rl.rewards.kinds import load_reward

START_SECONDS = 120.0
GRACE_SECONDS = 5.0  # after its limit, when a process ends itself; its parent ends it at the limit

Setup = tuple[str, str | None, Mapping[str, Any]]  # the arguments of `kinds.load_reward`


class WorkerDiedError(Exception):
    """The process ended, or was ended, before it answered."""


class NotLoadedError(WorkerDiedError):
    """The process could not load its reward."""


class RewardWorker:
    """A process in a session of its own, which scores one answer at a time.

    Args:
        log: what it prints is appended there; None: to this process's stderr.
    """

    def __init__(self, setup: Setup, log: Path | None = None) -> None:
        paths = [os.path.abspath(path) for path in sys.path]  # a user's function is found where it is found here
        self._pipe, theirs = Pipe()
        with theirs, nullcontext() if log is None else log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatune.rl.rewards.process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._ready = False
        self._setup = setup

    def score(self, answer: Answer, limit: float) -> dict[str, Any]:
        """Return what `judged` does.

        Raises:
            TimeoutError: it took longer than `limit` seconds.
            WorkerDiedError: the process died.
        """
        if not self._ready:
            try:
                error = self._asked(self._setup, START_SECONDS).get("error")
            except TimeoutError:
                error = f"it took longer than {START_SECONDS:g} seconds"
            if error:
                raise NotLoadedError(f"the reward cannot be loaded: {error}")
            self._ready = True
        return self._asked((answer, limit), limit)

    def end(self) -> None:
        """End it, whatever it does."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._pipe.close()

    def _asked(self, message: object, limit: float) -> dict[str, Any]:
        try:
            self._pipe.send(message)
            if not self._pipe.poll(limit):
                raise TimeoutError
            reply: dict[str, Any] = json.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise self._death() from error
        return reply

    def _death(self) -> WorkerDiedError:
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return WorkerDiedError("the process closed its output")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return WorkerDiedError(f"the process {how}")


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


def main() -> None:
    os.dup2(2, 1)
    when_parent_ends(os.getppid(), lambda: os.killpg(0, signal.SIGKILL))
    pipe = Connection(int(sys.argv[1]))
    setup = pipe.recv()
    set_process_name(f"reward-{setup[0]}")
    try:
        reward = load_reward(*setup)
    except MegatuneError as error:
        return _reply(pipe, {"error": str(error)})
    _reply(pipe, {})
    with suppress(EOFError):
        while True:
            answer, limit = pipe.recv()
            # A reward that hangs outside of Python ends this way, too, where nobody is left to end it.
            faulthandler.dump_traceback_later(limit + GRACE_SECONDS, exit=True)
            reply = judged(reward, answer)
            faulthandler.cancel_dump_traceback_later()
            _reply(pipe, reply)
    return None


def _reply(pipe: Connection, reply: dict[str, Any]) -> None:
    pipe.send_bytes(json.dumps(reply, default=str).encode())


if __name__ == "__main__":
    main()
