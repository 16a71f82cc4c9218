"""The process of an actor: sets itself up, builds the object of its role, and runs the methods that the driver calls.

It imports nothing heavy, because the class of a role may live in an environment with other libraries.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import importlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatune.launch.context import RankContext, die_with_parent, log_path, set_process_name
from megatune.launch.failure import Failure, describe_failure, error_path, write_failure
from megatune.launch.rank_main import print_failure
from megatune.launch.world import RankEnv
from megatune.processes import quick_imports
from megatune.rl.cluster.timeline import Timeline


@dataclass(frozen=True, slots=True)
class ActorConfig:
    """The configuration of an actor's process.

    Attributes:
        folder: the driver's working directory, to which paths in settings are relative.
        sys_path: the driver's sys.path, for objects that users name by Python path.
    """

    role: str
    env: RankEnv
    run_dir: Path
    folder: str
    sys_path: tuple[str, ...]


class _Process:
    """Base of all actors: their log, and the object of their role.

    Exceptions of the object are returned as a `Failure`, so that the driver need not be able to import their classes.
    """

    def __init__(self, config: ActorConfig) -> None:
        die_with_parent(os.getppid())  # Ray's raylet
        with contextlib.suppress(OSError):
            os.chdir(config.folder)
        sys.path += [entry for entry in config.sys_path if entry not in sys.path]
        self._role = config.role
        self._context = RankContext(config.env, config.run_dir, role=config.role)
        self._log = _open_log(config)
        set_process_name(f"{config.role}-{config.env.rank}")
        self._timeline = Timeline(config.run_dir, f"{config.role}-{config.env.rank}")
        error_path(config.run_dir, config.env.rank, config.role).unlink(missing_ok=True)
        self._object: Any = None

    def pid(self) -> int:
        """Return the PID of this process."""
        return os.getpid()

    def build(self, target: str, arguments: Mapping[str, Any]) -> Any:
        """Build the object that calls go to."""

        def create() -> None:
            module, _, name = target.partition(":")
            with quick_imports():
                role = getattr(importlib.import_module(module), name)
            self._object = role(self._context, **arguments)

        return self._guarded("build", create)

    def _guarded(self, phase: str, work: Any) -> Any:
        self._context.beat(phase, self._context.step)
        try:
            with self._timeline.span(phase):
                answer = work()
        except Exception as error:
            return self._fail(error)
        self._context.beat("idle", self._context.step)
        return answer

    def _fail(self, error: Exception) -> Failure:
        failure = describe_failure(error, self._context)
        with contextlib.suppress(OSError):  # a full disk: the failure is returned anyway
            write_failure(error_path(self._context.run_dir, self._context.rank, self._role), failure)
        print_failure(failure, sys.stderr)
        return failure


class RoleActor(_Process):
    """A Ray actor whose methods run one at a time, in the process's main thread."""

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        """Call a method of the object, and return its result or a `Failure`."""
        return self._guarded(method, lambda: getattr(self._object, method)(*args))


class AsyncRoleActor(_Process):
    """A Ray actor whose object runs any number of calls concurrently: `ask(method, *args)` returns a future."""

    async def call(self, method: str, args: tuple[Any, ...]) -> Any:
        """Call a method of the object, and return its result or a `Failure`."""
        try:
            with self._timeline.span(method):
                return await asyncio.wrap_future(self._object.ask(method, *args))
        except Exception as error:
            return self._fail(error)


def _open_log(config: ActorConfig) -> Any:
    """Redirect all output to the actor's log, appending; SIGUSR1 and crashes write all stacks there."""
    path = log_path(config.run_dir, f"{config.role}-{config.env.rank}")
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.open("a", buffering=1)
    now = time.strftime("%Y-%m-%d %H:%M:%S %z")
    print(f"=== {config.role} {config.env.rank}, process {os.getpid()}, {now}", file=log)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    faulthandler.enable(file=log)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    return log
