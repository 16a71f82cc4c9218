"""The report of a run's end: the first cause of a failure, or the state of each rank of a hung run; printed on stderr,
and written to report.json."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatune.errors import ExitCode, Finding
from megatune.launch.context import heartbeat_path, log_path, read_beat, write_atomically
from megatune.launch.failure import (
    NOT_DETERMINISTIC,
    Failure,
    Kind,
    Mismatch,
    error_path,
    read_failure,
    waits_on_device,
)
from megatune.launch.processes import RankProcesses, RankState, process_state
from megatune.launch.world import World

TRACEBACK_LINES = 12
DUMP_SECONDS = 1.0
_WATCHDOG_BYTES = 1 << 20  # at the end of a log, where NCCL's watchdog writes why it ends a process
# Frames between a collective operation and its caller.
_WRAPPERS = re.compile(r"(engine/collectives|c10d_logger|contextlib)\.py:")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')

SIGNAL_REASONS: dict[int, str] = {
    signal.SIGKILL: "the kernel's out-of-memory killer, or `kill -9`; `dmesg` shows which",
    signal.SIGSEGV: "native code crashed",
    signal.SIGBUS: "a mapped file was truncated, or /dev/shm or a disk is full",
    signal.SIGABRT: "native code aborted, as NCCL's watchdog does after a collective operation has timed out",
    signal.SIGILL: "a library was built for another type of CPU",
    signal.SIGFPE: "native code divided by zero",
}
_NO_LOCAL_CAUSE = "no rank of this machine failed before it; see the other machines' reports"
RESUME_HINT = "start again to resume from the last checkpoint"
OUT_OF_MEMORY_KILL = "the kernel's out-of-memory killer: this machine or container is out of main memory"
_OUT_OF_MEMORY_FIXES = (
    "a smaller per_device_train_batch_size with more gradient_accumulation_steps; a smaller cutoff_len; larger"
    " tensor_model_parallel_size or pipeline_model_parallel_size"
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        kind: "done", "stopped", "interrupted", "failed" or "hung".
        rank: the rank of the first cause, or None.
        findings: for the user.
        traceback: the full traceback of the first cause, or "".
        summary: the exception in the last lines of that traceback.
    """

    kind: str
    exit_code: int
    rank: int | None = None
    findings: tuple[Finding, ...] = ()
    traceback: str = ""
    summary: str = ""


def first_cause(run_dir: Path, failed: list[RankState]) -> tuple[RankState, Failure | None, Kind]:
    """Find the first cause among failed ranks, by kind and then by time.

    Returns:
        The rank; its failure, None if it died of a signal; its kind.
    """

    def describe(state: RankState) -> tuple[RankState, Failure | None, Kind]:
        failure = read_failure(error_path(run_dir, state.rank))
        if failure is not None and failure.pid == state.pid:
            return state, failure, failure.kind
        # Native libraries abort a rank that has waited too long for another one.
        return state, None, Kind.UNAVAILABLE if state.signal == signal.SIGABRT else Kind.ERROR

    def order(found: tuple[RankState, Failure | None, Kind]) -> tuple[Kind, float]:
        state, failure, kind = found
        return failure.order if failure else (kind, state.ended or 0.0)

    return min(map(describe, failed), key=order)


def read_outcome(run_dir: Path, world_size: float = math.inf) -> Outcome | None:
    """Read the outcome of a run from its report.json, or from the files of its ranks if torchrun started them; None if
    unknown."""
    unreadable = (OSError, ValueError, LookupError, TypeError)
    with contextlib.suppress(*unreadable):
        report = json.loads((run_dir / "report.json").read_text(encoding="utf-8"))
        findings = tuple(Finding(**each) for each in report["findings"])
        code = int(report["exit_code"])
        return Outcome(report["outcome"], code, report["culprit"], findings, report["traceback"])
    failures: list[Failure] = []
    for path in run_dir.glob("rank-*.error.json"):
        with contextlib.suppress(*unreadable):
            failures += filter(None, [read_failure(path)])
    # An earlier run with more ranks may have left files of other ranks.
    failures = [each for each in failures if each.rank < world_size]
    first = min(failures, key=lambda each: each.order, default=None)
    return raised_outcome(run_dir, first, first.rank) if first is not None else None


