"""`megatune train` as a user types it, in processes of its own, with faults put into them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml
from fault_injector import Fault, environment, firings
from runs import DEMO, tensors

LIMIT = 240.0  # seconds for one run; the machine may be busy with other tests


class Job:
    """A run that was started: twelve steps with tensor parallelism of two, a checkpoint after every third."""

    def __init__(
        self, model: Path, folder: Path, faults: Sequence[Fault] = (), words: Sequence[str] = (), **changes: Any
    ) -> None:
        self.output_dir, self.fired = folder / "out", folder / "fired"
        values = {
            "model_name_or_path": str(model),
            "output_dir": str(self.output_dir),
            "dataset_dir": str(DEMO),
            "dataset": "identity",
            "template": "qwen3_nothink",
            "cutoff_len": 128,
            "model_name": "Tuna",
            "model_author": "the team",
            "per_device_train_batch_size": 4,
            "max_steps": 12,
            "save_steps": 3,
            "logging_steps": 1,
            "learning_rate": 1.0e-3,
            "tensor_model_parallel_size": 2,
            "report_to": "none",
            "plot_loss": False,
            **changes,
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        base = {**os.environ, "MEGATUNE_CACHE": str(folder.parent / "cache"), "OMP_NUM_THREADS": "1"}
        # Every process of the run has it in its environment, wherever it was born.
        base["MEGATUNE_TEST_JOB"] = self._mark = f"{folder} {time.monotonic_ns()}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megatune", "train", str(folder / "run.yaml"), *words],
            env=environment(faults, self.fired, base) if faults else base,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def finish(self, limit: float = LIMIT) -> Ended:
        """Wait for the end, and hold what is true of every end: no process is left, the report can be read, nothing
        half-written looks like a checkpoint, and what failed is told without a wall of tracebacks."""
        try:
            stdout, stderr = self.process.communicate(timeout=limit)
            ended = time.time()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 15
        while (left := self.members()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, [process.name() for process in left]
        assert stderr.count("Traceback") == 0, stderr
        report = self.output_dir / "launch/report.json"
        content = json.loads(report.read_text()) if report.exists() else {}
        for checkpoint in self.output_dir.glob("checkpoint-*"):
            assert (checkpoint / "training/manifest.json").is_file(), checkpoint
        return Ended(self.process.returncode, stdout, stderr, content, ended, firings(self.fired))

    def members(self) -> list[psutil.Process]:
        """Every living process of the run."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                named = process.environ().get("MEGATUNE_TEST_JOB") == self._mark
                if named and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def rank(self, number: int) -> psutil.Process:
        """The process of one rank."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in family if child.name() == f"megatune-rank{number}")

    def until(self, beginning: str) -> None:
        """Read what is printed, up to the line that begins so."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(beginning):
                return
        raise AssertionError(f"the run ended before {beginning!r}")


class Ended:
    """How a run ended."""

    def __init__(
        self, code: int, stdout: str, stderr: str, report: dict[str, Any], ended: float, fired: list[dict[str, Any]]
    ) -> None:
        self.code, self.stdout, self.stderr, self.report, self.fired = code, stdout, stderr, report, fired
        # From the first fault to the report of it.
        self.seconds = (report.get("ended") or ended) - fired[0]["time"] if fired else None

    @property
    def line(self) -> str:
        """The first line that a user reads of it."""
        lines = self.stderr.splitlines()
        return next((line for line in lines if line.startswith("megatune:")), lines[0])  # the launcher's, or a refusal


def weights(folder: Path) -> dict[str, bytes]:
    """Every tensor of the model in a folder, by name."""
    return {name: tensor.numpy().tobytes() for name, tensor in tensors(folder).items()}
