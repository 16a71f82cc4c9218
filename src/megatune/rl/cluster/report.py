"""What a run says of the actor that ended it, on stderr and as report.json."""

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

Place: TypeAlias = tuple[str, int]  # phase and step of the run


def death(state: RankState, host: str, crash_reason: str, exit_code: int | None, out_of_memory: bool) -> Failure:
    """Describe an actor whose process is gone.

    Args:
        crash_reason: see `machine.Machine.crash_reason`.
        exit_code: where it ended itself.
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


def trouble(state: RankState, host: str, error: Exception) -> Failure:
    """Describe an answer that Ray could not bring."""
    text = " ".join(str(error).split())
    if "ObjectStoreFull" in text or type(error).__name__ in ("ObjectStoreFullError", "OutOfDiskError"):
        return _failure(state, host, ExitCode.OUT_OF_MEMORY, f"had no room in Ray's object store: {text}")
    return _failure(state, host, ExitCode.INTERNAL, f"could not answer: {type(error).__name__}: {text}")


def _failure(state: RankState, host: str, exit_code: ExitCode, summary: str) -> Failure:
    phase, step = (state.beat.phase, state.beat.step) if state.beat else ("start", 0)
    return Failure(state.rank, host, state.pid, phase, step, time.time(), exit_code, Kind.ERROR, summary)


def failed(run_dir: Path, name: str, failure: Failure, place: Place | None) -> tuple[Finding, ...]:
    """Say which actor failed first, where and of what.

    Args:
        place: phase and step of the run, where they are known; an actor knows its own alone.
    """
    where = f"{name} on host {failure.host}"
    if failure.findings:
        return tuple(replace(finding, where=finding.where or where) for finding in failure.findings)
    where_in_run = _place(place, failure.phase, failure.step)
    dead = failure.exit_code == ExitCode.PROCESS_DIED and not failure.traceback
    verb = "" if dead else "failed: "
    why = "it lost its peers; none of them failed before it" if failure.kind is Kind.COLLECTIVE else ""
    fix = f"read {log_path(run_dir, name)}; {RESUME_HINT}"
    return (Finding(f"{where}, {where_in_run}, {verb}{failure.summary}", "", why, fix),)


def _place(place: Place | None, phase: str, step: int) -> str:
    """Say where the run was, and what an actor did there."""
    if place is None:
        return progress_text(phase, step)
    return progress_text(place[0] if phase in (place[0], "idle") else f"{place[0]}: {phase}", place[1])


def hung(
    run_dir: Path,
    suspects: Sequence[Actor],
    activities: dict[int, RankActivity],
    call: Call | None,
    place: Place | None,
) -> tuple[Finding, Actor]:
    """Say which of the actors at work is the one that the others wait for, where it is, and for how long.

    Args:
        call: the one that exceeded its limit, if that is how the hang was found.
    """
    state = find_hung([actor.state for actor in suspects], activities)
    culprit = next(actor for actor in suspects if actor.state is state)
    where = _place(place, state.beat.phase, state.beat.step) if state.beat else "while starting"
    silence = f"no progress for {time.monotonic() - state.progressed:.0f} s"
    if call is not None:
        silence = f"no answer to {call.method} within {call.limit:.0f} s"
    why = hang_reason(state, activities)
    fix = f"read the stacks in {log_path(run_dir, culprit.role + '-*')}; {RESUME_HINT}"
    return Finding(f"{culprit.name} on host {culprit.host} hung {where}: {silence}", "", why, fix), culprit


def lost(finding: Finding, actor: Actor) -> str:
    """Say what became of an actor that is started again."""
    why = f" ({finding.why})" if finding.why else ""
    left = (
        f"{actor.restarts} more restart{'s' if actor.restarts != 1 else ''}" if actor.restarts else "no more restarts"
    )
    return f"warning: {finding.what}{why}. It is started again ({left} of it: max_engine_restarts); the run continues"


def service(name: str, pid: int, place: Place | None) -> Finding:
    """Say that a process of Ray's own is gone."""
    where = progress_text(*place) if place else "while starting"
    what = f"Ray's {name} (process {pid}) on host {socket.gethostname()}, {where}, died"
    return Finding(what, "", SIGNAL_REASONS[9], RESUME_HINT)


def write(run_dir: Path, actors: Sequence[Actor], culprit: str, error: MegatuneError, traceback: str) -> None:
    """report.json: how the run ended, for machines."""

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
