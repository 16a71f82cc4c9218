"""Every logged step and evaluation, as JSON lines: metrics.jsonl, and trainer_log.jsonl for LLaMA-Factory's tools."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatune.training.callbacks.base import Callback, EvalReport, LogReport, TrainInfo, TrainSummary
from megatune.training.callbacks.json_lines import JsonLines

METRICS_NAME = "metrics.jsonl"


class Metrics(Callback):
    """metrics.jsonl: the fields of LogReport; those of EvalReport with the prefix eval_ (step and epoch without)."""

    def __init__(self, output_dir: Path, resume_step: int = 0) -> None:
        self._path = output_dir / METRICS_NAME
        self._resume_step = resume_step
        self._lines: JsonLines | None = None

    def on_train_begin(self, info: TrainInfo) -> None:
        self._lines = JsonLines(self._path, "step", self._resume_step)

    def on_log(self, report: LogReport) -> None:
        self._append(asdict(report))

    def on_evaluate(self, report: EvalReport) -> None:
        fields = asdict(report)
        self._append({key if key in ("step", "epoch") else f"eval_{key}": value for key, value in fields.items()})

    def on_train_end(self, summary: TrainSummary) -> None:
        if self._lines is not None:
            self._lines.close()

    def _append(self, record: dict[str, Any]) -> None:
        assert self._lines is not None, "on_train_begin comes first"
        self._lines.append(record)


class TrainerLog(Callback):
    """trainer_log.jsonl, with LLaMA-Factory's keys and formats."""

    def __init__(self, output_dir: Path, resume_step: int = 0) -> None:
        self._path = output_dir / "trainer_log.jsonl"
        self._resume_step = resume_step
        self._lines: JsonLines | None = None
        self._total_steps = 0
        self._times: dict[str, str] = {}

    def on_train_begin(self, info: TrainInfo) -> None:
        self._total_steps = info.total_steps
        self._lines = JsonLines(self._path, "current_steps", self._resume_step)

    def on_log(self, report: LogReport) -> None:
        self._times = {
            "elapsed_time": str(timedelta(seconds=int(report.elapsed_seconds))),
            "remaining_time": str(timedelta(seconds=int(report.eta_seconds))),
        }
        self._append(report.step, {"loss": report.loss, "lr": report.learning_rate, "epoch": report.epoch})

    def on_evaluate(self, report: EvalReport) -> None:
        self._append(report.step, {"eval_loss": report.loss, "epoch": report.epoch})

    def on_train_end(self, summary: TrainSummary) -> None:
        if self._lines is not None:
            self._lines.close()

    def _append(self, step: int, values: dict[str, Any]) -> None:
        assert self._lines is not None, "on_train_begin comes first"
        percentage = round(100 * step / self._total_steps, 2)
        counts = {"current_steps": step, "total_steps": self._total_steps}
        self._lines.append({**counts, **values, "percentage": percentage, **self._times})
