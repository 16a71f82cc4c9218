"""The callbacks of a run, which the loop calls on rank 0, and the steps that are logged."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from megatune.config.settings import Settings
from megatune.data.batches import Unreadable
from megatune.plan.run.record import PLAN_NAME
from megatune.training.callbacks.base import (
    Callback,
    EvalReport,
    Generated,
    LogReport,
    Notice,
    Shown,
    StepReport,
    TrainSummary,
    evaluation_record,
    log_record,
    notice_record,
)
from megatune.training.callbacks.console import DETAILS_NAME, Console
from megatune.training.callbacks.metrics import Generations, Metrics, Prediction, Results, TensorBoard, TrainerLog
from megatune.training.callbacks.plot import LossPlot
from megatune.training.callbacks.publishing import Card, HubPush
from megatune.training.callbacks.trackers import Trackers
from megatune.training.run_schedule import RunSchedule
from megatune.training.trackers import WORKERS, asked_trackers, run_name

_logger = logging.getLogger(__name__)
_PACE_STEPS = 20


def build_callbacks(
    settings: Settings,
    output_dir: Path,
    resume_step: int = 0,
    quarantine: Callback | None = None,
    log_dir: Path | None = None,
    source: Path | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> CallbackList:
    """Build the callbacks that the settings request.

    Args:
        output_dir: has plan.json if there is a plan to compare the run with (`begin_record`).
        resume_step: steps already done; log records of an earlier run after them are dropped.
        quarantine: records unreadable images and videos, with on_bad_row: quarantine.
        log_dir: for the output of libraries of trackers and hubs; output_dir/logs by default.
        source: the folder of the initial model.
        stop_requested: whether the run was asked to stop.
    """
    name, shown, asked = run_name(settings, output_dir), Shown.of(settings), asked_trackers(settings)
    log_dir = log_dir or output_dir / "logs"
    workers = {each: WORKERS[each] for each in asked if each in WORKERS}
    callbacks: list[Callback] = [
        Console(name, resume_step, shown=shown, details=output_dir / DETAILS_NAME),
        Metrics(output_dir, resume_step),
        TrainerLog(output_dir, resume_step),
        Results(output_dir),
    ]
    if settings.generates:
        callbacks.append(Generations(output_dir, resume_step))
    if (output_dir / PLAN_NAME).exists():
        callbacks.append(Prediction(output_dir))
    if quarantine is not None:
        callbacks.append(quarantine)
    if settings.logging.plot_loss:
        callbacks.append(LossPlot(output_dir))
    if "tensorboard" in asked:
        events = Path(settings.logging.tensorboard_dir or output_dir / "runs")
        callbacks.append(TensorBoard(events / name.replace("/", "-"), resume_step, shown))
    if workers:
        callbacks.append(Trackers(settings, workers, output_dir, log_dir, resume_step))
    callbacks.append(card := Card(settings, output_dir, source))
    if settings.checkpoint.push_to_hub:
        callbacks.append(HubPush(settings, output_dir, log_dir, card.write, stop_requested))
    return CallbackList(callbacks, int(settings.logging.logging_steps))


class CallbackList(Callback):
    """Calls several callbacks. One that raises is disabled with a warning.

    Args:
        callbacks: called in this order.
        logging_steps: optimizer steps per log line.
    """

    def __init__(self, callbacks: Iterable[Callback] = (), logging_steps: int = 1) -> None:
        self._callbacks = list(callbacks)
        self._logging_steps = logging_steps
        self._unlogged: list[StepReport] = []
        self._pace: deque[float] = deque(maxlen=_PACE_STEPS)  # seconds of recent steps
        self._num_steps = 0  # of this process
        self._began = time.monotonic()
        self._level = logging.WARNING  # for exceptions of callbacks

    def on_train_begin(self, schedule: RunSchedule) -> None:
        self._began = time.monotonic()
        self._call("on_train_begin", schedule)

    def on_step_end(self, report: StepReport) -> None:
        self._num_steps += 1
        if self._num_steps == 2:
            self._pace.clear()  # the first step includes the warm-up
        self._pace.append(report.seconds)
        self._unlogged.append(report)
        self._call("on_step_end", report)
        if self._num_steps == 1 or report.step % self._logging_steps == 0 or report.step == report.total_steps:
            self._log()

    def on_unreadable(self, media: Sequence[Unreadable]) -> None:
        self._call("on_unreadable", media)

    def on_notice(self, notice: Notice) -> None:
        self._call("on_record", notice_record(notice))
        self._call("on_notice", notice)

    def on_evaluate(self, report: EvalReport) -> None:
        self._call("on_record", evaluation_record(report))
        self._call("on_evaluate", report)

    def on_generate(self, generated: Generated) -> None:
        self._call("on_generate", generated)

    def on_save(self, path: Path) -> None:
        self._call("on_save", path)

    def on_train_end(self, summary: TrainSummary) -> None:
        if summary.outcome == "failed":  # the cause, such as a full disk, is reported elsewhere
            self._level = logging.DEBUG
        if self._unlogged:  # the run ends between two log lines
            self._log()
        self._call("on_train_end", summary)

    def on_final_model(self, path: Path) -> None:
        self._call("on_final_model", path)

    def _log(self) -> None:
        last = self._unlogged[-1]
        pace = sum(self._pace) / len(self._pace)
        elapsed, eta = time.monotonic() - self._began, pace * (last.total_steps - last.step)
        report = _merged(self._unlogged, elapsed_seconds=elapsed, eta_seconds=eta)
        self._unlogged = []
        self._call("on_record", log_record(report))
        self._call("on_log", report)

    def _call(self, moment: str, argument: Any) -> None:
        for callback in tuple(self._callbacks):
            try:
                getattr(callback, moment)(argument)
            except Exception as error:
                self._callbacks.remove(callback)
                name = type(callback).__name__
                _logger.log(self._level, "%s failed and is off for the rest of the run: %r", name, error)
                _logger.debug("%s failed in %s", name, moment, exc_info=True)


def _merged(steps: list[StepReport], *, elapsed_seconds: float, eta_seconds: float) -> LogReport:
    """Merge the reports of several steps, see `LogReport`."""
    last = steps[-1]
    sums = ("num_tokens", "num_input_tokens", "seconds", "data_seconds", "unreadable_pictures")
    added: dict[str, Any] = {name: sum(getattr(step, name) for step in steps) for name in sums}

    def mean_over_time(name: str) -> Any:
        values = [getattr(step, name) for step in steps]
        if None in values or added["seconds"] <= 0:
            return values[-1] if None not in values else None
        return sum(value * step.seconds for value, step in zip(values, steps, strict=True)) / added["seconds"]

    good = [step for step in steps if not step.is_bad] or steps
    names = dict.fromkeys(name for step in good for name in step.metrics)  # not every step need have all
    reported = {name: [step.metrics[name] for step in good if name in step.metrics] for name in names}
    return LogReport(
        **{name: getattr(last, name) for name in ("step", "total_steps", "epoch", "learning_rate", "grad_norm")},
        **added,
        **{name: mean_over_time(name) for name in ("tokens_per_second", "model_tflops", "mfu")},
        num_steps=len(steps),
        loss=sum(step.loss for step in good) / len(good),
        memory_gib=max(step.memory_gib for step in steps),
        metrics={name: sum(values) / len(values) for name, values in reported.items()},
        num_skipped=sum(step.skipped for step in steps),
        elapsed_seconds=elapsed_seconds,
        eta_seconds=eta_seconds,
    )
