"""Training on the screen: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from megatune.training.callbacks.base import Callback, EvalReport, LogReport, StepReport, TrainInfo, TrainSummary


class Console(Callback):
    """Prints every log line, evaluation and save; on a terminal a progress bar stays below them.

    Args:
        run_name: what the first line calls the run.
        resume_step: steps done before this process.
        console: where to print; standard output unless given.
    """

    def __init__(self, run_name: str, resume_step: int = 0, console: RichConsole | None = None) -> None:
        self._run_name = run_name
        self._resume_step = resume_step
        self._console = console or RichConsole()
        self._progress: Progress | None = None

    def on_train_begin(self, info: TrainInfo) -> None:
        resumed = f", resumed after step {self._resume_step}" if self._resume_step else ""
        epochs = "" if info.num_train_epochs is None else f"{info.num_train_epochs:g} epochs, "
        self._print(
            f"training {self._run_name}: {info.total_steps} steps, {epochs}"
            f"{info.global_batch_size} rows per step{resumed}"
        )
        if self._console.is_terminal:
            self._progress = Progress(
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                console=self._console,
                expand=True,
            )
            self._progress.add_task("", total=info.total_steps, completed=self._resume_step)
            self._progress.start()

    def on_step_end(self, report: StepReport) -> None:
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=report.step)

    def on_log(self, report: LogReport) -> None:
        self._print(log_line(report))
        if self._progress is not None:
            text = f"loss {report.loss:.4f}  eta {_duration(report.eta_seconds)}"
            self._progress.update(self._progress.task_ids[0], description=text)

    def on_evaluate(self, report: EvalReport) -> None:
        self._print(evaluation_line(report))

    def on_save(self, path: Path) -> None:
        self._print(f"saved {path}")

    def on_train_end(self, summary: TrainSummary) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        done = f"after step {summary.step} of {summary.total_steps}"
        if summary.outcome == "finished":
            done = f"{summary.total_steps} steps"
        self._print(f"{summary.outcome}: {done} in {_duration(summary.seconds)}")
        if summary.best_checkpoint is not None and summary.best_loss is not None:
            self._print(f"best: {summary.best_checkpoint}  eval_loss {summary.best_loss:.4f}")

    def _print(self, line: str) -> None:
        encoding = self._console.encoding or "utf-8"
        text = line.encode(encoding, "replace").decode(encoding)
        self._console.print(text, soft_wrap=True, highlight=False, markup=False, emoji=False)
        self._console.file.flush()  # a pipe would hold lines back for minutes


def log_line(report: LogReport) -> str:
    """step 10/120  epoch 0.25  loss 2.3456  ...  eta 0:01:23"""
    parts = [
        f"step {report.step}/{report.total_steps}",
        *([f"epoch {report.epoch:.2f}"] if report.epoch is not None else []),
        f"loss {report.loss:.4f}",
        f"lr {report.learning_rate:.2e}",
        f"grad_norm {report.grad_norm:.2f}",
        f"tokens/s {report.tokens_per_second:,.0f}",
        f"{_short(report.model_tflops)} TFLOP/s",
        f"mfu {report.mfu:.1%}" if report.mfu is not None else "mfu —",
        f"mem {report.memory_gib:.1f} GiB",
    ]
    if report.load_balancing_loss is not None:
        parts.append(f"balance {report.load_balancing_loss:.3f}")
    if report.z_loss is not None:
        parts.append(f"z_loss {report.z_loss:.3f}")
    if report.num_skipped:
        parts.append(f"skipped {report.num_skipped}")
    return "  ".join([*parts, f"eta {_duration(report.eta_seconds)}"])


def evaluation_line(report: EvalReport) -> str:
    """step 20  eval_loss 2.1234  perplexity 8.36  12,345 tokens in 3.2 s"""
    return (
        f"step {report.step}  eval_loss {report.loss:.4f}  perplexity {report.perplexity:.4g}  "
        f"{report.num_tokens:,} tokens in {report.seconds:.1f} s"
    )


def _short(value: float) -> str:
    """Three digits, whether the machine is a laptop or a data center."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
