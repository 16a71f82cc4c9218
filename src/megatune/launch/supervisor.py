"""Starts this machine's ranks and stays with them to the end: signals in, one report and one exit code out."""

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
# Failures come in clusters. After a strong first one the others have this long to show an earlier time; after a
# collective operation broke off, the rank that broke it has longer to fail too.
SETTLE_SECONDS = 0.3
SETTLE_COLLECTIVE_SECONDS = 3.0
_WATCHED_SECONDS = 0.02  # between two calls of `look`

Look: TypeAlias = Callable[[RankProcesses], None]


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
    look: Look | None = None,
) -> int:
    """Run a function in every rank of this machine and wait for the end. Call it from the main thread.

    SIGTERM asks the ranks to save and stop, as does SIGHUP; a second SIGTERM kills them. Ctrl-C ends them at once.
    SIGUSR1 has them write their stacks into their logs and go on. Kill this process in any way and the ranks die with
    it. Stop it (Ctrl-Z, SIGSTOP) and they go on: those that were stopped in a collective operation would not go on
    well. Rank 0 writes to this process's stdout and stderr, the others to their logs.

    Args:
        target: "package.module:function", called as function(context: RankContext, payload); returns None or an exit
            code. Its module is imported once and forked, so an import must not start threads or initialise CUDA; if
            it does, each rank imports it for itself.
        payload: anything that pickles.
        run_dir: gets logs/rank-K.log, heartbeats/, rank-K.error.json and report.json.
        hang_timeout: seconds between two beats of a rank after which the run counts as hung, unless the beat states a
            limit of its own.
        grace: seconds from SIGTERM to the end of the last rank; one that is in a phase with a limit of its own, as
            saving is, has that long.
        start_timeout: seconds to import the target's module.
        stop_file: asks the ranks to save and stop when it appears; run_dir/STOP by default. One that an earlier run
            left behind is removed.
        look: called with the processes while they run, several times a second; it may signal them.

    Returns:
        DONE; STOPPED if the ranks stopped on request; INTERRUPTED after Ctrl-C; else the exit code of the first
        cause: OUT_OF_MEMORY for a rank that the kernel killed for its memory, PROCESS_DIED for one that died of
        another signal or hung. The report is on stderr by then.

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
    with counted_signals() as signals, RankProcesses(request) as processes:
        outcome = _watch(
            processes, signals, start_timeout=start_timeout, hang_timeout=hang_timeout, grace=grace, look=look
        )
        ranks = [processes.ranks[rank] for rank in sorted(processes.ranks)]
    start_method = processes.ready["start"] if processes.ready else ""
    report.print_outcome(outcome)
    with contextlib.suppress(OSError):  # the outcome is printed; a full disk must not replace it
        report.write_report(run_dir, world, outcome, ranks, started, start_method)
    return int(outcome.exit_code)


@contextlib.contextmanager
def counted_signals() -> Iterator[Counter[int]]:
    """Count Ctrl-C, SIGTERM and SIGUSR1, by number, instead of obeying them.

    SIGHUP counts as the first SIGTERM: a terminal that is closed sends it, and a shell once more.
    """
    counts: Counter[int] = Counter()

    def count(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            counts[signal.SIGTERM] = max(1, counts[signal.SIGTERM])
        else:
            counts[number] += 1

    # A shell starts background jobs with SIGINT ignored, and `nohup` all with SIGHUP ignored; they are to stay so.
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
    """Make the folders and remove what an earlier run of these ranks left that could be taken for this one's."""
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
    *,
    start_timeout: float,
    hang_timeout: float,
    grace: float,
    look: Look | None,
) -> report.Outcome:
    """Follow the ranks until all have ended, ending them where that is needed."""
    begun = time.monotonic()
    stop_by: float | None = None
    kills = OomKills()
    while processes.pending:
        processes.poll(POLL_SECONDS if look is None else _WATCHED_SECONDS)
        if look is not None:
            look(processes)
        now = time.monotonic()
        kills.update(now)
        if signals.pop(signal.SIGUSR1, 0):
            report.request_stacks(processes)
        if signals[signal.SIGINT] and stop_by is None:
            if processes.started:  # else none would hear it, and those still to start would train until they are killed
                processes.end(impatient=lambda: signals[signal.SIGINT] > 1)
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
            return _give_up_stopping(processes, grace if is_late else None)
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
    """A rank has failed: gather what failed with it, end the others, and find the first cause."""
    run_dir = processes.request.run_dir

    def is_strong() -> bool:
        return report.first_cause(run_dir, processes.failed())[2] is Kind.ERROR

    processes.poll_until(lambda: False, SETTLE_SECONDS)
    processes.poll_until(is_strong, SETTLE_COLLECTIVE_SECONDS)
    culprit, failure, kind = report.first_cause(run_dir, processes.failed())
    timed_out = kind is Kind.COLLECTIVE and failure is not None and failure.timed_out
    if (timed_out or report.ended_by_watchdog(run_dir, culprit)) and processes.alive():
        # The rank that waited in vain is the victim; the one it waited for is still alive.
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
    fix = f"read where its import is in {log_path(processes.request.run_dir, 'start')}"
    return report.Outcome("hung", ExitCode.PROCESS_DIED, findings=(Finding(what, "", why, fix),))


def _give_up_stopping(processes: RankProcesses, grace: float | None) -> report.Outcome:
    """SIGTERM was not followed in time (`grace`), or was repeated (None)."""
    late = ", ".join(str(state.rank) for state in processes.alive())
    processes.kill()
    reason = f"within {grace:.0f} s of SIGTERM" if grace is not None else "before the second signal"
    finding = Finding(f"ranks {late} had not stopped {reason} and were killed", fix="start again to resume")
    return report.Outcome("failed", ExitCode.PROCESS_DIED, findings=(finding,))