def failed_outcome(
    run_dir: Path, culprit: RankState, failure: Failure | None, out_of_memory: bool, mismatch: Mismatch | None = None
) -> Outcome:
    """Return the outcome of a failed run, given its `first_cause`.

    Args:
        out_of_memory: whether the OOM killer ended a process meanwhile.
        mismatch: the collective operation in which ranks differ, if any.
    """
    if failure is not None:
        lost = mismatch.text if mismatch is not None and failure.kind is Kind.COLLECTIVE else _NO_LOCAL_CAUSE
        return raised_outcome(run_dir, failure, culprit.rank, lost=lost)
    exit_code = ExitCode.PROCESS_DIED
    why = SIGNAL_REASONS.get(culprit.signal or 0, "")
    if culprit.signal is not None:
        end = f"was killed by {_signal_name(culprit.signal)}"
        if culprit.signal == signal.SIGKILL and out_of_memory:
            exit_code, why = ExitCode.OUT_OF_MEMORY, OUT_OF_MEMORY_KILL
    elif culprit.exit_code == ExitCode.CANNOT_WRITE:
        exit_code = ExitCode.CANNOT_WRITE
        end, why = "could not write", f"its report could not be written to {run_dir} either: is a disk full?"
    else:
        end = f"ended itself with exit code {culprit.exit_code}, without a Python exception"
    what = f"rank {culprit.rank} on host {socket.gethostname()} {end} {_progress(culprit)}"
    fix = f"read {log_path(run_dir, f'rank-{culprit.rank}')}; {RESUME_HINT}"
    if exit_code == ExitCode.OUT_OF_MEMORY:
        fix = f"{_OUT_OF_MEMORY_FIXES}; fewer dataloader_num_workers; then {RESUME_HINT}"
    return Outcome("failed", exit_code, culprit.rank, (Finding(what, why=why, fix=fix),))


def raised_outcome(run_dir: Path, failure: Failure, rank: int | None, *, lost: str = _NO_LOCAL_CAUSE) -> Outcome:
    """Return the outcome of a run whose first cause is an exception; `rank` is None if no rank was started yet.

    Args:
        lost: the reason if a collective operation failed.
    """
    if failure.findings:
        return Outcome("failed", failure.exit_code, rank, failure.findings, failure.traceback)
    log = log_path(run_dir, "start" if rank is None else f"rank-{rank}")
    who = f"rank {rank} on host {failure.host}" if rank is not None else f"host {failure.host}"
    when = progress_text(failure.phase, failure.step) if rank is not None else "before any rank was started"
    why = fix = ""
    if failure.exit_code == ExitCode.OUT_OF_MEMORY:
        verb, fix = "ran out of memory", _OUT_OF_MEMORY_FIXES
    elif failure.kind is Kind.COLLECTIVE:
        verb, why = "lost its peers", lost
    elif failure.kind is Kind.RELAYED:
        verb, why = "ended", "rank 0 failed with this error; see the report of its machine"
    else:
        verb = "failed"
    if NOT_DETERMINISTIC in failure.summary:
        why = "deterministic_mode does not allow operators whose results may differ from run to run"
        fix = f"write deterministic_mode: false; {log} shows which part of the model calls it"
    fix = fix or f"read the full traceback in {log}"
    finding = Finding(f"{who} {verb} {when}: {failure.summary}", "", why, fix)
    return Outcome("failed", failure.exit_code, rank, (finding,), failure.traceback, failure.summary)


