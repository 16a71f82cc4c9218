"""Console output of training: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from rich.console import Console as RichConsole

from megatune.config.values import counted
from megatune.data.bad_rows import MOST_NAMED
from megatune.data.batches import Unreadable
from megatune.progress import BARS, Bars, Progress, is_quiet
from megatune.training.callbacks.base import (
    SHOW_ALL,
    Callback,
    EvalReport,
    Generated,
    LogReport,
    Notice,
    Shown,
    StepReport,
    TrainSummary,
)
from megatune.training.run_schedule import RunSchedule

DETAILS_NAME = "start.log"  # in output_dir: the details of a run before its first step
_SHOWN_ANSWERS, _SHOWN_CHARACTERS = 2, 70
_SHORT_NAMES = {"load_balancing_loss": "balance"}
# Time spent waiting for data, as a fraction of the step time, that log lines show, and for which a warning is printed
# once, after _MIN_STEPS, without the first _WARM_UP steps, in which workers start.
_NOTABLE_WAIT, _LONG_WAIT, _WARM_UP, _MIN_STEPS = 0.05, 0.1, 2, 5
_WAIT_ADVICE = (
    "    why: micro-batches are built more slowly than they are trained\n"
    "    fix: raise dataloader_num_workers (processes that build them ahead); with streaming: true raise"
    " preprocessing_num_workers; keep the row cache (MEGATUNE_CACHE) on a local disk"
)


class Console(Callback):
    """Prints every log line, evaluation and save; on a terminal a progress bar stays below them.

    Args:
        resume_step: steps done before this process.
        console: standard output by default.
        shown: the numbers to show.
        details: the file with the details of the run, if there is one.
    """

    def __init__(
        self,
        run_name: str,
        resume_step: int = 0,
        console: RichConsole | None = None,
        shown: Shown = SHOW_ALL,
        details: Path | None = None,
    ) -> None:
        self._details = details
        self._shown = shown
        self._run_name = run_name
        self._resume_step = resume_step
        self._console = console or RichConsole()
        self._bars = BARS if console is None else Bars(console)
        self._progress: Progress | None = None
        self._num_steps = 0  # of this process
        self._warned = False
        self._unreadable: set[str] = set()  # reported files
        self._seconds = self._data_seconds = 0.0  # of the steps after the warm-up

    def on_train_begin(self, schedule: RunSchedule) -> None:
        resumed = f", resumed after step {self._resume_step}" if self._resume_step else ""
        number = schedule.num_epochs
        epochs = "" if number is None else f", {number:.3g} epoch{'s' * (number != 1)}"
        rows = f" of {counted(schedule.global_batch_size, 'row')}"
        details = f"; details are in {self._details}" if self._details is not None else ""
        steps = counted(schedule.total_steps, "step")
        self._tell(f"run '{self._run_name}': {steps}{rows}{epochs}{resumed}{details}")
        self._progress = Progress(
            "training", schedule.total_steps, "steps", done=self._resume_step, lines=False, bars=self._bars
        )

    def on_step_end(self, report: StepReport) -> None:
        self._num_steps += 1
        if self._num_steps > _WARM_UP:
            self._seconds += report.seconds
            self._data_seconds += report.data_seconds
        if self._progress is not None:
            self._progress.to(report.step)

    def on_unreadable(self, media: Sequence[Unreadable]) -> None:
        for each in media:
            if each.where not in self._unreadable and len(self._unreadable) < MOST_NAMED:
                self._unreadable.add(each.where)
                detail = f" ({each.detail})" if each.detail else ""
                self._print(f"warning: left out of the loss: {each.where}: {each.reason}{detail}")

    def on_notice(self, notice: Notice) -> None:
        self._print(f"warning: {notice.text}")

    def on_log(self, report: LogReport) -> None:
        self._tell(log_line(report, self._shown))
        if not self._warned and self._num_steps >= _MIN_STEPS and self._data_seconds > _LONG_WAIT * self._seconds:
            share = self._data_seconds / self._seconds
            self._print(f"warning: {share:.0%} of the time is spent waiting for data\n{_WAIT_ADVICE}")
            self._warned = True
        if self._progress is not None:
            self._progress.to(report.step, f"loss {report.loss:.4f}  eta {_duration(report.eta_seconds)}")

    def on_evaluate(self, report: EvalReport) -> None:
        self._tell(evaluation_line(report, self._shown))

    def on_generate(self, generated: Generated) -> None:
        for row in generated.rows[:_SHOWN_ANSWERS]:
            self._tell(f"answer {row['id']}  {_one_line(row['prompt'], last=True)} -> {_one_line(row['response'])}")

    def on_save(self, path: Path) -> None:
        self._tell(f"saved {path}")

    def on_train_end(self, summary: TrainSummary) -> None:
        if self._progress is not None:
            self._progress.close()
            self._progress = None
        whole = counted(summary.total_steps, "step")
        done = whole if summary.step == summary.total_steps else f"after step {summary.step} of {summary.total_steps}"
        early = ", as early_stopping_steps says" if done != whole and summary.outcome == "finished" else ""
        self._print(f"{summary.outcome}: {done} in {_duration(summary.seconds)}{early}")
        if summary.best_checkpoint is not None and summary.best_loss is not None:
            self._print(f"best: {summary.best_checkpoint}  eval_loss {summary.best_loss:.4f}")

    def _tell(self, line: str) -> None:
        """Print a line unless the run is quiet."""
        if not is_quiet():
            self._print(line)

    def _print(self, line: str) -> None:
        encoding = self._console.encoding or "utf-8"
        text = line.encode(encoding, "replace").decode(encoding)
        if self._console.is_terminal and self._bars.print(text):
            return
        self._console.print(text, soft_wrap=True, highlight=False, markup=False, emoji=False)
        self._console.file.flush()  # a pipe would buffer lines for minutes


def log_line(report: LogReport, shown: Shown = SHOW_ALL) -> str:
    """step 10/120  epoch 0.25  loss 2.3456  ...  eta 0:01:23"""
    parts = [
        f"step {report.step}/{report.total_steps}",
        *([f"epoch {report.epoch:.2f}"] if report.epoch is not None else []),
        f"loss {report.loss:.4f}",
        f"lr {report.learning_rate:.2e}",
        f"grad_norm {report.grad_norm:.2f}",
        *(_throughput(report) if shown.throughput else ()),
        f"mem {report.memory_gib:.1f} GiB",
    ]
    parts += _metrics(shown.of_metrics(report.metrics))
    if report.data_seconds > _NOTABLE_WAIT * report.seconds:
        parts.append(f"data {report.data_seconds / report.seconds:.0%}")
    if report.unreadable_pictures:
        parts.append(f"unreadable media {report.unreadable_pictures}")
    if report.num_skipped:
        parts.append(f"skipped {report.num_skipped}")
    return "  ".join([*parts, f"eta {_duration(report.eta_seconds)}"])


def evaluation_line(report: EvalReport, shown: Shown = SHOW_ALL) -> str:
    """step 20  eval_loss 2.1234  perplexity 8.36  12,345 tokens in 3.2 s"""
    parts = [f"step {report.step}" + (f"  eval_loss {report.loss:.4f}" if report.loss is not None else "  validation")]
    if report.perplexity is not None and shown.perplexity:
        parts.append(f"perplexity {report.perplexity:.4g}")
    parts += _metrics(report.metrics)
    if report.unreadable_pictures:
        parts.append(f"unreadable media {report.unreadable_pictures}")
    return "  ".join([*parts, f"{report.num_tokens:,} tokens in {report.seconds:.1f} s"])


def _one_line(text: str, *, last: bool = False) -> str:
    """Return the beginning, or the end, of a text as one short line."""
    line = " ".join(text.split())
    if len(line) <= _SHOWN_CHARACTERS:
        return repr(line)
    return repr(f"…{line[-_SHOWN_CHARACTERS:]}" if last else f"{line[:_SHOWN_CHARACTERS]}…")


def _throughput(report: LogReport) -> Iterator[str]:
    yield f"tokens/s {report.tokens_per_second:,.0f}"
    yield f"{_short(report.model_tflops)} TFLOP/s"
    yield f"mfu {report.mfu:.1%}" if report.mfu is not None else "mfu —"


def _metrics(metrics: Mapping[str, float]) -> Iterator[str]:
    return (f"{_SHORT_NAMES.get(name, name)} {value:.4g}" for name, value in metrics.items())


def _short(value: float) -> str:
    """Format a value with three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
