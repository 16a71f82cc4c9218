"""Where numbers of a run go beside its own files: each tracker is a process of its own beside rank 0.

rank 0 --- a pipe with JSON lines ---> worker --- the tracker's own library ---> files, or a server

A library that hangs, crashes, takes the interpreter lock or leaves threads behind does so in that process. The pipe
is bounded: rank 0 never waits for it, and what does not fit is left out.
"""

from __future__ import annotations

import importlib.util
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatune.config.setting import Mark
from megatune.config.settings import TRACKERS, Settings, all_settings, setting_value
from megatune.errors import ExitCode, Finding, MegatuneError

IDS_NAME = "trackers.json"
DEFAULT_PROJECT = "megatune"
# Beside TensorBoard, which writes files and needs no process.
WORKERS = {
    "wandb": "megatune.training.trackers.libraries:WandbRun",
    "swanlab": "megatune.training.trackers.libraries:SwanLabRun",
    "mlflow": "megatune.training.trackers.libraries:MLflowRun",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What a tracker is told of a run before its first number.

    Attributes:
        id: names the tracker's run; the same after a resume.
        name: as people call the run.
        output_dir: of the run, absolute.
        settings: all that were resolved, by their names; no secrets.
        options: project, workspace, mode and folder, as far as settings say.
    """

    id: str
    name: str
    output_dir: str
    settings: Mapping[str, Any]
    options: Mapping[str, str]


class Tracker(Protocol):
    """A tracker's run. Any exception ends it, with a warning; none reaches training."""

    def __init__(self, info: RunInfo) -> None:
        """Begin the run, or go on with the one that has its id."""

    def where(self) -> str:
        """Say where people find it: a URL or a folder."""
        ...

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers of an optimizer step."""

    def finish(self, outcome: str, summary: Mapping[str, float]) -> None:
        """Log how the run ended (`TrainSummary.outcome`), and wait until all is written or sent."""


def asked_trackers(settings: Settings) -> list[str]:
    """Return the trackers that a run reports to. Of `all` those whose libraries are installed."""
    named = {*settings.logging.report_to, *(["swanlab"] if settings.logging.use_swanlab else [])}
    return [name for name in settings.trackers if name in named or _is_installed(name)]


def check_installed(settings: Settings) -> None:
    """Refuse what is named and whose library is not installed.

    Raises:
        MegatuneError: UNAVAILABLE, all of them.
    """
    missing = [name for name in asked_trackers(settings) if not _is_installed(name)]
    findings = [
        Finding(f"report_to has {name}, whose library is not installed", fix=f'pip install "megatune[{name}]"')
        for name in missing
    ]
    if settings.logging.swanlab_mode == "local" and "swanlab" in settings.trackers and not _is_installed("swanboard"):
        what = "swanlab_mode: local, and the page that shows such runs is not installed"
        findings.append(Finding(what, fix='pip install "swanlab[dashboard]", or write swanlab_mode: offline'))
    if findings:
        raise MegatuneError(findings, ExitCode.UNAVAILABLE)


def run_info(settings: Settings, tracker: str, run_id: str, output_dir: Path) -> RunInfo:
    """Return what a tracker is told."""
    logs = settings.logging
    values = {
        info.name: setting_value(settings, path)
        for path, info in all_settings().items()
        if Mark.SECRET not in info.marks
    }
    options = {
        "wandb": {"project": logs.wandb_project, "folder": logs.wandb_save_dir},
        "swanlab": {
            "project": logs.swanlab_project,
            "workspace": logs.swanlab_workspace,
            "mode": logs.swanlab_mode,
        },
    }.get(tracker, {})
    return RunInfo(
        id=run_id,
        name=run_name(settings, output_dir),
        output_dir=str(output_dir.absolute()),
        settings=values,
        options={key: value for key, value in options.items() if value is not None},
    )


def run_name(settings: Settings, output_dir: Path) -> str:
    """Return what a run is called in log lines and trackers."""
    return settings.run.run_name or output_dir.absolute().name


def read_ids(output_dir: Path) -> dict[str, str]:
    """Return the ids of a run's tracker runs, by tracker; none where they cannot be read."""
    try:
        found = json.loads((output_dir / IDS_NAME).read_text(encoding="utf-8"))
        return {name: run_id for name, run_id in found.items() if name in TRACKERS and isinstance(run_id, str)}
    except (OSError, ValueError, AttributeError):
        return {}


def new_id(tracker: str) -> str:
    """Return an id for a new run, which each of the trackers takes; of Weights & Biases the one that a user set."""
    given = os.environ.get("WANDB_RUN_ID") if tracker == "wandb" else None
    return given or uuid.uuid4().hex[:16]


def _is_installed(tracker: str) -> bool:
    return importlib.util.find_spec(tracker) is not None
