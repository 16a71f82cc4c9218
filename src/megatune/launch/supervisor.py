"""Starts this machine's ranks and stays with them to the end: signals in, one report and one exit code out."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.launch.devices import count_oom_kills
from megatune.launch.failure import Kind, error_path
from megatune.launch.heartbeat import heartbeat_path
from megatune.launch.ports import ensure_port_free
from megatune.launch.processes import POLL_SECONDS, RankProcesses, RankState
from megatune.launch.protocol import StartRequest, log_path
from megatune.launch.report import (
    Outcome,
    collect_failures,
    failed_outcome,
    first_cause,
    hung_outcome,
    kind_of,
    lost_outcome,
    print_outcome,
    raised_outcome,
    write_report,
)
from megatune.launch.stacks import dump_stacks, find_hung
from megatune.launch.world import World

START_SECONDS = 600.0
HANG_SECONDS = 1800.0
GRACE_SECONDS = 600.0
# Failures come in clusters. After a strong first one the others have this long to show an earlier time; after a
# collective operation broke off, the rank that broke it has longer to fail too.
SETTLE_SECONDS = 0.3
SETTLE_COLLECTIVE_SECONDS = 3.0
OOM_SECONDS = 5.0  # from the kernel's decision to a rank's end, at most


@dataclass(frozen=True, slots=True)
class Limits:
    """How long things may take, in seconds.

    Attributes:
        start: from the start to the first rank: importing the target.
        hang: between two beats of a rank, unless the beat states a limit of its own.
        grace: from SIGTERM to the last rank's end, saving included.
    """

    start: float
    hang: float
    grace: float


def run_ranks(
    target: str,
    payload: dict[str, Any],
    world: World,
    run_dir: Path,
    *,
    hang_timeout: float = HANG_SECONDS,
    grace: float = GRACE_SECONDS,
    start_timeout: float = START_SECONDS,
    stop_file: Path | None = None,
) -> int:
    """Runs a function in every rank of this machine and waits for the end. Call it from the main thread.

    SIGTERM asks the ranks to save and stop; a second one kills them. Ctrl-C ends them at once. Kill this process in
    any way and the ranks die with it. Rank 0 writes to this process's stdout and stderr, the others to their logs.

    Args:
        target: "package.module:function", called as function(context: RankContext, payload); returns None or an exit
            code. Its module is imported once and forked, so an import must not start threads or initialise CUDA; if
            it does, each rank imports it for itself.
        payload: anything that pickles.
        run_dir: gets logs/rank-K.log, heartbeats/, rank-K.error.json and report.json.
        hang_timeout: seconds without a beat of a rank after which the run counts as hung.
        grace: seconds from SIGTERM to the end of the last rank.
        start_timeout: seconds to import the target's module.
        stop_file: asks the ranks to save and stop when it appears; run_dir/STOP by default. One that an earlier run
            left behind is removed.

    Returns:
        DONE; STOPPED if the ranks stopped on request; INTERRUPTED after Ctrl-C; else the exit code of the first
        cause, PROCESS_DIED for one that died of a signal or hung. The report is on stderr by then.

    Raises:
        MegatuneError: before any rank is started: UNAVAILABLE if the port of rank 0 is taken, CANNOT_WRITE if run_dir
            cannot be made.
    """
    run_dir = run_dir.absolute()  # a target may change its folder
    stop_file = (stop_file or run_dir / "STOP").absolute()
    request = StartRequest(target, payload, world, run_dir, stop_file, list(sys.path))
    if world.node_rank == 0:
        ensure_port_free(world.master_port)
    _prepare_run_dir(request)
    started = time.time()
    with _Requests() as requests, RankProcesses(request) as processes:
        outcome = _watch(processes, requests, Limits(start_timeout, hang_timeout, grace))
        ranks = [processes.ranks[rank] for rank in sorted(processes.ranks)]
    start_method = processes.ready["start"] if processes.ready else ""
    print_outcome(outcome)
    with contextlib.suppress(OSError):  # the outcome is told; a full disk must not replace it
        write_report(run_dir, world, outcome, ranks, started, start_method)
    return int(outcome.exit_code)


class _Requests:
    """Counts what the outside asks for while ranks run: Ctrl-C and SIGTERM."""

    def __init__(self) -> None:
        self.interrupts = 0
        self.terminations = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> _Requests:
        for number, handler in ((signal.SIGINT, self._interrupt), (signal.SIGTERM, self._terminate)):
            # A shell starts background jobs with SIGINT ignored; they are to stay so.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupts += 1

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.terminations += 1


def _prepare_run_dir(request: StartRequest) -> None:
    """Makes the folders and removes what an earlier run of these ranks left that could be taken for this one's."""
    try:
        for path in (log_path(request.run_dir, "start"), heartbeat_path(request.run_dir, 0)):
            path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MegatuneError(Finding(f"cannot write: {error}"), ExitCode.CANNOT_WRITE) from error
    for local_rank in range(request.world.nproc_per_node):
        rank = request.world.rank_env(local_rank).rank
        heartbeat_path(request.run_dir, rank).unlink(missing_ok=True)
        error_path(request.run_dir, rank).unlink(missing_ok=True)
    if request.world.node_rank == 0:
        request.stop_file.unlink(missing_ok=True)


