"""Restarts of a run from its newest checkpoint after a crash or a hang (max_restarts) or a bad step (on_bad_step:
go_back), and OUTPUT/bad_steps.jsonl, which records the bad steps of all processes of a run with their rows."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatune.config.settings import Settings
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.launch.supervisor import counted_signals
from megatune.references import assign, ref, remove
from megatune.training.storage.files import json_line, keep_json_lines, read_json_lines, write_atomically, writing
from megatune.training.storage.store import list_checkpoints
from megatune.training.train_state import checkpoint_to_try

# A process failed, died or hung. A restart does not help with errors in settings, data or numbers.
_RESTARTED = {ExitCode.PROCESS_DIED, ExitCode.INTERNAL, ExitCode.OUT_OF_MEMORY}
_FIRST_WAIT, _LONGEST_WAIT = 5.0, 300.0  # seconds, doubled from restart to restart
_POLL_SECONDS = 0.1
# Settings to resume from a checkpoint of this run.
_RESUME_SETTINGS = {
    "resume_from_checkpoint": None,
    "overwrite_output_dir": False,
    "no_load_optim": False,
    "no_load_rng": False,
}


def check_restarts(settings: Settings, *, is_joined: bool, nnodes: int) -> None:
    """Check that all ranks can be restarted, for max_restarts and on_bad_step: go_back.

    Raises:
        MegatuneError: SETTINGS.
    """
    run, method = settings.run, settings.run.on_bad_step
    asked, back, skip = run.max_restarts, *(assign("on_bad_step", value) for value in ("go_back", "skip"))
    if method == "go_back" and is_joined and not int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        what = f"{back} under torchrun without --max-restarts"
        why = "torchrun starts the processes, and would not start them again"
        fix = f"write torchrun --max-restarts 3, or {skip}"
    elif method == "go_back" and is_joined and (run.overwrite_output_dir or run.resume_from_checkpoint is False):
        what = f"{back} under torchrun, in a run that never resumes"
        why = "processes that torchrun starts again would not resume from a checkpoint"
        fix = f"{remove('overwrite_output_dir')} and {ref('resume_from_checkpoint')}, or write {skip}"
    elif method == "go_back" and not is_joined and nnodes > 1:
        what = f"{back} with NNODES={nnodes}"
        why = "restarting several machines together is not supported"
        fix = f"start with torchrun --nnodes {nnodes} --max-restarts 3, or write {skip}"
    elif asked and is_joined:
        what = f"{assign('max_restarts', asked)} under torchrun"
        why = "torchrun starts the processes, so it restarts them"
        fix = f"remove it, and write torchrun --max-restarts {asked}"
    elif asked and nnodes > 1:
        what = f"{assign('max_restarts', asked)} with NNODES={nnodes}"
        why = "restarting several machines together is not supported"
        fix = f"remove it, or start with torchrun --nnodes {nnodes} --max-restarts {asked}"
    else:
        return
    raise MegatuneError(Finding(what, why=why, fix=fix), ExitCode.SETTINGS)


def run_restarting(run: Callable[[Settings], int], settings: Settings, run_dir: Path, stop_file: Path) -> int:
    """Run, and restart up to max_restarts times after crashes and hangs, and whenever on_bad_step goes back.

    Args:
        run: runs once, as `supervisor.run_ranks`, and writes run_dir/report.json, to which the restarts are added.

    Returns:
        The exit code of the last run; STOPPED or INTERRUPTED if a stop was requested between two of them.
    """
    assert settings.run.output_dir is not None
    output_dir = Path(settings.run.output_dir)
    before, report = _checkpoints(output_dir), run_dir / "report.json"
    restarts: list[dict[str, Any]] = []
    bad_steps, asked = BadStepsFile(output_dir), settings.run
    while True:
        report.unlink(missing_ok=True)
        # A run from the start removes the records of an earlier one.
        times_back = len(bad_steps.went_back()) if checkpoint_to_try(settings) is not None else 0
        code = run(settings)
        ended = _add_to_report(report, restarts)
        goes_back = code == ExitCode.NOT_FINITE and len(bad_steps.went_back()) > times_back
        crashes = [one for one in restarts if one["exit_code"] != ExitCode.NOT_FINITE]
        restarts_now = goes_back or (code in _RESTARTED and len(crashes) < asked.max_restarts)
        if ended is None or not restarts_now:
            return code
        new = [path for path, written in _checkpoints(output_dir).items() if before.get(path) != written]
        start = new[-1].name if new else None  # None: this run has saved nothing, so it starts with unchanged settings
        restart = {"from": start, "exit_code": code, "cause": _cause(ended), "ended": ended["ended"]}
        if any((one["from"], one["cause"]) == (start, restart["cause"]) for one in crashes):
            why = f"from {start or 'its start'} it has already ended in this way"
            print(f"megatune: not restarted: {why}", file=sys.stderr)
            return code
        wait = 0.0 if goes_back else min(_FIRST_WAIT * 2 ** len(crashes), _LONGEST_WAIT)
        restarts.append(restart)
        if goes_back:
            line = f"goes back to {start or 'its start'}"
        else:
            line = f"restart {len(crashes) + 1} of {asked.max_restarts}, from {start or 'its start'}, in {wait:.0f} s"
        print(f"megatune: {line}", file=sys.stderr, flush=True)
        if (end := _wait(wait, stop_file)) is not None:
            return end
        if start:
            resume = asked.model_copy(update=_RESUME_SETTINGS)
            settings = settings.model_copy(update={"run": resume})


def _checkpoints(output_dir: Path) -> dict[Path, int]:
    """Return the checkpoints in order of steps, with their modification times: a later one may have the same name."""
    return {path: path.stat().st_mtime_ns for path in list_checkpoints(output_dir)}


def _cause(ended: dict[str, Any]) -> str:
    """Return the cause of a run's end without numbers, so that it does not depend on rank, process or step."""
    return re.sub(r"\d+", "N", "; ".join(finding["what"] for finding in ended["findings"]))


