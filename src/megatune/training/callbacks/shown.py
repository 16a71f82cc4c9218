"""What trackers and the console show of a log line or an evaluation, under the Transformers Trainer's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatune.config.settings import Settings
from megatune.training.callbacks.base import EvalReport, LogReport

_TRAIN = ("loss", "learning_rate", "grad_norm", "epoch", "data_seconds", "memory_gib")
_THROUGHPUT = ("tokens_per_second", "model_tflops", "mfu")


@dataclass(frozen=True, slots=True)
class Shown:
    """What the switches of logging leave in; metrics.jsonl has all of it.

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

    def train_values(self, report: LogReport) -> dict[str, float]:
        """Return "train/NAME" -> value."""
        names = (*_TRAIN, *(_THROUGHPUT if self.throughput else ()))
        values = {**report.metrics, **{name: getattr(report, name) for name in names}}
        return {f"train/{name}": value for name, value in values.items() if value is not None}

    def eval_values(self, report: EvalReport) -> dict[str, float]:
        """Return "eval/NAME" -> value."""
        perplexity = {"perplexity": report.perplexity} if self.perplexity else {}
        values: dict[str, float | None] = {**report.metrics, "loss": report.loss, **perplexity}
        return {f"eval/{name}": value for name, value in values.items() if value is not None}


SHOW_ALL = Shown()
