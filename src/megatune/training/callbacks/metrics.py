"""Files of metrics: JSON lines and TensorBoard events of logged steps and evaluations, and the results of a run.

metrics.jsonl, generations.jsonl and plan.json are megatune's; the others are those of Transformers and LLaMA-Factory.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatune.engine import device
from megatune.errors import MegatuneError
from megatune.plan.calibration import keep_first
from megatune.plan.case import Case
from megatune.plan.run import record as plan_record
from megatune.progress import say
from megatune.training.callbacks.base import (
    SHOW_ALL,
    Callback,
    Generated,
    Record,
    Shown,
    StepReport,
    TrainSummary,
    evaluation_results,
    history_entry,
    is_evaluation,
    is_log,
    trainer_line,
)
from megatune.training.run_schedule import RunSchedule
from megatune.training.storage.files import json_line, keep_json_lines, read_json_lines, write_atomically

METRICS_NAME, GENERATIONS_NAME = "metrics.jsonl", "generations.jsonl"
_WARM_UP = 2  # first steps, whose times are left out of plan.json


class _JsonLines(Callback):
    """A file of JSON lines that survives kill -9 and continues after a resume.

    At the start, records whose `step_key` is above `resume_step`, and an incomplete last line, are removed; those of an
    earlier run all are, since it may have evaluated before its first step.
    """

    def __init__(self, path: Path, step_key: str, resume_step: int) -> None:
        self._path, self._step_key, self._resume_step = path, step_key, resume_step

    def on_train_begin(self, schedule: RunSchedule) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        done = self._resume_step
        keep_json_lines(self._path, lambda record: done > 0 and record.get(self._step_key, math.inf) <= done)
        self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def on_train_end(self, summary: TrainSummary) -> None:
        self._file.close()

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record. Numbers that are not finite become null."""
        self._file.write(json_line(record))


class Metrics(_JsonLines):
    """Writes metrics.jsonl: all records."""

    def __init__(self, output_dir: Path, resume_step: int = 0) -> None:
        super().__init__(output_dir / METRICS_NAME, "step", resume_step)

    def on_record(self, record: Record) -> None:
        self.append(record)


class Generations(_JsonLines):
    """Writes generations.jsonl: all generated answers, with their prompts."""

    def __init__(self, output_dir: Path, resume_step: int = 0) -> None:
        super().__init__(output_dir / GENERATIONS_NAME, "step", resume_step)

    def on_generate(self, generated: Generated) -> None:
        for row in generated.rows:
            self.append(row)


class TrainerLog(_JsonLines):
    """Writes trainer_log.jsonl, with LLaMA-Factory's keys and formats."""

    def __init__(self, output_dir: Path, resume_step: int = 0) -> None:
        super().__init__(output_dir / "trainer_log.jsonl", "current_steps", resume_step)
        self._total_steps = 0
        self._last: Record = {}

    def on_train_begin(self, schedule: RunSchedule) -> None:
        self._total_steps = schedule.total_steps
        super().on_train_begin(schedule)

    def on_record(self, record: Record) -> None:
        self._last = record if is_log(record) else self._last
        if is_log(record) or is_evaluation(record):
            self.append(trainer_line(record, self._total_steps, self._last))


class Results(Callback):
    """Writes trainer_state.json with log_history, train_results.json, eval_results.json and all_results.json."""

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self._num_steps, self._loss_sum = 0, 0.0
        self._epoch: float | None = None
        self._evaluation: dict[str, Any] = {}

    def on_train_begin(self, schedule: RunSchedule) -> None:
        self._schedule = schedule

    def on_step_end(self, report: StepReport) -> None:
        if report.is_bad:
            return
        self._num_steps += 1
        self._loss_sum += report.loss
        self._epoch = report.epoch

    def on_record(self, record: Record) -> None:
        if is_evaluation(record):
            self._evaluation |= evaluation_results(record)  # the loss and answers may be evaluated at other steps

    def on_train_end(self, summary: TrainSummary) -> None:
        records = read_json_lines(self._output_dir / METRICS_NAME)
        schedule, best, num_steps = self._schedule, summary.best_checkpoint, self._num_steps
        if not num_steps:
            self._epoch = schedule.epoch_of(summary.step)
        state = {
            "best_metric": summary.best_loss,
            "best_model_checkpoint": str(best) if best is not None else None,
            "epoch": self._epoch,
            "global_step": summary.step,
            "max_steps": schedule.total_steps,
            "num_train_epochs": None if schedule.num_epochs is None else math.ceil(schedule.num_epochs),
            "is_world_process_zero": True,
            "log_history": [history_entry(record) for record in records if "notice" not in record],
        }
        self._write("trainer_state.json", state)
        if summary.outcome != "finished" or not num_steps:
            return
        train = {
            "epoch": self._epoch,
            "train_loss": self._loss_sum / num_steps,
            "train_runtime": summary.seconds,
            "train_samples_per_second": num_steps * schedule.global_batch_size / summary.seconds,
            "train_steps_per_second": num_steps / summary.seconds,
        }
        self._write("train_results.json", train)
        if self._evaluation:
            self._write("eval_results.json", self._evaluation)
        self._write("all_results.json", {**train, **self._evaluation})

    def _write(self, name: str, content: dict[str, Any]) -> None:
        write_atomically(self._output_dir / name, json.dumps(content, indent=2) + "\n")