def _add_to_report(report: Path, restarts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Add the restarts to the report, and return it; None if there is no report, since a disk may be full."""
    with contextlib.suppress(OSError, ValueError):
        ended: dict[str, Any] = json.loads(report.read_text())
        if restarts:
            write_atomically(report, json.dumps({**ended, "restarts": restarts}, indent=1))
        return ended
    return None


def _wait(seconds: float, stop_file: Path) -> int | None:
    """Wait; return an exit code if a stop is requested meanwhile."""
    deadline = time.monotonic() + seconds
    with counted_signals() as signals:
        while time.monotonic() < deadline:
            if signals[signal.SIGINT]:
                return ExitCode.INTERRUPTED
            if signals[signal.SIGTERM] or stop_file.exists():
                return ExitCode.STOPPED
            time.sleep(_POLL_SECONDS)
    return None


BAD_STEPS_FILE = "bad_steps.jsonl"


class BadStepsFile:
    """The bad_steps.jsonl of a run."""

    def __init__(self, output_dir: Path) -> None:
        self.path = output_dir / BAD_STEPS_FILE

    def begin(self, resume_step: int | None) -> list[dict[str, Any]]:
        """Remove the records of steps that will be trained again; return the records of going back.

        Args:
            resume_step: steps done before this process; None for a new run.

        Raises:
            MegatuneError: CANNOT_WRITE.
        """
        with writing(self.path):
            if resume_step is None:
                self.path.unlink(missing_ok=True)
                return []
            keep_json_lines(self.path, lambda record: _goes_back(record) or record.get("step", 0) <= resume_step)
        return self.went_back()

    def went_back(self) -> list[dict[str, Any]]:
        """Return the records of bad steps after which the run went back to a checkpoint."""
        return list(filter(_goes_back, read_json_lines(self.path)))

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a bad step.

        Raises:
            MegatuneError: CANNOT_WRITE.
        """
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json_line(record))


def _goes_back(record: Mapping[str, Any]) -> bool:
    return record.get("action") == "go_back" and isinstance(record.get("left_out"), list)
