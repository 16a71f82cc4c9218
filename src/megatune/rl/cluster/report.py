"""Failure reports: the actor that ended a run, on stderr and in report.json."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.launch.context import log_path
from megatune.launch.failure import Failure, Kind
from megatune.launch.processes import RankState
from megatune.launch.report import (
    OUT_OF_MEMORY_KILL,
    RESUME_HINT,
    SIGNAL_REASONS,
    RankActivity,
    find_hung,
    hang_reason,
    progress_text,
)

if TYPE_CHECKING:
    from megatune.rl.cluster.watch import Actor, Call

RunPosition: TypeAlias = tuple[str, int]  # phase and step of the run


def death_failure(
    state: RankState, host: str, crash_reason: str, exit_code: int | None, out_of_memory: bool
) -> Failure:
    """Return the failure of an actor whose process is gone.

    Args:
        crash_reason: see `machine.Machine.crash_reason`.
        exit_code: of a process that exited; None if it was killed or that is unknown.
    """
    code = ExitCode.PROCESS_DIED
    if crash_reason:
        end = f"died: {crash_reason}"
    elif exit_code is not None:
        end = f"ended itself with exit code {exit_code}, without a Python exception"
    elif out_of_memory:
        code, end = ExitCode.OUT_OF_MEMORY, f"was killed: {OUT_OF_MEMORY_KILL}"
    else:
        end = f"was killed: {SIGNAL_REASONS[9]}"
    return _failure(state, host, code, end)


def ray_failure(state: RankState, host: str, error: Exception) -> Failure:
    """Return the failure of a call whose result Ray could not deliver."""
    text = " ".join(str(error).split())
    if "ObjectStoreFull" in text or type(error).__name__ in ("ObjectStoreFullError", "OutOfDiskError"):
        return _failure(state, host, ExitCode.OUT_OF_MEMORY, f"had no room in Ray's object store: {text}")
    return _failure(state, host, ExitCode.INTERNAL, f"could not answer: {type(error).__name__}: {text}")


def _failure(state: RankState, host: str, exit_code: ExitCode, summary: str) -> Failure:
    phase, step = (state.beat.phase, state.beat.step) if state.beat else ("start", 0)
    return Failure(state.rank, host, state.pid, phase, step, time.time(), exit_code, Kind.ERROR, summary)


def failure_findings(run_dir: Path, name: str, failure: Failure, position: RunPosition | None) -> tuple[Finding, ...]:
    """Return the findings about the actor that failed first: where and why.

    Args:
        position: phase and step of the run, if known; an actor only knows its own.
    """
    where = f"{name} on host {failure.host}"
    if failure.findings:
        return tuple(replace(finding, where=finding.where or where) for finding in failure.findings)
    where_in_run = _position_text(position, failure.phase, failure.step)
    dead = failure.exit_code == ExitCode.PROCESS_DIED and not failure.traceback
    verb = "" if dead else "failed: "
    why = "it lost its peers; none of them failed before it" if failure.kind is Kind.COLLECTIVE else ""
    fix = f"read {log_path(run_dir, name)}; {RESUME_HINT}"
    return (Finding(f"{where}, {where_in_run}, {verb}{failure.summary}", "", why, fix),)


def _position_text(position: RunPosition | None, phase: str, step: int) -> str:
    """Describe the phase and step of the run, and the actor's own phase."""
    if position is None:
        return progress_text(phase, step)
    return progress_text(position[0] if phase in (position[0], "idle") else f"{position[0]}: {phase}", position[1])


def hang_finding(
    run_dir: Path,
    suspects: Sequence[Actor],
    activities: dict[int, RankActivity],
    call: Call | None,
    position: RunPosition | None,
) -> tuple[Finding, Actor]:
    """Find the actor that the other busy actors wait for, and describe where it hangs, and for how long.

    Args:
        call: the call that exceeded its limit, if that revealed the hang.
    """
    state = find_hung([actor.state for actor in suspects], activities)
    culprit = next(actor for actor in suspects if actor.state is state)
    where = _position_text(position, state.beat.phase, state.beat.step) if state.beat else "while starting"
    silence = f"no progress for {time.monotonic() - state.progressed:.0f} s"
    if call is not None:
        silence = f"no answer to {call.method} within {call.limit:.0f} s"
    why = hang_reason(state, activities)
    fix = f"read the stacks in {log_path(run_dir, culprit.role + '-*')}; {RESUME_HINT}"
    return Finding(f"{culprit.name} on host {culprit.host} hung {where}: {silence}", "", why, fix), culprit


def restart_warning(finding: Finding, actor: Actor) -> str:
    """Return the warning about an actor that is restarted."""
    why = f" ({finding.why})" if finding.why else ""
    left = f"{actor.restarts or 'no'} more restart{'s' if actor.restarts != 1 else ''}"
    return f"warning: {finding.what}{why}. It is started again ({left} of it: max_engine_restarts); the run continues"


def service_finding(name: str, pid: int, position: RunPosition | None) -> Finding:
    """Return the finding about one of Ray's own processes that is gone."""
    where = progress_text(*position) if position else "while starting"
    what = f"Ray's {name} (process {pid}) on host {socket.gethostname()}, {where}, died"
    return Finding(what, "", SIGNAL_REASONS[9], RESUME_HINT)


def write_report(run_dir: Path, actors: Sequence[Actor], culprit: str, error: MegatuneError, traceback: str) -> None:
    """Write report.json, the failure in machine-readable form."""

    def entry(actor: Actor) -> dict[str, Any]:
        beat = asdict(actor.state.beat) if actor.state.beat else None
        return {"actor": actor.name, "pid": actor.state.pid, "machine": actor.machine, "last_beat": beat}

    report = {
        "outcome": "failed",
        "exit_code": int(error.exit_code),
        "ended": time.time(),
        "culprit": culprit,
        "findings": [asdict(finding) for finding in error.findings],
        "traceback": traceback,
        "actors": [entry(actor) for actor in actors],
    }
    draft = run_dir / "report.json.draft"
    draft.write_text(json.dumps(report, indent=1))
    draft.replace(run_dir / "report.json")
