"""The callback interface, its arguments, and the records of log lines, evaluations and notices.

metrics.jsonl has all fields of a record; `trainer_line`, `history_entry` and `Shown.scalars` select those of other
files and of trackers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias

from megatune.config.settings import Settings
from megatune.data.batches import Unreadable
from megatune.plan.run.record import RankMemory
from megatune.training.run_schedule import RunSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbers:
    """The numbers of a step or a log line, over all ranks.

    Attributes:
        step: optimizer steps done, including this one.
        total_steps: optimizer steps of the whole run.
        epoch: epochs done, as a fraction; None in the first epoch of streamed data.
        loss: mean over the step's trained tokens, or over pairs in preference training.
        learning_rate: of this step.
        grad_norm: L2 norm of all gradients before clipping.
        num_tokens: trained tokens (labels that are not -100).
        num_input_tokens: input tokens without padding.
        seconds: from the end of the last step to the end of this one, without evaluation and saving.
        data_seconds: the part of it in which this rank waited for micro-batches.
        unreadable_pictures: images and videos that could not be decoded; their documents are left out of the loss.
        tokens_per_second: input tokens per second, over all devices.
        model_tflops: 10^12 model floating-point operations per second and device, without a vision encoder.
        mfu: model_tflops relative to the device's peak, 0 to 1; None if the peak is unknown.
        memory_gib: peak memory of a rank in GiB (of the device; of the process on a CPU).
        metrics: metrics of the objective and of the model's layers, by name.
    """

    step: int
    total_steps: int
    epoch: float | None
    loss: float
    learning_rate: float
    grad_norm: float
    num_tokens: int
    num_input_tokens: int
    seconds: float
    data_seconds: float = 0.0
    unreadable_pictures: int = 0
    tokens_per_second: float
    model_tflops: float
    mfu: float | None
    memory_gib: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport(_Numbers):
    """The report of one optimizer step.

    Attributes:
        row_tokens: mean length of the rows of this rank's micro-batches, including padding.
        longest_row: the longest of them.
        document_tokens: mean length of the sequences in packed rows; None without packing.
        picture_tokens: mean number of image or video tokens in these rows.
        skipped: the weights were not updated, because gradients overflowed (fp16) or the step was bad.
        is_bad: loss or gradients were not finite, or above a bound.
    """

    row_tokens: float = 0.0
    longest_row: int = 0
    document_tokens: float | None = None
    picture_tokens: float = 0.0
    skipped: bool = False
    is_bad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReport(_Numbers):
    """The merged report of all steps since the last log line.

    Loss and metrics are means over the steps, as in the Transformers Trainer, without bad steps if there are others.
    Learning rate, gradient norm and epoch are those of the last step; tokens and seconds are sums; rates are means over
    time.

    Attributes:
        num_steps: the number of steps.
        num_skipped: the number of skipped steps.
        elapsed_seconds: since this process began to train, including evaluation and saving.
        eta_seconds: of the remaining steps at the recent pace, without evaluation and saving.
    """

    num_steps: int
    num_skipped: int
    elapsed_seconds: float
    eta_seconds: float


@dataclass(frozen=True, slots=True)
class Notice:
    """A warning while the run continues.

    Attributes:
        text: for the terminal.
        values: for metrics.jsonl, in addition to `step` and the text.
    """

    step: int
    text: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """One evaluation, over all ranks.

    Attributes:
        step: optimizer steps done.
        epoch: epochs done.
        loss: mean over all trained tokens, or pairs, of the evaluation rows; None if only answers were scored.
        perplexity: exp(loss) of token losses; None for other losses.
        num_tokens: trained tokens.
        seconds: duration.
        unreadable_pictures: images and videos that could not be decoded; their documents are left out.
        metrics: metrics of the objective, by name.
    """

    step: int
    epoch: float | None
    loss: float | None
    perplexity: float | None
    num_tokens: int
    seconds: float
    unreadable_pictures: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Answers generated with the weights after a step.

    Attributes:
        rows: the lines of generations.jsonl: step, id, where, prompt, response, label, score, tokens and finish.
        scores: over all answers, by name.
    """

    step: int
    rows: Sequence[Mapping[str, Any]]
    scores: Mapping[str, float]

    @property
    def num_tokens(self) -> int:
        """The number of generated tokens."""
        return sum(row["tokens"] for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSummary:
    """The end of a run.

    Attributes:
        outcome: "finished" (all steps), "stopped" (on request, can be resumed), "interrupted" (Ctrl-C) or "failed".
        step: optimizer steps done.
        seconds: training time of this process, including evaluation and saving.
        memory: memory use of all ranks; of a failed run, only of this rank.
        best_checkpoint, best_loss: the checkpoint with the lowest evaluation loss; None without evaluation.
    """

    outcome: Literal["finished", "stopped", "interrupted", "failed"]
    step: int
    total_steps: int
    seconds: float
    memory: tuple[RankMemory, ...] = ()
    best_checkpoint: Path | None = None
    best_loss: float | None = None


class Callback:
    """The base class of callbacks. All methods do nothing by default."""

    def on_train_begin(self, schedule: RunSchedule) -> None:
        """Called before the first step of this process."""

    def on_unreadable(self, media: Sequence[Unreadable]) -> None:
        """Called before a training or evaluation step with images and videos that could not be decoded."""

    def on_step_end(self, report: StepReport) -> None:
        """Called after every optimizer step."""

    def on_log(self, report: LogReport) -> None:
        """Called after the first step of this process, every logging_steps and the last step."""

    def on_record(self, record: dict[str, Any]) -> None:
        """Called before `on_log`, `on_evaluate` and `on_notice` with the same content, for files and trackers."""

    def on_notice(self, notice: Notice) -> None:
        """Called after a bad or slow step, before its `on_step_end`."""

    def on_evaluate(self, report: EvalReport) -> None:
        """Called after every evaluation."""

    def on_generate(self, generated: Generated) -> None:
        """Called after answers were generated, before `on_evaluate` with their scores."""

    def on_save(self, path: Path) -> None:
        """Called after a checkpoint is committed at `path`."""

    def on_train_end(self, summary: TrainSummary) -> None:
        """Called at the end, also of a run that stopped or failed."""

    def on_final_model(self, path: Path) -> None:
        """Called after the final model, which is that of the checkpoint at `path`, is in the output folder."""


# JSON values by name: the fields and metrics of a LogReport; those of an EvalReport, with the prefix eval_ except for
# step and epoch; or step, text and values of a notice.
Record: TypeAlias = dict[str, Any]

# Keys that every log record has, null if they are not part of the loss.
_ALWAYS = {"load_balancing_loss": None, "z_loss": None}
# Keys of Transformers' log_history.
_HISTORY = {key: key for key in ("epoch", "grad_norm", "learning_rate", "loss", "eval_loss", "step")}
_HISTORY["eval_seconds"] = "eval_runtime"
_ACCURACIES = ("rewards/accuracies", "accuracy")  # logged as accuracy by LLaMA-Factory
# Fields, in addition to metrics, that trackers get.
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
    """Return whether a record is a log line."""
    return "num_steps" in record


def is_evaluation(record: Mapping[str, Any]) -> bool:
    """Return whether a record is an evaluation."""
    return "eval_seconds" in record


def trainer_line(record: Mapping[str, Any], total_steps: int, last_log: Mapping[str, Any]) -> Record:
    """Return LLaMA-Factory's line of trainer_log.jsonl, with the times of the last log record."""
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
    """Return the content of eval_results.json."""
    kept = {key: record[key] for key in ("eval_loss", "eval_perplexity") if record[key] is not None}
    metrics = {key: value for key, value in record.items() if key.startswith("eval_") and key not in _EVAL_FIELDS}
    return {"epoch": record["epoch"], **kept, **metrics, "eval_runtime": record["eval_seconds"]}


def history_entry(record: Mapping[str, Any]) -> Record:
    """Return the entry of Transformers' log_history. Names with a slash are TRL's."""
    named = {_HISTORY[key]: record[key] for key in _HISTORY if key in record}
    return {**named, **{key: value for key, value in record.items() if "/" in key}}


@dataclass(frozen=True, slots=True)
class Shown:
    """The numbers that the console and trackers show.

    Attributes:
        lines: metrics of a line on the console; None for all.
    """

    throughput: bool = True
    perplexity: bool = True
    lines: tuple[str, ...] | None = None

    @staticmethod
    def of(settings: Settings) -> Shown:
        return Shown(settings.logging.log_throughput, settings.logging.log_validation_ppl)

    def of_metrics(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Select the metrics of a line on the console."""
        return metrics if self.lines is None else {name: metrics[name] for name in self.lines if name in metrics}

    def scalars(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Return the values for trackers, under the Transformers Trainer's tags: train/NAME, eval/NAME."""
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