class TensorBoard(Callback):
    """Writes TensorBoard event files, with the tags of the Transformers Trainer.

    TensorBoard shows the folder's name as the run's name, and hides earlier events after `resume_step`.
    """

    def __init__(self, log_dir: Path, resume_step: int = 0, shown: Shown = SHOW_ALL) -> None:
        self._log_dir, self._shown = log_dir, shown
        self._resume_step = resume_step

    def on_train_begin(self, schedule: RunSchedule) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._log_dir), purge_step=self._resume_step + 1, flush_secs=30)

    def on_record(self, record: Record) -> None:
        for tag, value in self._shown.scalars(record).items():
            self._writer.add_scalar(tag, value, record["step"])

    def add_text(self, tag: str, text: str, step: int) -> None:
        """Add a Markdown text."""
        self._writer.add_text(tag, text, step)

    def on_save(self, path: Path) -> None:
        self._writer.flush()

    def on_train_end(self, summary: TrainSummary) -> None:
        self._writer.close()


def begin_record(output_dir: Path, case: Case, first_step: int) -> None:
    """Write the plan to plan.json. A resumed run keeps its earlier records."""
    earlier: list[plan_record.RunRecord] = []
    if first_step:
        with contextlib.suppress(MegatuneError):  # no record, or one of another version
            earlier = [record for record in plan_record.read_records(output_dir) if record.measured is not None]
    record = plan_record.RunRecord(case=case, first_step=first_step)
    write_atomically(output_dir / plan_record.PLAN_NAME, plan_record.dump_records([*earlier, record]))


class Prediction(Callback):
    """Adds measurements to plan.json at every save and at the end, and prints how accurate the plan was."""

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        *self._earlier, self._record = plan_record.read_records(output_dir)
        self._steps: list[StepReport] = []

    def on_step_end(self, report: StepReport) -> None:
        self._steps.append(report)

    def on_save(self, path: Path) -> None:
        self._write(self._record.outcome, ())

    def on_train_end(self, summary: TrainSummary) -> None:
        self._write(summary.outcome, summary.memory)
        if summary.outcome != "failed" and (lines := list(plan_record.verdict(self._record))):
            print("\n".join(lines), flush=True)
        with contextlib.suppress(MegatuneError):  # nothing was measured, or the user's folder is not writable
            if summary.outcome == "finished" and (path := keep_first(self._output_dir)):
                say(f"plan       later plans on this device use the memory beyond tensors of this run: {path}")

    def _write(self, outcome: plan_record.Outcome, memory: tuple[plan_record.RankMemory, ...]) -> None:
        self._record = replace(self._record, outcome=outcome, measured=self._measured(memory))
        records = plan_record.dump_records([*self._earlier, self._record])
        write_atomically(self._output_dir / plan_record.PLAN_NAME, records)

    def _measured(self, memory: tuple[plan_record.RankMemory, ...]) -> plan_record.Measured:
        measured = plan_record.Measured(counted=device.COUNTED, stages=plan_record.fullest_of(memory))
        if not self._steps:
            return measured
        timed = self._steps[min(_WARM_UP, len(self._steps) - 1) :]
        documents = [step.document_tokens for step in timed if step.document_tokens is not None]
        return replace(
            measured,
            peaks=tuple(each.peak for each in memory) if len(memory) == self._record.case.world_size else (),
            step_seconds=statistics.median(step.seconds for step in timed),
            num_steps=len(timed),
            row_tokens=statistics.fmean(step.row_tokens for step in timed),
            longest_row=max(step.longest_row for step in self._steps),
            document_tokens=statistics.fmean(documents) if documents else None,
            picture_tokens=statistics.fmean(step.picture_tokens for step in timed),
            tokens_per_step=statistics.fmean(step.num_input_tokens for step in timed),
        )
