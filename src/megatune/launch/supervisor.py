"""The supervisor: starts this machine's ranks, forwards signals, and returns one report and one exit code."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.launch import report
from megatune.launch.context import StartRequest, heartbeat_path, log_path
from megatune.launch.devices import OomKills
from megatune.launch.failure import Kind, error_path, find_mismatch, operations_path
from megatune.launch.processes import POLL_SECONDS, RankProcesses
from megatune.launch.world import World, ensure_port_free

START_SECONDS = 600.0
HANG_SECONDS = 1800.0
GRACE_SECONDS = 600.0
# Ranks often fail together. After an error, wait for reports with an earlier time; after a failed collective operation,
# wait longer for the rank that caused it.
SETTLE_SECONDS = 0.3
SETTLE_COLLECTIVE_SECONDS = 3.0
_ON_POLL_SECONDS = 0.02  # between two calls of `on_poll`

OnPoll: TypeAlias = Callable[[RankProcesses], None]


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
    on_poll: OnPoll | None = None,
) -> int:
    """Run a function in every rank of this machine and wait for its end. Call it from the main thread.

    SIGTERM and SIGHUP ask the ranks to save and stop; a second SIGTERM kills them. Ctrl-C ends them at once. SIGUSR1
    makes them write their stacks into their logs and continue. If this process dies, the ranks die with it. If it is
    stopped (Ctrl-Z, SIGSTOP), they continue, since ranks may not survive a stop in a collective operation. Rank 0
    writes to this process's stdout and stderr, the others to their logs.

    Args:
        target: "package.module:function", called as function(context: RankContext, payload); returns None or an exit
            code. Its module is imported once and forked, so the import must not start threads or initialise CUDA; if
            it does, each rank imports it separately.
        payload: a picklable value.
        run_dir: the folder of logs/rank-K.log, heartbeats/, rank-K.error.json and report.json.
        hang_timeout: maximum seconds between two beats of a rank, unless a beat has a limit of its own.
        grace: seconds from SIGTERM to the end of the last rank; a phase with a limit of its own, such as saving, may
            take longer.
        start_timeout: seconds to import the target's module.
        stop_file: asks the ranks to save and stop when it appears; run_dir/STOP by default. One of an earlier run is
            removed.
        on_poll: called with the processes several times a second; it may signal them.

    Returns:
        DONE; STOPPED if the ranks stopped on request; INTERRUPTED after Ctrl-C; else the exit code of the first cause:
        OUT_OF_MEMORY for a rank that the OOM killer ended, PROCESS_DIED for one that hung or died of another signal.
        The report is printed on stderr.

    Raises:
        MegatuneError: before any rank is started: UNAVAILABLE if the port of rank 0 is in use, CANNOT_WRITE if run_dir
            cannot be created.
    """
    run_dir = run_dir.absolute()  # a target may change its working directory
    stop_file = (stop_file or run_dir / "STOP").absolute()
    request = StartRequest(target, payload, world, run_dir, stop_file, list(sys.path))
    if world.node_rank == 0:
        ensure_port_free(world.master_port)
    _prepare_run_dir(request)
    started = time.time()
    with counted_signals() as signals, RankProcesses(request) as processes:
        timeouts = {"start_timeout": start_timeout, "hang_timeout": hang_timeout, "grace": grace}
        outcome = _watch(processes, signals, on_poll, **timeouts)
        ranks = [processes.ranks[rank] for rank in sorted(processes.ranks)]
    start_method = processes.ready["start"] if processes.ready else ""
    if outcome.findings and sys.stderr.isatty():
        print(file=sys.stderr)  # rank 0 may have printed an incomplete line
    if text := report.outcome_text(outcome):
        print(text, file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):  # the outcome is printed; a full disk must not replace it
        report.write_report(run_dir, world, outcome, ranks, started, start_method)
    return int(outcome.exit_code)


@contextlib.contextmanager
def counted_signals() -> Iterator[Counter[int]]:
    """Count SIGINT, SIGTERM and SIGUSR1 by number, instead of their default actions.

    SIGHUP counts as the first SIGTERM, since closing a terminal may send it twice.
    """
    counts: Counter[int] = Counter()

    def count(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            counts[signal.SIGTERM] = max(1, counts[signal.SIGTERM])
        else:
            counts[number] += 1

    # Signals that a shell ignores for background jobs (SIGINT), or `nohup` (SIGHUP), stay ignored.
    previous = {
        number: signal.signal(number, count)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield counts
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _prepare_run_dir(request: StartRequest) -> None:
    """Create the folders, and remove files of an earlier run that could be mistaken for this one's."""
    try:
        for path in (log_path(request.run_dir, "start"), heartbeat_path(request.run_dir, 0)):
            path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MegatuneError(Finding(f"cannot write: {error}"), ExitCode.CANNOT_WRITE) from error
    for local_rank in range(request.world.nproc_per_node):
        rank = request.world.rank_env(local_rank).rank
        heartbeat_path(request.run_dir, rank).unlink(missing_ok=True)
        error_path(request.run_dir, rank).unlink(missing_ok=True)
        operations_path(request.run_dir, rank).unlink(missing_ok=True)
    if request.world.node_rank == 0:
        request.stop_file.unlink(missing_ok=True)