def lost_outcome(run_dir: Path, signum: int | None, out_of_memory: bool) -> Outcome:
    """Return the outcome of a run whose fork server ended unexpectedly."""
    end = f"was killed by {_signal_name(signum)}" if signum else "ended unexpectedly"
    killed = signum == signal.SIGKILL and out_of_memory
    what = f"the process that imports the program and starts the ranks {end}, and the ranks with it"
    why = OUT_OF_MEMORY_KILL if killed else SIGNAL_REASONS.get(signum or 0, "")
    finding = Finding(what, "", why, f"read {log_path(run_dir, 'start')}; {RESUME_HINT}")
    return Outcome("failed", ExitCode.OUT_OF_MEMORY if killed else ExitCode.PROCESS_DIED, findings=(finding,))


@dataclass(frozen=True, slots=True)
class RankActivity:
    """The activity of a rank of a hung run.

    Attributes:
        process_state: the kernel's letter: R running, S sleeping, D waiting for a device, T stopped.
        stack: the frames of its main thread, innermost first; empty if it did not answer.
        waits_on_device: whether its device has not completed a collective operation.
    """

    process_state: str
    stack: tuple[str, ...]
    waits_on_device: bool = False

    @property
    def stopped(self) -> bool:
        return self.process_state in ("T", "t")

    @property
    def in_collective(self) -> bool:
        """Whether it waits for other ranks, and is not the one that they wait for."""
        return self.waits_on_device or any("torch/distributed/" in frame for frame in self.stack[:4])


def dump_stacks(processes: RankProcesses) -> dict[int, RankActivity]:
    """Have each living rank write all its stacks into its log, which works wherever it hangs, and read them."""
    run_dir = processes.request.run_dir
    living = processes.alive()
    logs = {state.rank: log_path(run_dir, f"rank-{state.rank}") for state in living}
    offsets = {rank: path.stat().st_size if path.exists() else 0 for rank, path in logs.items()}
    processes.send(signal.SIGUSR1)
    time.sleep(DUMP_SECONDS)
    return {
        state.rank: RankActivity(
            process_state(state.pid),
            main_stack(logs[state.rank], offsets[state.rank]),
            waits_on_device(run_dir, state.rank),
        )
        for state in living
    }


def ended_by_watchdog(run_dir: Path, state: RankState) -> bool:
    """Return whether NCCL's watchdog ended a rank after a timeout."""
    log = log_path(run_dir, f"rank-{state.rank}")
    if state.signal != signal.SIGABRT or not log.exists():
        return False
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _WATCHDOG_BYTES))
        return b"Watchdog caught collective operation timeout" in file.read()


def request_stacks(processes: RankProcesses) -> None:
    """Have each rank write its stacks into its log, and print where. Ranks that are still starting are skipped."""
    run_dir = processes.request.run_dir
    for state in processes.alive():
        beat = read_beat(heartbeat_path(run_dir, state.rank))
        if beat is not None and beat.phase != "start":  # earlier, it may not have the handler yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(state.pid, signal.SIGUSR1)
    where = log_path(run_dir, "rank-*")
    print(f"megatune: the stacks of all ranks are in {where}; the run continues", file=sys.stderr, flush=True)


def find_hung(
    alive: list[RankState], activities: dict[int, RankActivity], mismatch: Mismatch | None = None
) -> RankState:
    """Find the rank that the others wait for: a stopped or silent one, else one outside of any collective operation,
    else the one of the mismatch, else the slowest."""

    def order(state: RankState) -> tuple[bool, bool, bool, bool, int, float]:
        activity = activities[state.rank]
        step, moment = (state.beat.step, state.beat.time) if state.beat else (-1, 0.0)
        in_step = mismatch is None or state.rank != mismatch.rank
        return not activity.stopped, bool(activity.stack), activity.in_collective, in_step, step, moment

    return min(alive, key=order)


def main_stack(log: Path, offset: int, server: str = "") -> tuple[str, ...]:
    """Return the frames of a dump's main thread, the last one, as "function (file:line)", without those of launch/.

    Args:
        server: a file whose thread, if there is one, does the work instead of the main thread.
    """
    if not log.exists():
        return ()
    with log.open(errors="replace") as file:
        file.seek(offset)
        threads = file.read().split("(most recent call first):")[1:]
    dump = next((each for each in threads if server and server in each), threads[-1] if threads else "")
    frames = (_FRAME.match(line) for line in dump.splitlines())
    return tuple(
        f"{frame['function']} ({frame['file']}:{frame['line']})"
        for frame in frames
        if frame and Path(frame["file"]).parent != Path(__file__).parent
    )


