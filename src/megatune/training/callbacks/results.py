"""The files in which Transformers' and LLaMA-Factory's users look for the outcome of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from megatune.training.callbacks.base import Callback, EvalReport, StepReport, TrainInfo, TrainSummary
from megatune.training.callbacks.metrics import METRICS_NAME, read_json_lines
from megatune.training.storage import write_atomically

# The part of a line of metrics.jsonl that Transformers' log_history has, under the same names.
_HISTORY = ("epoch", "grad_norm", "learning_rate", "loss", "eval_loss", "step")


class Results(Callback):
    """trainer_state.json with its log_history, train_results.json, eval_results.json and all_results.json."""

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self._num_steps, self._loss_sum = 0, 0.0
        self._epoch: float | None = 0.0
        self._evaluation: dict[str, Any] = {}

    def on_train_begin(self, info: TrainInfo) -> None:
        self._info = info

    def on_step_end(self, report: StepReport) -> None:
        self._num_steps += 1
        self._loss_sum += report.loss
        self._epoch = report.epoch

    def on_evaluate(self, report: EvalReport) -> None:
        self._evaluation = {
            "epoch": report.epoch,
            "eval_loss": report.loss,
            "eval_perplexity": report.perplexity,
            "eval_runtime": report.seconds,
        }

    def on_train_end(self, summary: TrainSummary) -> None:
        info, best, num_steps = self._info, summary.best_checkpoint, self._num_steps
        state = {
            "best_metric": summary.best_loss,
            "best_model_checkpoint": str(best) if best is not None else None,
            "epoch": self._epoch,
            "global_step": summary.step,
            "max_steps": info.total_steps,
            "num_train_epochs": None if info.num_train_epochs is None else math.ceil(info.num_train_epochs),
            "is_world_process_zero": True,
            "log_history": [_history_entry(record) for record in read_json_lines(self._output_dir / METRICS_NAME)],
        }
        self._write("trainer_state.json", state)
        if summary.outcome != "finished" or not num_steps:
            return
        train = {
            "epoch": self._epoch,
            "train_loss": self._loss_sum / num_steps,
            "train_runtime": summary.seconds,
            "train_samples_per_second": num_steps * info.global_batch_size / summary.seconds,
            "train_steps_per_second": num_steps / summary.seconds,
        }
        self._write("train_results.json", train)
        if self._evaluation:
            self._write("eval_results.json", self._evaluation)
        self._write("all_results.json", {**train, **self._evaluation})

    def _write(self, name: str, content: dict[str, Any]) -> None:
        write_atomically(self._output_dir / name, json.dumps(content, indent=2) + "\n")


def _history_entry(record: dict[str, Any]) -> dict[str, Any]:
    entry = {key: record[key] for key in _HISTORY if key in record}
    return entry | ({"eval_runtime": record["eval_seconds"]} if "eval_seconds" in record else {})