def _watch(
    processes: RankProcesses,
    signals: Counter[int],
    on_poll: OnPoll | None,
    *,
    start_timeout: float,
    hang_timeout: float,
    grace: float,
) -> report.Outcome:
    """Watch the ranks until all have ended, and end them if needed."""
    begun = time.monotonic()
    stop_by: float | None = None
    kills = OomKills()
    while processes.pending:
        processes.poll(POLL_SECONDS if on_poll is None else _ON_POLL_SECONDS)
        if on_poll is not None:
            on_poll(processes)
        now = time.monotonic()
        kills.update(now)
        if signals.pop(signal.SIGUSR1, 0):
            report.request_stacks(processes)
        if signals[signal.SIGINT] and stop_by is None:
            if processes.started:  # else not all ranks exist yet; they are killed with the fork server
                processes.end(kill_now=lambda: signals[signal.SIGINT] > 1)
            return report.Outcome("interrupted", ExitCode.INTERRUPTED, findings=(Finding("interrupted"),))
        if processes.failed():
            return _conclude_failure(processes, kills)
        if signals[signal.SIGTERM] and not processes.ready:
            return report.Outcome("stopped", ExitCode.STOPPED)
        if signals[signal.SIGTERM] and stop_by is None and processes.started:
            processes.send(signal.SIGTERM)
            stop_by = now + grace
        is_late = stop_by is not None and now > stop_by and processes.all_without_limit()
        if stop_by is not None and (is_late or signals[signal.SIGINT] + signals[signal.SIGTERM] > 1):
            return _kill_after_stop(processes, grace if is_late else None)
        if not processes.ready and now - begun > start_timeout:
            return _start_timed_out(processes, start_timeout)
        if processes.overdue(hang_timeout):
            return _conclude_hang(processes)
    if processes.failure is not None:
        return report.raised_outcome(processes.request.run_dir, processes.failure, None)
    if processes.lost:
        return report.lost_outcome(processes.request.run_dir, processes.fork_server_signal, kills.happened())
    if processes.failed():
        return _conclude_failure(processes, kills)
    stopped = any(state.exit_code == ExitCode.STOPPED for state in processes.ranks.values())
    return report.Outcome("stopped", ExitCode.STOPPED) if stopped else report.Outcome("done", ExitCode.DONE)


def _conclude_failure(processes: RankProcesses, kills: OomKills) -> report.Outcome:
    """Wait for further failures after the first one, end the other ranks, and find the first cause."""
    run_dir = processes.request.run_dir

    def has_error() -> bool:
        return report.first_cause(run_dir, processes.failed())[2] is Kind.ERROR

    processes.poll_until(lambda: False, SETTLE_SECONDS)
    processes.poll_until(has_error, SETTLE_COLLECTIVE_SECONDS)
    culprit, failure, kind = report.first_cause(run_dir, processes.failed())
    timed_out = kind is Kind.COLLECTIVE and failure is not None and failure.timed_out
    if (timed_out or report.ended_by_watchdog(run_dir, culprit)) and processes.alive():
        # The rank whose operation timed out is not the cause; the rank that it waited for is still alive.
        return _conclude_hang(processes)
    processes.end()
    mismatch = find_mismatch(run_dir, sorted(processes.ranks)) if kind is Kind.COLLECTIVE else None
    return report.failed_outcome(run_dir, culprit, failure, kills.happened(), mismatch)


def _conclude_hang(processes: RankProcesses) -> report.Outcome:
    activities = report.dump_stacks(processes)
    run_dir = processes.request.run_dir
    mismatch = find_mismatch(run_dir, sorted(processes.ranks))
    culprit = report.find_hung(processes.alive(), activities, mismatch)
    silent = time.monotonic() - culprit.progressed
    processes.end()
    return report.hung_outcome(run_dir, culprit, silent, activities, mismatch)


def _start_timed_out(processes: RankProcesses, limit: float) -> report.Outcome:
    processes.dump_fork_server()
    what = f"{processes.request.target.partition(':')[0]} was not imported within {limit:.0f} s"
    why = "the file system of the Python installation is slow, or the machine is busy"
    fix = f"read the stack of the import in {log_path(processes.request.run_dir, 'start')}"
    return report.Outcome("hung", ExitCode.PROCESS_DIED, findings=(Finding(what, "", why, fix),))


def _kill_after_stop(processes: RankProcesses, grace: float | None) -> report.Outcome:
    """Kill ranks that have not stopped within `grace` seconds of SIGTERM, or when it was repeated (None)."""
    late = ", ".join(str(state.rank) for state in processes.alive())
    processes.kill()
    reason = f"within {grace:.0f} s of SIGTERM" if grace is not None else "before the second signal"
    finding = Finding(f"ranks {late} had not stopped {reason} and were killed", fix="start again to resume")
    return report.Outcome("failed", ExitCode.PROCESS_DIED, findings=(finding,))
