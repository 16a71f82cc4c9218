"""The moments of a run that a callback can act on, and what it gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

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
        outcome: "finished" did all steps, "stopped" was asked to end and can be resumed, "failed" raised.
        step: optimizer steps done.
        seconds: time this process trained, with evaluation and saving.
        memory: what ranks held: of all of them, but of a run that failed only of this one.
        best_checkpoint, best_loss: where the evaluation loss was lowest; None without evaluation.
    """

    outcome: Literal["finished", "stopped", "failed"]
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
        """Before `on_log`, `on_evaluate` or `on_notice`: the same as JSON values (callbacks/records.py), which files
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
