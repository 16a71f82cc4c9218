"""Timing of a run: the seconds of each phase of a step, and a trace of all processes in Chrome's format, for Perfetto.

Format: docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format).
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class PhaseTimer:
    """Measures the seconds of a step by phase.

    Args:
        note: called with each phase as it begins.
    """

    def __init__(self, note: Callable[[str], None] = lambda phase: None) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._note = note
        self._began = time.monotonic()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure the time inside the block."""
        began = time.monotonic()
        self._note(name)
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - began

    @property
    def total(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self._began


_FOLDER = "timeline"


class Timeline:
    """Records the spans of one process in its own file; does nothing if the run has no timeline (`new_timeline`).

    Args:
        run_dir: the run's folder, on a disk shared by its machines.
        name: name of the process, such as actor_train-0.
    """

    def __init__(self, run_dir: Path, name: str) -> None:
        folder = run_dir / _FOLDER
        self._path = folder / f"{name}.jsonl" if folder.is_dir() else None
        self._phase: tuple[str, int, float] | None = None

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the block as a span."""
        began = time.time()
        try:
            yield
        finally:
            self._write(name, began, {})

    def begin(self, phase: str, step: int) -> None:
        """Record the end of the current phase, and begin another one."""
        self.end()
        self._phase = phase, step, time.time()

    def end(self) -> None:
        """Record the end of the current phase."""
        if self._phase is not None:
            phase, step, began = self._phase
            self._write(phase, began, {"step": step})
            self._phase = None

    def _write(self, name: str, began: float, details: dict[str, Any]) -> None:
        if self._path is None:
            return
        event = {"name": name, "ts": began * 1e6, "dur": (time.time() - began) * 1e6, "args": details}
        with (
            contextlib.suppress(OSError),
            self._path.open("a", encoding="utf-8") as file,
        ):  # a full disk must not end the run
            file.write(json.dumps(event) + "\n")


def new_timeline(run_dir: Path, *, wanted: bool) -> None:
    """Remove an earlier run's timeline; processes started from now on record theirs if `wanted`."""
    shutil.rmtree(run_dir / _FOLDER, ignore_errors=True)
    if wanted:
        (run_dir / _FOLDER).mkdir(parents=True)


def write_timeline(run_dir: Path, target: Path) -> None:
    """Write the records of all processes as one trace, the driver first; concurrent spans go to several rows."""
    notes = sorted((run_dir / _FOLDER).glob("*.jsonl"), key=lambda path: (path.stem != "driver", path.stem))
    events: list[dict[str, Any]] = []
    for number, path in enumerate(notes):
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": path.stem}})
        ends: list[float] = []  # of rows
        for event in sorted(
            map(json.loads, path.read_text(encoding="utf-8").splitlines()), key=lambda each: each["ts"]
        ):
            row = next((row for row, end in enumerate(ends) if end <= event["ts"]), len(ends))
            ends[row : row + 1] = [event["ts"] + event["dur"]]
            events.append({"ph": "X", "cat": "role", "pid": number, "tid": row, **event})
    if notes:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
