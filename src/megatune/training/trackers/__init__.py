"""Experiment trackers, each in a separate process next to rank 0.

rank 0 --- a pipe with JSON lines ---> worker --- the tracker's library ---> files, or a server

A library that hangs, crashes, holds the GIL or leaves threads behind affects only that process. The pipe is bounded:
rank 0 never waits for it, and records that do not fit are dropped.
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
# TensorBoard only writes files, and needs no process.
WORKERS = {
    "wandb": "megatune.training.trackers.libraries:WandbRun",
    "swanlab": "megatune.training.trackers.libraries:SwanLabRun",
    "mlflow": "megatune.training.trackers.libraries:MLflowRun",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Information on a run for a tracker.

    Attributes:
        id: of the tracker's run; the same after a resume.
        name: of the run, for users.
        output_dir: of the run, absolute.
        settings: all resolved settings by name, without secrets.
    """

    id: str
    name: str
    output_dir: str
    settings: Mapping[str, Any]


class Tracker(Protocol):
    """A tracker's run. Exceptions end it with a warning, and do not affect training."""

    def __init__(self, info: RunInfo) -> None:
        """Start the run, or resume the one with its id."""

    def where(self) -> str:
        """Return the URL or folder of the run."""
        ...

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log values of an optimizer step."""

    def finish(self, outcome: str, summary: Mapping[str, float]) -> None:
        """Log the outcome (`TrainSummary.outcome`), and wait until everything is written or sent."""


def asked_trackers(settings: Settings) -> list[str]:
    """Return the trackers that a run reports to; `all` means those whose libraries are installed."""
    named = {*settings.logging.report_to, *(["swanlab"] if settings.logging.use_swanlab else [])}
    return [name for name in settings.trackers if name in named or _is_installed(name)]


def check_installed(settings: Settings) -> None:
    """Check that the libraries of the requested trackers are installed.

    Raises:
        MegatuneError: UNAVAILABLE, naming all that are missing.
    """
    missing = [name for name in asked_trackers(settings) if not _is_installed(name)]
    findings = [
        Finding(f"report_to has {name}, whose library is not installed", fix=f'pip install "megatune[{name}]"')
        for name in missing
    ]
    if settings.logging.swanlab_mode == "local" and "swanlab" in settings.trackers and not _is_installed("swanboard"):
        what = "swanlab_mode: local, but the dashboard that shows such runs is not installed"
        findings.append(Finding(what, fix='pip install "swanlab[dashboard]", or write swanlab_mode: offline'))
    if findings:
        raise MegatuneError(findings, ExitCode.UNAVAILABLE)


def run_info(settings: Settings, run_id: str, output_dir: Path) -> RunInfo:
    values = {
        info.name: setting_value(settings, path)
        for path, info in all_settings().items()
        if Mark.SECRET not in info.marks
    }
    return RunInfo(
        id=run_id, name=run_name(settings, output_dir), output_dir=str(output_dir.absolute()), settings=values
    )


def run_name(settings: Settings, output_dir: Path) -> str:
    """Return the run's name in log lines and trackers."""
    return settings.run.run_name or output_dir.absolute().name


def read_ids(output_dir: Path) -> dict[str, str]:
    """Return the ids of a run's tracker runs, by tracker; {} if they cannot be read."""
    try:
        found = json.loads((output_dir / IDS_NAME).read_text(encoding="utf-8"))
        return {name: run_id for name, run_id in found.items() if name in TRACKERS and isinstance(run_id, str)}
    except (OSError, ValueError, AttributeError):
        return {}


def new_id(tracker: str) -> str:
    """Return an id for a new run; for Weights & Biases WANDB_RUN_ID, if set."""
    given = os.environ.get("WANDB_RUN_ID") if tracker == "wandb" else None
    return given or uuid.uuid4().hex[:16]


def _is_installed(tracker: str) -> bool:
    return importlib.util.find_spec(tracker) is not None
