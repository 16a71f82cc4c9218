"""Starts local ranks that write their output to a file, with a time limit, and can kill one of them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatune.errors import ExitCode, Finding
from megatune.launch.processes import RankProcesses
from megatune.launch.report import read_outcome
from megatune.launch.supervisor import run_ranks
from megatune.launch.world import LOOPBACK, World, find_free_port


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run of ranks ended.

    Attributes:
        findings: the first cause, as reported by the run.
        killed: whether a rank was killed by `kill_when`.
        log: the output of the ranks.
    """

    code: ExitCode
    findings: tuple[Finding, ...]
    killed: bool
    log: Path


class Interrupted(Exception):  # noqa: N818  (not an error)
    """The user ended the rehearsal. Its argument is the exit code."""


def run_local(
    target: str,
    payload: dict[str, Any],
    processes: int,
    run_dir: Path,
    *,
    limit: float,
    kill_when: Callable[[], bool] | None = None,
) -> RunResult:
    """Run a function in processes of this machine, and wait for them.

    Args:
        target, payload: as for `launch.supervisor.run_ranks`.
        limit: seconds until all ranks are killed.
        kill_when: the last rank is killed when this returns True.

    Raises:
        Interrupted: on Ctrl-C or SIGTERM.
    """
    world = local_world(processes)
    run_dir.mkdir(parents=True, exist_ok=True)
    log = run_dir / "output.log"
    watcher = Watcher(limit, kill_when, processes - 1)
    with redirect_output(log):
        code = run_ranks(target, payload, world, run_dir, hang_timeout=limit, on_poll=watcher)
    if not watcher.timed_out and not watcher.killed and code in (ExitCode.INTERRUPTED, ExitCode.STOPPED):
        raise Interrupted(code)
    ended = read_outcome(run_dir)
    findings = ended.findings if ended is not None else ()
    if watcher.timed_out:
        findings = (timeout_finding(limit), *findings)
        code = ExitCode.PROCESS_DIED
    return RunResult(ExitCode(code), findings, watcher.killed, log)


def timeout_finding(limit: float) -> Finding:
    """Return a finding for ranks that were killed at their time limit."""
    return Finding(f"not done within {limit:.0f} s", why="every run in a rehearsal has a time limit")


def local_world(processes: int) -> World:
    """Return a world of local processes with a free port."""
    return World(nnodes=1, node_rank=0, nproc_per_node=processes, master_addr=LOOPBACK, master_port=find_free_port())


@contextlib.contextmanager
def redirect_output(log: Path) -> Iterator[None]:
    """Redirect the output of this process and its children to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in (1, 2)]
    with log.open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, own in zip((1, 2), kept, strict=True):
            os.dup2(own, number)
            os.close(own)


class Watcher:
    """Kills ranks at a time limit, or one of them on a condition; called while `run_ranks` waits for them.

    Args:
        limit: seconds until all ranks are killed.
        kill_when: `rank` is killed when this returns True; None kills none.

    Attributes:
        killed: whether `rank` was killed.
        timed_out: whether all were killed at the limit.
    """

    def __init__(self, limit: float, kill_when: Callable[[], bool] | None = None, rank: int = 0) -> None:
        self._deadline, self._kill_when, self._rank = time.monotonic() + limit, kill_when, rank
        self.killed = self.timed_out = False

    def __call__(self, processes: RankProcesses) -> None:
        if time.monotonic() > self._deadline:
            self.timed_out = True
            processes.kill()
        elif self._kill_when is not None and not self.killed and self._kill_when():
            self.killed = any(state.rank == self._rank for state in processes.alive())
            processes.send(signal.SIGKILL, self._rank)