def _watch(processes: RankProcesses, requests: _Requests, limits: Limits) -> Outcome:
    """Follows the ranks until all have ended, ending them itself where that is needed."""
    begun = time.monotonic()
    kills = _OomKills()
    stop_by: float | None = None
    while processes.pending:
        processes.poll(POLL_SECONDS)
        now = time.monotonic()
        kills.look(now)
        if requests.interrupts and stop_by is None:
            processes.end(impatient=lambda: requests.interrupts > 1)
            return Outcome("interrupted", ExitCode.INTERRUPTED, findings=(Finding("interrupted"),))
        if processes.failed():
            return _conclude_failure(processes, kills)
        if requests.terminations and not processes.ready:
            return Outcome("stopped", ExitCode.STOPPED)
        if requests.terminations and stop_by is None and processes.started:
            processes.send(signal.SIGTERM)
            stop_by = now + limits.grace
        if stop_by is not None and (now > stop_by or requests.terminations + requests.interrupts > 1):
            return _give_up_stopping(processes, limits.grace if now > stop_by else None)
        if not processes.ready and now - begun > limits.start:
            return _start_timed_out(processes, limits.start)
        if processes.overdue(limits.hang):
            return _conclude_hang(processes)
    if processes.failure is not None:
        return raised_outcome(processes.request.run_dir, processes.failure, None)
    if processes.lost:
        return lost_outcome(processes.request.run_dir, processes.zygote_signal, kills.happened())
    if processes.failed():
        return _conclude_failure(processes, kills)
    stopped = any(state.exit_code == ExitCode.STOPPED for state in processes.ranks.values())
    return Outcome("stopped", ExitCode.STOPPED) if stopped else Outcome("done", ExitCode.DONE)


class _OomKills:
    """Whether the kernel's out-of-memory killer has struck lately: a kill of hours ago, or of another container of the
    machine, says nothing about a rank that dies now."""

    def __init__(self) -> None:
        self._looked, self._before = time.monotonic(), count_oom_kills()
        self._now = self._before

    def look(self, now: float) -> None:
        """Forget what was OOM_SECONDS to twice as long ago."""
        if now - self._looked > OOM_SECONDS:
            self._looked, self._before, self._now = now, self._now, count_oom_kills()

    def happened(self) -> bool:
        """Whether it has since."""
        return count_oom_kills() > self._before


def _conclude_failure(processes: RankProcesses, kills: _OomKills) -> Outcome:
    """A rank has failed: gathers what failed with it, ends the others, and finds the first cause."""
    run_dir = processes.request.run_dir

    def strongest() -> tuple[RankState, Kind]:
        failures = collect_failures(run_dir, processes.failed())
        culprit = first_cause(processes.failed(), failures)
        return culprit, kind_of(culprit, failures.get(culprit.rank))

    processes.poll_until(lambda: False, SETTLE_SECONDS)
    if strongest()[1] is not Kind.ERROR:
        processes.poll_until(lambda: strongest()[1] is Kind.ERROR, SETTLE_COLLECTIVE_SECONDS)
    culprit, kind = strongest()
    failure = collect_failures(run_dir, [culprit]).get(culprit.rank)
    if kind is Kind.COLLECTIVE and failure is not None and failure.timed_out and processes.alive():
        # The rank that waited in vain is the victim; the one it waited for still lives.
        return _conclude_hang(processes)
    failed = processes.failed()  # before the others are ended, which is no failure of theirs
    processes.end()
    return failed_outcome(run_dir, failed, out_of_memory=kills.happened())


def _conclude_hang(processes: RankProcesses) -> Outcome:
    standings = dump_stacks(processes)
    culprit = find_hung(processes.alive(), standings)
    silent = time.monotonic() - culprit.progressed
    processes.end()
    return hung_outcome(processes.request.run_dir, culprit, silent, standings)


def _start_timed_out(processes: RankProcesses, limit: float) -> Outcome:
    processes.dump_zygote()
    finding = Finding(
        f"{processes.request.target.partition(':')[0]} was not imported within {limit:.0f} s",
        why="the file system of the Python installation is slow, or the machine is busy",
        fix=f"read where its import stands in {log_path(processes.request.run_dir, 'start')}",
    )
    return Outcome("hung", ExitCode.PROCESS_DIED, findings=(finding,))


def _give_up_stopping(processes: RankProcesses, grace: float | None) -> Outcome:
    """SIGTERM was not followed in time (`grace`), or was repeated (None)."""
    late = ", ".join(str(state.rank) for state in processes.alive())
    processes.kill()
    reason = f"within {grace:.0f} s of SIGTERM" if grace is not None else "before the second signal"
    finding = Finding(f"ranks {late} had not stopped {reason} and were killed", fix="start again to resume")
    return Outcome("failed", ExitCode.PROCESS_DIED, findings=(finding,))
