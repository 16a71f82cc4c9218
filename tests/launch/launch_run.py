"""Starts the launch driver as a command of its own, in a process group of its own, with a time limit."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatune.launch.context import heartbeat_path, read_beat

HERE = Path(__file__).parent
LIMIT = 25.0  # seconds; no launch test waits longer for anything


class Run:
    """One started driver."""

    def __init__(
        self, run_dir: Path, target: str, nproc: int, payload: dict[str, Any], options: dict[str, Any]
    ) -> None:
        self.run_dir = run_dir
        module = "launch_targets" if ":" not in target else ""
        arguments = [
            f"{module}:{target}" if module else target,
            run_dir,
            nproc,
            json.dumps(payload),
            json.dumps(options),
        ]
        self.process = subprocess.Popen(
            [sys.executable, HERE / "launch_driver.py", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self, limit: float = LIMIT) -> tuple[int, str, str]:
        """Waits for the end: exit code, stdout, stderr. Fails if a process of the run is left."""
        stdout, stderr = self.process.communicate(timeout=limit)
        self.assert_no_orphans()
        return self.process.returncode, stdout, stderr

    def wait_for_step(self, *ranks: int, step: int = 1) -> None:
        """Until the ranks are in `step`, or beyond."""

        def all_there() -> bool:
            beats = [read_beat(heartbeat_path(self.run_dir, rank)) for rank in ranks]
            return all(beat and beat.step >= step for beat in beats)

        wait_until(all_there)

    def members(self) -> list[psutil.Process]:
        """Every living process that names the run's folder or has its log open."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                    files = [file.path for file in process.open_files()]
                    if any(path.startswith(str(self.run_dir)) for path in files):
                        found.append(process)
            except psutil.Error:
                continue
        return found

    def assert_no_orphans(self) -> None:
        wait_until(lambda: not self.members())

    def rank_pids(self) -> list[int]:
        """The ranks of a run that is in its loop, as they introduce themselves in their logs."""
        logs = sorted((self.run_dir / "logs").glob("rank-*.log"))
        return [int(re.findall(r"^=== rank \d+, process (\d+)", log.read_text(), re.MULTILINE)[-1]) for log in logs]

    def report(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "report.json").read_text())


def is_running(pid: int) -> bool:
    """Whether a process lives; a dead one that init has not reaped yet does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """launch(target, nproc=2, payload={}, **options of run_ranks) -> Run; ends what the test leaves."""
    runs: list[Run] = []

    def start(target: str, nproc: int = 2, payload: dict[str, Any] | None = None, **options: Any) -> Run:
        runs.append(Run(tmp_path / "run", target, nproc, payload or {}, options))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGKILL)
            run.process.communicate()
