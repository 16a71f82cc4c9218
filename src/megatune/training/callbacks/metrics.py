"""Every logged step and evaluation, as JSON lines: metrics.jsonl, and trainer_log.jsonl for LLaMA-Factory's tools."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatune.training.callbacks.base import Callback, EvalReport, LogReport, TrainInfo, TrainSummary
from megatune.training.storage import write_atomically

METRICS_NAME = "metrics.jsonl"
# Keys that every line of steps has, null where they are no part of the loss.
_ALWAYS = {"load_balancing_loss": None, "z_loss": None}


class _JsonLines(Callback):
    """A file of JSON lines that survives kill -9 and continues after a resume.

    Args:
        path: the file. Records of steps after `resume_step`, and a torn last line, are dropped from it.
        step_key: the key of a record that holds its step.
        resume_step: steps done before this process.
    """

    def __init__(self, path: Path, step_key: str, resume_step: int) -> None:
        self._path, self._step_key, self._resume_step = path, step_key, resume_step

    def on_train_begin(self, info: TrainInfo) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            records = read_json_lines(self._path)
            kept = [record for record in records if record.get(self._step_key, math.inf) <= self._resume_step]
            write_atomically(self._path, "".join(map(_line, kept)))
        self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def on_train_end(self, summary: TrainSummary) -> None:
        self._file.close()

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record; a number that is not finite becomes null, as JSON has no other word for it."""
        self._file.write(_line(record))


class Metrics(_JsonLines):
    """metrics.jsonl: the fields of LogReport; those of EvalReport with the prefix eval_ (step and epoch without)."""

    def __init__(self, output_dir: Path, resume_step: int = 0) -> None:
        super().__init__(output_dir / METRICS_NAME, "step", resume_step)

    def on_log(self, report: LogReport) -> None:
        fields = asdict(report)
        self.append({**_ALWAYS, **fields.pop("metrics"), **fields})

    def on_evaluate(self, report: EvalReport) -> None:
        fields = asdict(report)
        fields = {**fields.pop("metrics"), **fields}
        self.append({key if key in ("step", "epoch") else f"eval_{key}": value for key, value in fields.items()})


class TrainerLog(_JsonLines):
    """trainer_log.jsonl, with LLaMA-Factory's keys and formats."""

    def __init__(self, output_dir: Path, resume_step: int = 0) -> None:
        super().__init__(output_dir / "trainer_log.jsonl", "current_steps", resume_step)
        self._total_steps = 0
        self._times: dict[str, str] = {}

    def on_train_begin(self, info: TrainInfo) -> None:
        self._total_steps = info.total_steps
        super().on_train_begin(info)

    def on_log(self, report: LogReport) -> None:
        self._times = {
            "elapsed_time": str(timedelta(seconds=int(report.elapsed_seconds))),
            "remaining_time": str(timedelta(seconds=int(report.eta_seconds))),
        }
        self._append(report.step, {"loss": report.loss, "lr": report.learning_rate, "epoch": report.epoch})

    def on_evaluate(self, report: EvalReport) -> None:
        self._append(report.step, {"eval_loss": report.loss, "epoch": report.epoch})

    def _append(self, step: int, values: dict[str, Any]) -> None:
        percentage = round(100 * step / self._total_steps, 2)
        counts = {"current_steps": step, "total_steps": self._total_steps}
        self.append({**counts, **values, "percentage": percentage, **self._times})


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the records of a file; lines that are not whole are passed over, and a file that is not there has none."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def _line(record: Mapping[str, Any]) -> str:
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }
    return json.dumps(finite, ensure_ascii=False, allow_nan=False) + "\n"
