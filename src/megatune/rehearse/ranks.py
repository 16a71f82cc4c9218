"""Starts ranks whose output goes into a file, ends them after a limit, and kills one where that is asked for."""

from __future__ import annotations

import contextlib
import json
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
from megatune.launch.supervisor import run_ranks
from megatune.launch.world import LOOPBACK, World, find_free_port


@dataclass(frozen=True, slots=True)
class Ended:
    """How ranks ended.

    Attributes:
        findings: the first cause, as the run itself reports it.
        struck: a rank was killed, as asked.
        log: what they printed.
    """

    code: ExitCode
    findings: tuple[Finding, ...]
    struck: bool
    log: Path


class Interrupted(Exception):  # noqa: N818  (it is what a user asked for)
    """Somebody asked the rehearsal to end. Its argument is the exit code."""


def run_alone(
    target: str,
    payload: dict[str, Any],
    processes: int,
    run_dir: Path,
    *,
    limit: float,
    strike: Callable[[], bool] | None = None,
) -> Ended:
    """Run a function in so many processes of this machine, and wait.

    Args:
        target, payload: as `launch.supervisor.run_ranks` takes them.
        limit: seconds until all of them are killed.
        strike: the last rank is killed once this returns True.

    Raises:
        Interrupted: Ctrl-C or SIGTERM came.
    """
    world = local_world(processes)
    run_dir.mkdir(parents=True, exist_ok=True)
    log = run_dir / "output.log"
    watcher = Watcher(limit, strike, processes - 1)
    with output_into(log):
        code = run_ranks(target, payload, world, run_dir, hang_timeout=limit, on_poll=watcher)
    if not watcher.late and not watcher.struck and code in (ExitCode.INTERRUPTED, ExitCode.STOPPED):
        raise Interrupted(code)
    findings = _reported(run_dir)
    if watcher.late:
        findings = (too_late(limit), *findings)
        code = ExitCode.PROCESS_DIED
    return Ended(ExitCode(code), findings, watcher.struck, log)


def too_late(limit: float) -> Finding:
    """Say that ranks were ended at their limit."""
    return Finding(f"not done within {limit:.0f} s", why="every wait of a rehearsal has a limit")


def local_world(processes: int) -> World:
    """Return processes of this machine, on a port that is free now."""
    return World(nnodes=1, node_rank=0, nproc_per_node=processes, master_addr=LOOPBACK, master_port=find_free_port())


@contextlib.contextmanager
def output_into(log: Path) -> Iterator[None]:
    """Write what this process and its children print into a file."""
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


def _reported(run_dir: Path) -> tuple[Finding, ...]:
    """Return the findings of a run's report; none where it has none."""
    with contextlib.suppress(OSError, ValueError):
        ended = json.loads((run_dir / "report.json").read_text())
        return tuple(Finding(**each) for each in ended["findings"])
    return ()


class Watcher:
    """Looks at the ranks while their supervisor waits for them (`run_ranks`), and kills what is to be killed.

    Args:
        limit: seconds until all of them are killed.
        strike: one is killed once this returns True; None kills none.
        rank: which one.

    Attributes:
        struck: the rank was killed.
        late: all were, at the limit.
    """

    def __init__(self, limit: float, strike: Callable[[], bool] | None = None, rank: int = 0) -> None:
        self._deadline, self._strike, self._rank = time.monotonic() + limit, strike, rank
        self.struck = self.late = False

    def __call__(self, processes: RankProcesses) -> None:
        if time.monotonic() > self._deadline:
            self.late = True
            processes.kill()
        elif self._strike is not None and not self.struck and self._strike():
            self.struck = any(state.rank == self._rank for state in processes.alive())
            processes.send(signal.SIGKILL, self._rank)
