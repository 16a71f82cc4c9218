"""Everything beside the training step: a small file each, called by the loop on rank 0."""

from __future__ import annotations

from pathlib import Path

from megatune.config.settings import Settings
from megatune.training.callbacks.base import Callback, EvalReport, LogReport, StepReport, TrainInfo, TrainSummary
from megatune.training.callbacks.callback_list import CallbackList
from megatune.training.callbacks.console import Console
from megatune.training.callbacks.metrics import Metrics, TrainerLog
from megatune.training.callbacks.plot import LossPlot
from megatune.training.callbacks.prediction import Prediction, begin_record
from megatune.training.callbacks.results import Results
from megatune.training.callbacks.tensorboard import TensorBoard

__all__ = [
    "Callback",
    "CallbackList",
    "EvalReport",
    "LogReport",
    "StepReport",
    "TrainInfo",
    "TrainSummary",
    "begin_record",
    "build_callbacks",
]


def build_callbacks(
    settings: Settings, output_dir: Path, resume_step: int = 0, *, planned: bool = False
) -> CallbackList:
    """What the settings ask for, as one callback that the loop calls.

    Args:
        settings: `logging.logging_steps`, `logging.report_to`, `logging.plot_loss` and `run.run_name` are read.
        output_dir: where the files go.
        resume_step: steps already done; what an earlier run logged beyond them is dropped.
        planned: there is a plan (`begin_record`) to hold the run against.
    """
    run_name = settings.run.run_name or output_dir.absolute().name
    callbacks: list[Callback] = [
        Console(run_name, resume_step),
        Metrics(output_dir, resume_step),
        TrainerLog(output_dir, resume_step),
        Results(output_dir),
    ]
    if planned:
        callbacks.append(Prediction(output_dir))
    if settings.logging.plot_loss:
        callbacks.append(LossPlot(output_dir))
    if "tensorboard" in settings.logging.report_to:
        callbacks.append(TensorBoard(output_dir / "runs" / run_name.replace("/", "-"), resume_step))
    return CallbackList(callbacks, settings.logging.logging_steps)
