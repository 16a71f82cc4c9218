"""The moments of a run that a callback can act on, what it gets, and the record of a log line, an evaluation or a
notice: made once, and projected to files and trackers.

metrics.jsonl has records as they are; `trainer_line`, `history_entry` and `Shown.scalars` are what others have of them.
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
    """What a step and a log line both report, over all ranks.

    Attributes:
        step: optimizer steps done, this one among them.
        total_steps: optimizer steps of the whole run.
        epoch: passes over the training rows done, with the fraction; None in the first pass over streamed ones.
        loss: mean over the step's trained tokens or, of preference training, pairs.
        learning_rate: what this step used.
        grad_norm: L2 norm of all gradients before clipping.
        num_tokens: trained tokens (labels that are not -100).
        num_input_tokens: tokens the model has read, without padding.
        seconds: from the end of the last step to the end of this one, without evaluation and saving.
        data_seconds: of these, how long this rank has waited for the step's micro-batches.
        unreadable_pictures: how many could not be decoded; their documents are left out of the loss.
        tokens_per_second: input tokens per second, over all devices.
        model_tflops: 10^12 model floating-point operations per second and device, those of a vision encoder left out.
        mfu: share of the device's peak that model_tflops is, 0 to 1; None where the peak is not known.
        memory_gib: most memory a rank has held, GiB (of the device; of the process on a CPU).
        metrics: what the objective and the model's layers report, by name.
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
    """One optimizer step.

    Attributes:
        row_tokens: mean length of the rows of this rank's micro-batches, padding included.
        longest_row: the longest of them.
        document_tokens: mean length of the documents in packed rows; None where a row is one document.
        picture_tokens: mean of these rows' tokens of pictures.
        skipped: gradients overflowed (fp16), or the step was bad, so the weights have not changed.
        is_bad: loss or gradients were not finite, or beyond a bound.
    """

    row_tokens: float = 0.0
    longest_row: int = 0
    document_tokens: float | None = None
    picture_tokens: float = 0.0
    skipped: bool = False
    is_bad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReport(_Numbers):
    """The steps since the last log line, as one.

    The loss is the mean of the steps' losses, as the Transformers Trainer logs it, and so are metrics; bad steps are
    left out of both where there are others. Learning rate,
    gradient norm and epoch are those of the last step; tokens and seconds are sums; rates are means over their time.

    Attributes:
        num_steps: how many steps these are.
        num_skipped: how many of them were skipped.
        elapsed_seconds: since this process began to train, with evaluation and saving.
        eta_seconds: the remaining steps at the pace of recent ones, without evaluation and saving.
    """

    num_steps: int
    num_skipped: int
    elapsed_seconds: float
    eta_seconds: float


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that a user should know of while the run continues.

    Attributes:
        text: for the terminal.
        values: for metrics.jsonl, with `step` and the text.
    """

    step: int
    text: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """One evaluation, over all ranks.

    Attributes:
        step: optimizer steps done.
        epoch: passes over the training rows done.
        loss: mean over all trained tokens, or pairs, of the evaluation rows; None where responses were scored.
        perplexity: exp(loss), of tokens' losses; None of others.
        num_tokens: trained tokens.
        seconds: time it took.
        unreadable_pictures: how many could not be decoded; their documents are left out.
        metrics: what the objective reports, by name.
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
    """Answers that were written with the weights after a step.

    Attributes:
        rows: the lines of generations.jsonl: step, id, where, prompt, response, label, score, tokens and finish.
        scores: of all of them, by name.
    """

    step: int
    rows: Sequence[Mapping[str, Any]]
    scores: Mapping[str, float]

    @property
    def num_tokens(self) -> int:
        """Tokens that were written."""
        return sum(row["tokens"] for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSummary:
    """A run that ends, in whatever way.

    Attributes:
        outcome: "finished" did all steps, "stopped" was asked to end and can be resumed, "interrupted" by
            Ctrl-C, "failed" raised.
        step: optimizer steps done.
        seconds: time this process trained, with evaluation and saving.
        memory: what ranks held: of all of them, but of a run that failed only of this one.
        best_checkpoint, best_loss: where the evaluation loss was lowest; None without evaluation.
    """

    outcome: Literal["finished", "stopped", "interrupted", "failed"]
    step: int
    total_steps: int
    seconds: float
    memory: tuple[RankMemory, ...] = ()
    best_checkpoint: Path | None = None
    best_loss: float | None = None


class Callback:
    """Acts around the training step; every method does nothing unless a subclass says otherwise."""

    def on_train_begin(self, schedule: RunSchedule) -> None:
        """Before the first step of this process."""

    def on_unreadable(self, pictures: Sequence[Unreadable]) -> None:
        """Before a step, or a step of an evaluation, with pictures that could not be decoded."""

    def on_step_end(self, report: StepReport) -> None:
        """After every optimizer step."""

    def on_log(self, report: LogReport) -> None:
        """After the first step of this process, every logging_steps and the last step."""

    def on_record(self, record: dict[str, Any]) -> None:
        """Before `on_log`, `on_evaluate` or `on_notice`: the same as JSON values (see `Record`), which files
        and trackers keep."""

    def on_notice(self, notice: Notice) -> None:
        """After a step that is out of the ordinary, and before `on_step_end` of it."""

    def on_evaluate(self, report: EvalReport) -> None:
        """After every evaluation."""

    def on_generate(self, generated: Generated) -> None:
        """After answers were written, and before `on_evaluate` with their scores."""

    def on_save(self, path: Path) -> None:
        """After a checkpoint is committed at `path`."""

    def on_train_end(self, summary: TrainSummary) -> None:
        """At the end, also of a run that stopped or failed."""

    def on_final_model(self, path: Path) -> None:
        """After the final model is in the output folder; it is that of the checkpoint at `path`."""


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
