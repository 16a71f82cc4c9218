"""One process of the reward pool, as its pool sees it."""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any, Protocol

from megatune.rl.rewards.answer import Answer, Reward
from megatune.rl.rewards.process import judged

START_SECONDS = 120.0


class MemberDiedError(Exception):
    """The process ended, or was ended, before it answered."""


class NotLoadedError(MemberDiedError):
    """The process could not load its reward."""


class Member(Protocol):
    """Scores one answer at a time."""

    def score(self, answer: Answer, limit: float) -> dict[str, Any]:
        """Return what `process.judged` does.

        Raises:
            TimeoutError: it took longer than `limit` seconds.
            MemberDiedError: the process died.
        """
        ...

    def end(self) -> None:
        """End it, whatever it does."""
        ...


class LocalMember:
    """A reward that waits for a service: it needs no process, and keeps its limits itself."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward

    def score(self, answer: Answer, limit: float) -> dict[str, Any]:
        return judged(self._reward, answer)

    def end(self) -> None:
        pass


class ProcessMember:
    """A process in a session of its own.

    Args:
        setup: the arguments of `kinds.load_reward`.
        log: what the process prints.
    """

    def __init__(self, setup: tuple[str, str | None, Mapping[str, Any]], log: IO[bytes] | None) -> None:
        paths = [os.path.abspath(path) for path in sys.path]  # a user's function is found where it is found here
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatune.rl.rewards.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self._rest = b""
        self._send(setup)
        self._ready = False

    def score(self, answer: Answer, limit: float) -> dict[str, Any]:
        if not self._ready:
            try:
                error = self._receive(START_SECONDS).get("error")
            except TimeoutError:
                error = f"it took longer than {START_SECONDS:g} seconds"
            if error:
                raise NotLoadedError(f"the reward cannot be loaded: {error}")
            self._ready = True
        self._send((answer, limit))
        return self._receive(limit)

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # what was not yet written
                    pipe.close()

    def _send(self, message: object) -> None:
        assert self._process.stdin is not None
        try:
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._death() from error

    def _receive(self, limit: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        file = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(file, select.POLLIN)
        until = time.monotonic() + limit
        while b"\n" not in self._rest:
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                raise TimeoutError
            piece = os.read(file, 1 << 16)
            if not piece:
                raise self._death()
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _death(self) -> MemberDiedError:
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return MemberDiedError("the process closed its output")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return MemberDiedError(f"the process {how}")
