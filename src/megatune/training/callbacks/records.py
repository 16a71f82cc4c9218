"""The record of a log line, an evaluation or a notice: made once, and projected to files and trackers.

metrics.jsonl has records as they are; `trainer_line`, `history_entry` and `Shown.scalars` are what others have of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from typing import Any, TypeAlias

from megatune.config.settings import Settings
from megatune.training.callbacks.base import EvalReport, LogReport, Notice

# JSON values by name: the fields of LogReport with its metrics; those of EvalReport with theirs, all with the prefix
# eval_ but step and epoch; or step, text and values of a notice.
Record: TypeAlias = dict[str, Any]

# Keys that every record of steps has, null where they are no part of the loss.
_ALWAYS = {"load_balancing_loss": None, "z_loss": None}
# The part of a record that Transformers' log_history has, and its names there.
_HISTORY = {key: key for key in ("epoch", "grad_norm", "learning_rate", "loss", "eval_loss", "step")}
_HISTORY["eval_seconds"] = "eval_runtime"
_ACCURACIES = ("rewards/accuracies", "accuracy")  # what LLaMA-Factory logs as accuracy
# What trackers have of fields that are not metrics.
_TRAIN = ("loss", "learning_rate", "grad_norm", "epoch", "data_seconds", "memory_gib")
_THROUGHPUT = ("tokens_per_second", "model_tflops", "mfu")
_LOG_FIELDS = {each.name for each in fields(LogReport)}
_EVAL_FIELDS = {f"eval_{each.name}" for each in fields(EvalReport)}


def log_record(report: LogReport) -> Record:
    values = asdict(report)
    return {**_ALWAYS, **values.pop("metrics"), **values}


def evaluation_record(report: EvalReport) -> Record:
    values = asdict(report)
    values = {**values.pop("metrics"), **values}
    return {key if key in ("step", "epoch") else f"eval_{key}": value for key, value in values.items()}


def notice_record(notice: Notice) -> Record:
    return {"step": notice.step, "notice": notice.text, **notice.values}


def is_log(record: Mapping[str, Any]) -> bool:
    """Return whether a record is of a log line."""
    return "num_steps" in record


def is_evaluation(record: Mapping[str, Any]) -> bool:
    """Return whether a record is of an evaluation."""
    return "eval_seconds" in record


def trainer_line(record: Mapping[str, Any], total_steps: int, last_log: Mapping[str, Any]) -> Record:
    """Return LLaMA-Factory's line of trainer_log.jsonl; `last_log` is the last record of a log line, which has the
    times."""
    if is_log(record):
        values = {"loss": record["loss"], "lr": record["learning_rate"], "epoch": record["epoch"]}
        if found := [record[name] for name in _ACCURACIES if name in record]:
            values["accuracy"] = found[0]
    else:
        values = {"eval_loss": record["eval_loss"], "epoch": record["epoch"]}
    step = record["step"]
    times = {"elapsed_time": "elapsed_seconds", "remaining_time": "eta_seconds"} if last_log else {}
    return {
        "current_steps": step,
        "total_steps": total_steps,
        **values,
        "percentage": round(100 * step / total_steps, 2),
        **{name: str(timedelta(seconds=int(last_log[key]))) for name, key in times.items()},
    }


def evaluation_results(record: Mapping[str, Any]) -> Record:
    """Return what eval_results.json has of the record of an evaluation."""
    kept = {key: record[key] for key in ("eval_loss", "eval_perplexity") if record[key] is not None}
    metrics = {key: value for key, value in record.items() if key.startswith("eval_") and key not in _EVAL_FIELDS}
    return {"epoch": record["epoch"], **kept, **metrics, "eval_runtime": record["eval_seconds"]}


def history_entry(record: Mapping[str, Any]) -> Record:
    """Return what Transformers' log_history has of a record; names with a slash are TRL's."""
    named = {_HISTORY[key]: record[key] for key in _HISTORY if key in record}
    return {**named, **{key: value for key, value in record.items() if "/" in key}}


@dataclass(frozen=True, slots=True)
class Shown:
    """What the switches of logging leave in on the console and in trackers.

    Attributes:
        lines: which metrics a line on the console has; None: all.
    """

    throughput: bool = True
    perplexity: bool = True
    lines: tuple[str, ...] | None = None

    @staticmethod
    def of(settings: Settings) -> Shown:
        return Shown(settings.logging.log_throughput, settings.logging.log_validation_ppl)

    def of_metrics(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Return those of a line on the console."""
        return metrics if self.lines is None else {name: metrics[name] for name in self.lines if name in metrics}

    def scalars(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Return what trackers have of a record, under the Transformers Trainer's tags: train/NAME, eval/NAME."""
        if is_log(record):
            kept = {*_TRAIN, *(_THROUGHPUT if self.throughput else ())}
            found = {f"train/{key}": value for key, value in record.items() if key in kept or key not in _LOG_FIELDS}
        elif is_evaluation(record):
            kept = {"eval_loss", *(["eval_perplexity"] if self.perplexity else [])}
            names = (key for key in record if key.startswith("eval_") and (key in kept or key not in _EVAL_FIELDS))
            found = {f"eval/{key.removeprefix('eval_')}": record[key] for key in names}
        else:
            found = {}
        return {tag: value for tag, value in found.items() if value is not None}


SHOW_ALL = Shown()
