"""TensorBoard event files, under the tags that the Transformers Trainer uses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megatune.training.callbacks.base import Callback, EvalReport, LogReport, TrainSummary
from megatune.training.run_schedule import RunSchedule

_TRAIN_TAGS = (
    *("loss", "learning_rate", "grad_norm", "epoch", "data_seconds"),
    *("tokens_per_second", "model_tflops", "mfu", "memory_gib"),
)


class TensorBoard(Callback):
    """Scalars of every log line and evaluation.

    Args:
        log_dir: folder of the event files; its name is the run's name in TensorBoard.
        resume_step: steps done before this process; events after it are hidden by TensorBoard.
    """

    def __init__(self, log_dir: Path, resume_step: int = 0) -> None:
        self._log_dir = log_dir
        self._resume_step = resume_step

    def on_train_begin(self, schedule: RunSchedule) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._log_dir), purge_step=self._resume_step + 1, flush_secs=30)

    def on_log(self, report: LogReport) -> None:
        values = {tag: getattr(report, tag) for tag in _TRAIN_TAGS}
        self._add("train", {**report.metrics, **values}, report.step)

    def on_evaluate(self, report: EvalReport) -> None:
        self._add("eval", {**report.metrics, "loss": report.loss, "perplexity": report.perplexity}, report.step)

    def on_save(self, path: Path) -> None:
        self._writer.flush()

    def on_train_end(self, summary: TrainSummary) -> None:
        self._writer.close()

    def _add(self, group: str, values: Mapping[str, float | None], step: int) -> None:
        for tag, value in values.items():
            if value is not None:
                self._writer.add_scalar(f"{group}/{tag}", value, step)
