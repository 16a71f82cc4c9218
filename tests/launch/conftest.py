"""The fixture that starts a run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launch_run import Run


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
