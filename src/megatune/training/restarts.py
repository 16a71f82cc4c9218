"""max_restarts: a run that crashed or hung goes on from its newest checkpoint by itself."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatune.config.settings import Settings
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.launch.supervisor import counted_signals
from megatune.training.storage.files import write_atomically
from megatune.training.storage.store import list_checkpoints

# A process that failed, died, or hung. Settings, data and numbers are the same the next time.
_RESTARTED = {ExitCode.PROCESS_DIED, ExitCode.INTERNAL, ExitCode.OUT_OF_MEMORY}
_FIRST_WAIT, _LONGEST_WAIT = 5.0, 300.0  # seconds, doubled from restart to restart
_POLL_SECONDS = 0.1


def check_restarts(settings: Settings, *, is_joined: bool, nnodes: int) -> None:
    """Refuse max_restarts where this process does not start all ranks itself.

    Raises:
        MegatuneError: SETTINGS.
    """
    asked = settings.run.max_restarts
    if asked and is_joined:
        what, why = f"max_restarts: {asked} under torchrun", "torchrun starts the processes, so it restarts them"
        fix = f"remove it, and write torchrun --max-restarts {asked}"
    elif asked and nnodes > 1:
        what, why = f"max_restarts: {asked} with NNODES={nnodes}", "restarts of several machines together are not built"
        fix = f"remove it, or start with torchrun --nnodes {nnodes} --max-restarts {asked}"
    else:
        return
    raise MegatuneError(Finding(what, why=why, fix=fix), ExitCode.SETTINGS)


def run_restarting(run: Callable[[Settings], int], settings: Settings, run_dir: Path, stop_file: Path) -> int:
    """Run until it is done, or ends in a way that a restart does not mend; at most max_restarts + 1 times.

    Args:
        run: runs once, as `supervisor.run_ranks`, and leaves run_dir/report.json, to which the restarts are added.

    Returns:
        The exit code of the last run; STOPPED or INTERRUPTED where that was asked for between two of them.
    """
    assert settings.run.output_dir is not None
    output_dir = Path(settings.run.output_dir)
    before, report = _checkpoints(output_dir), run_dir / "report.json"
    restarts: list[dict[str, Any]] = []
    asked = settings.run
    while True:
        report.unlink(missing_ok=True)
        code = run(settings)
        ended = _add_to_report(report, restarts)
        if code not in _RESTARTED or ended is None or len(restarts) == asked.max_restarts:
            return code
        own = [path for path, written in _checkpoints(output_dir).items() if before.get(path) != written]
        start = own[-1].name if own else None  # None: nothing of this run is saved, so it starts as it was asked to
        restart = {"from": start, "exit_code": code, "cause": _cause(ended), "ended": ended["ended"]}
        if any((one["from"], one["cause"]) == (start, restart["cause"]) for one in restarts):
            print(
                f"megatune: not started again: from {start or 'its start'} it ended in this way before", file=sys.stderr
            )
            return code
        wait = min(_FIRST_WAIT * 2 ** len(restarts), _LONGEST_WAIT)
        restarts.append(restart)
        place = f"from {start}" if start else "from its start"
        count = f"restart {len(restarts)} of {asked.max_restarts}"
        print(f"megatune: {count}, {place}, in {wait:.0f} s", file=sys.stderr, flush=True)
        if (end := _wait(wait, stop_file)) is not None:
            return end
        if start:
            resume = asked.model_copy(update={"resume_from_checkpoint": None, "overwrite_output_dir": False})
            settings = settings.model_copy(update={"run": resume})


def _checkpoints(output_dir: Path) -> dict[Path, int]:
    """Return the checkpoints, smallest step first, and when each was written: a later one may have its name."""
    return {path: path.stat().st_mtime_ns for path in list_checkpoints(output_dir)}


def _cause(ended: dict[str, Any]) -> str:
    """Return how a run ended in words that are the same for another rank, process or step."""
    return re.sub(r"\d+", "N", "; ".join(finding["what"] for finding in ended["findings"]))


def _add_to_report(report: Path, restarts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Add the restarts to the report, and return it; None where there is none: a disk may be full."""
    with contextlib.suppress(OSError, ValueError):
        ended: dict[str, Any] = json.loads(report.read_text())
        if restarts:
            write_atomically(report, json.dumps({**ended, "restarts": restarts}, indent=1))
        return ended
    return None


def _wait(seconds: float, stop_file: Path) -> int | None:
    """Wait, and return how to end where somebody asks for that meanwhile."""
    deadline = time.monotonic() + seconds
    with counted_signals() as signals:
        while time.monotonic() < deadline:
            if signals[signal.SIGINT]:
                return ExitCode.INTERRUPTED
            if signals[signal.SIGTERM] or stop_file.exists():
                return ExitCode.STOPPED
            time.sleep(_POLL_SECONDS)
    return None