def hung_outcome(
    run_dir: Path,
    culprit: RankState,
    silent_seconds: float,
    activities: dict[int, RankActivity],
    mismatch: Mismatch | None = None,
) -> Outcome:
    """Return the outcome of a hung run, whose other ranks wait for `culprit`."""
    why = hang_reason(culprit, activities, mismatch)
    who, silence = f"rank {culprit.rank} on host {socket.gethostname()}", f"no progress for {silent_seconds:.0f} s"
    fix = f"read the stacks of all ranks in {log_path(run_dir, 'rank-*')}; {RESUME_HINT}"
    finding = Finding(f"{who} hung {_progress(culprit)}: {silence}", "", why, fix)
    return Outcome("hung", ExitCode.PROCESS_DIED, culprit.rank, (finding,))


def hang_reason(culprit: RankState, activities: dict[int, RankActivity], mismatch: Mismatch | None = None) -> str:
    """Describe what the rank that the others wait for does."""
    activity = activities[culprit.rank]
    others = [other for rank, other in activities.items() if rank != culprit.rank]
    if activity.stopped:
        why = "its process is stopped (SIGSTOP, or a debugger)"
    elif activity.process_state == "D":
        why = "its process waits for a disk or a device that does not answer"
    elif activity.stack:
        why = "it is in " + ", called by ".join([each for each in activity.stack if not _WRAPPERS.search(each)][:3])
    else:
        why = "its process does not answer signals"
    if others and all(other.in_collective for other in others):
        waits = "the other ranks wait for it in a collective operation"
        if activity.in_collective:
            waits = "all ranks wait in collective operations" + (", and this one is behind" if mismatch is None else "")
        why += f"; {waits}" + (f": {mismatch.text}" if mismatch is not None else "")
    return why


def progress_text(phase: str, step: int) -> str:
    where = f"at step {step}" if step > 0 else "before the first step"
    return f"{where} ({phase})" if phase else where


def _progress(state: RankState) -> str:
    return progress_text(state.beat.phase, state.beat.step) if state.beat else "while starting"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def outcome_text(outcome: Outcome) -> str:
    """Return the findings, after the end of the traceback of an internal error."""
    lines = [f"megatune: {finding}" for finding in outcome.findings]
    if outcome.kind == "failed" and outcome.traceback and outcome.exit_code == ExitCode.INTERNAL:
        frames = outcome.traceback.rstrip().removesuffix(outcome.summary).splitlines()
        lines[:0] = frames[-TRACEBACK_LINES:]
    return "\n".join(lines)


def _rank_entry(state: RankState) -> dict[str, Any]:
    fields = asdict(state) | {"signal": _signal_name(state.signal) if state.signal else None}
    del fields["progressed"]
    return fields | {"last_beat": fields.pop("beat")}


def write_report(
    run_dir: Path, world: World, outcome: Outcome, ranks: list[RankState], started: float, start_method: str
) -> None:
    """Write report.json, or report-node-K.json on a machine other than the first."""
    name = "report.json" if world.node_rank == 0 else f"report-node-{world.node_rank}.json"
    report = {
        "outcome": outcome.kind,
        "exit_code": int(outcome.exit_code),
        "host": socket.gethostname(),
        "world": asdict(world) | {"world_size": world.world_size},
        "started": started,
        "ended": time.time(),
        "start_method": start_method,
        "culprit": outcome.rank,
        "findings": [asdict(finding) for finding in outcome.findings],
        "traceback": outcome.traceback,
        "ranks": [_rank_entry(state) for state in ranks],
    }
    write_atomically(run_dir / name, json.dumps(report, indent=1))
