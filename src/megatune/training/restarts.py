"""max_restarts and on_bad_step: go_back: a run that crashed, hung or went back continues from its newest checkpoint by
itself; and OUTPUT/bad_steps.jsonl: each bad step with its rows and what became of it, over all processes of a run."""

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
from megatune.training.storage.files import json_line, read_json_lines, write_atomically, writing
from megatune.training.storage.store import list_checkpoints

# A process that failed, died, or hung. Settings, data and numbers are the same the next time.
_RESTARTED = {ExitCode.PROCESS_DIED, ExitCode.INTERNAL, ExitCode.OUT_OF_MEMORY}
_FIRST_WAIT, _LONGEST_WAIT = 5.0, 300.0  # seconds, doubled from restart to restart
_POLL_SECONDS = 0.1
# Where a run goes on from what it has saved itself, which is whole.
_OF_OWN_CHECKPOINT = {
    "resume_from_checkpoint": None,
    "overwrite_output_dir": False,
    "no_load_optim": False,
    "no_load_rng": False,
}


def check_restarts(settings: Settings, *, is_joined: bool, nnodes: int) -> None:
    """Refuse max_restarts, and on_bad_step: go_back, where nobody could start all ranks again.

    Raises:
        MegatuneError: SETTINGS.
    """
    run, method = settings.run, settings.run.on_bad_step
    asked = run.max_restarts
    if method == "go_back" and is_joined and not int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        what = "on_bad_step: go_back under torchrun without --max-restarts"
        why = "torchrun starts the processes, and would not start them again"
        fix = "write torchrun --max-restarts 3, or on_bad_step: skip"
    elif method == "go_back" and is_joined and (run.overwrite_output_dir or run.resume_from_checkpoint is False):
        what = "on_bad_step: go_back under torchrun, in a run that never resumes"
        why = "processes that torchrun starts again would not resume from a checkpoint"
        fix = "remove overwrite_output_dir: true and resume_from_checkpoint: false, or write on_bad_step: skip"
    elif method == "go_back" and not is_joined and nnodes > 1:
        what = f"on_bad_step: go_back with NNODES={nnodes}"
        why = "restarting several machines together is not supported"
        fix = f"start with torchrun --nnodes {nnodes} --max-restarts 3, or write on_bad_step: skip"
    elif asked and is_joined:
        what, why = f"max_restarts: {asked} under torchrun", "torchrun starts the processes, so it restarts them"
        fix = f"remove it, and write torchrun --max-restarts {asked}"
    elif asked and nnodes > 1:
        what, why = (
            f"max_restarts: {asked} with NNODES={nnodes}",
            "restarting several machines together is not supported",
        )
        fix = f"remove it, or start with torchrun --nnodes {nnodes} --max-restarts {asked}"
    else:
        return
    raise MegatuneError(Finding(what, why=why, fix=fix), ExitCode.SETTINGS)


def run_restarting(run: Callable[[Settings], int], settings: Settings, run_dir: Path, stop_file: Path) -> int:
    """Run until it is done, or ends in a way that a restart does not mend: after at most max_restarts crashes, and the
    times that on_bad_step lets it go back.

    Args:
        run: runs once, as `supervisor.run_ranks`, and leaves run_dir/report.json, to which the restarts are added.

    Returns:
        The exit code of the last run; STOPPED or INTERRUPTED where that was asked for between two of them.
    """
    assert settings.run.output_dir is not None
    output_dir = Path(settings.run.output_dir)
    before, report = _checkpoints(output_dir), run_dir / "report.json"
    restarts: list[dict[str, Any]] = []
    bad_steps = BadStepsFile(output_dir)
    times_back = len(bad_steps.went_back())
    asked = settings.run
    while True:
        report.unlink(missing_ok=True)
        code = run(settings)
        ended = _add_to_report(report, restarts)
        goes_back = code == ExitCode.NOT_FINITE and len(bad_steps.went_back()) > times_back
        crashes = [one for one in restarts if one["exit_code"] != ExitCode.NOT_FINITE]
        is_mended = goes_back or (code in _RESTARTED and len(crashes) < asked.max_restarts)
        if ended is None or not is_mended:
            return code
        own = [path for path, written in _checkpoints(output_dir).items() if before.get(path) != written]
        start = own[-1].name if own else None  # None: nothing of this run is saved, so it starts as it was asked to
        restart = {"from": start, "exit_code": code, "cause": _cause(ended), "ended": ended["ended"]}
        if any((one["from"], one["cause"]) == (start, restart["cause"]) for one in crashes):
            print(
                f"megatune: not started again: from {start or 'its start'} it has already ended in this way",
                file=sys.stderr,
            )
            return code
        wait = 0.0 if goes_back else min(_FIRST_WAIT * 2 ** len(crashes), _LONGEST_WAIT)
        restarts.append(restart)
        times_back += goes_back
        if goes_back:
            line = f"goes back to {start or 'where it began'}"
        else:
            place = f"from {start}" if start else "from its start"
            line = f"restart {len(crashes) + 1} of {asked.max_restarts}, {place}, in {wait:.0f} s"
        print(f"megatune: {line}", file=sys.stderr, flush=True)
        if (end := _wait(wait, stop_file)) is not None:
            return end
        if start:
            resume = asked.model_copy(update=_OF_OWN_CHECKPOINT)
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


BAD_STEPS_FILE = "bad_steps.jsonl"


class BadStepsFile:
    """The file of one run."""

    def __init__(self, output_dir: Path) -> None:
        self.path = output_dir / BAD_STEPS_FILE

    def begin(self, resume_step: int | None) -> list[dict[str, Any]]:
        """Drop what the run will come to again, and return the times that it went back.

        Args:
            resume_step: steps done before this process; None where the run starts anew.

        Raises:
            MegatuneError: CANNOT_WRITE.
        """
        with writing(self.path):
            if resume_step is None:
                self.path.unlink(missing_ok=True)
                return []
            records = read_json_lines(self.path)
            kept = [record for record in records if _goes_back(record) or record.get("step", 0) <= resume_step]
            if kept != records:
                write_atomically(self.path, "".join(map(json_line, kept)))
        return self.went_back()

    def went_back(self) -> list[dict[str, Any]]:
        """Return the records of the times that the run went back to a checkpoint."""
        return list(filter(_goes_back, read_json_lines(self.path)))

    def add(self, record: Mapping[str, Any]) -> None:
        """Keep a bad step.

        Raises:
            MegatuneError: CANNOT_WRITE.
        """
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json_line(record))


def _goes_back(record: Mapping[str, Any]) -> bool:
    return record.get("action") == "go_back" and isinstance(record.get("left_out"), list)
