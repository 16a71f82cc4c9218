"""What a run prints and leaves behind: lines, files, plots; and that none of it can stop a run."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console as RichConsole
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatune.data.batches import Unreadable
from megatune.training.callbacks import CallbackList, build_callbacks, plot
from megatune.training.callbacks.base import Callback, EvalReport, LogReport, StepReport, TrainSummary
from megatune.training.callbacks.console import Console
from megatune.training.callbacks.metrics import Metrics, Results, TensorBoard, TrainerLog
from megatune.training.callbacks.plot import LossPlot, draw, smooth
from megatune.training.loaders import Quarantine
from megatune.training.run_schedule import RunSchedule
from megatune.training.storage.files import read_json_lines

SCHEDULE = RunSchedule(16, steps_per_epoch=4, total_steps=12, save_every=0, evaluate_every=0)


def step(number: int, **changes: Any) -> StepReport:
    fields: dict[str, Any] = {
        "step": number,
        "total_steps": 12,
        "epoch": number / 4,
        "loss": 3.0 - number / 8,
        "learning_rate": 1e-5,
        "grad_norm": 1.234,
        "num_tokens": 900,
        "num_input_tokens": 1000,
        "seconds": 0.5,
        "tokens_per_second": 2000.0,
        "model_tflops": 0.1234,
        "mfu": None,
        "memory_gib": 1.25,
    }
    return StepReport(**fields | changes)


def evaluation(number: int, loss: float = 2.1234) -> EvalReport:
    return EvalReport(step=number, epoch=number / 4, loss=loss, perplexity=8.3594, num_tokens=12345, seconds=3.21)


def summary(outcome: Any = "finished", number: int = 12) -> TrainSummary:
    return TrainSummary(outcome=outcome, step=number, total_steps=12, seconds=6.4)


class Recorder(Callback):
    """Keeps the log lines it is given."""

    def __init__(self) -> None:
        self.reports: list[LogReport] = []

    def on_log(self, report: LogReport) -> None:
        self.reports.append(report)


def run(callbacks: list[Callback], steps: range, logging_steps: int = 1, evaluate_at: tuple[int, ...] = ()) -> None:
    every = CallbackList(callbacks, logging_steps)
    every.on_train_begin(SCHEDULE)
    for number in steps:
        every.on_step_end(step(number))
        if number in evaluate_at:
            every.on_evaluate(evaluation(number))
    every.on_train_end(summary("finished" if steps[-1] == 12 else "stopped", steps[-1]))


# --- when a line is due, and what it says -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "logging_steps", "logged"),
    [
        (range(1, 13), 5, [1, 5, 10, 12]),
        (range(1, 13), 100, [1, 12]),
        (range(8, 13), 5, [8, 10, 12]),  # resumed after step 7
        (range(1, 9), 5, [1, 5, 8]),  # stopped at step 8
    ],
)
def test_first_last_and_every_logging_steps(steps: range, logging_steps: int, logged: list[int]) -> None:
    recorder = Recorder()
    run([recorder], steps, logging_steps)
    assert [report.step for report in recorder.reports] == logged
    assert sum(report.num_steps for report in recorder.reports) == len(steps)


def test_a_line_is_about_all_its_steps() -> None:
    recorder = Recorder()
    every = CallbackList([recorder], logging_steps=3)
    every.on_train_begin(SCHEDULE)
    every.on_step_end(step(1))
    every.on_step_end(step(2, loss=4.0, seconds=3.0, tokens_per_second=100.0, memory_gib=7.0, mfu=0.2, skipped=True))
    every.on_step_end(step(3, loss=2.0, seconds=1.0, tokens_per_second=300.0, learning_rate=3e-5, mfu=0.4))
    report = recorder.reports[-1]
    assert (report.loss, report.num_tokens, report.num_input_tokens, report.seconds) == (3.0, 1800, 2000, 4.0)
    assert (report.tokens_per_second, report.mfu) == pytest.approx((150.0, 0.25))
    assert (report.learning_rate, report.memory_gib, report.num_skipped) == (3e-5, 7.0, 1)


def test_eta_is_the_pace_of_recent_steps_without_the_first() -> None:
    recorder = Recorder()
    every = CallbackList([recorder])
    for number in range(1, 41):
        seconds = 100.0 if number == 1 else 4.0 if number < 21 else 2.0
        every.on_step_end(step(number, total_steps=100, seconds=seconds))
    etas = {report.step: report.eta_seconds for report in recorder.reports}
    assert etas[1] == 99 * 100
    assert etas[2] == 98 * 4
    assert etas[30] == pytest.approx(70 * 3)
    assert etas[40] == 60 * 2


def test_a_callback_that_fails_is_named_once_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Callback):
        calls = 0

        def on_log(self, report: LogReport) -> None:
            self.calls += 1
            raise OSError(28, "No space left on device")

    broken, recorder = Broken(), Recorder()
    with caplog.at_level(logging.WARNING):
        run([broken, recorder], range(1, 13))
    assert broken.calls == 1
    assert len(recorder.reports) == 12
    assert [record.message for record in caplog.records] == [
        "Broken failed and is off for the rest of the run: OSError(28, 'No space left on device')"
    ]


@pytest.mark.parametrize(("outcome", "warnings"), [("finished", 1), ("failed", 0)])
def test_what_ends_a_run_is_not_reported_by_callbacks_too(
    caplog: pytest.LogCaptureFixture, outcome: Any, warnings: int
) -> None:
    class Broken(Callback):
        def on_train_end(self, summary: TrainSummary) -> None:
            raise OSError(28, "No space left on device")

    with caplog.at_level(logging.WARNING):
        CallbackList([Broken()]).on_train_end(summary(outcome))
    assert len(caplog.records) == warnings


# --- console ----------------------------------------------------------------------------------------------------------


def test_plain_lines() -> None:
    output = io.StringIO()
    every = CallbackList([Console("demo", 0, RichConsole(file=output, width=40))], logging_steps=10)
    every.on_train_begin(SCHEDULE)
    every.on_step_end(step(1, loss=12.34567, tokens_per_second=12345.4, mfu=0.4123, model_tflops=1234.5))
    every.on_step_end(step(12, skipped=True, grad_norm=float("inf")))
    every.on_evaluate(evaluation(12))
    every.on_save(Path("out/checkpoint-12"))
    every.on_train_end(
        TrainSummary(
            outcome="finished",
            step=12,
            total_steps=12,
            seconds=83,
            best_checkpoint=Path("out/checkpoint-12"),
            best_loss=2.1234,
        )
    )
    assert output.getvalue().splitlines() == [
        "run 'demo': 12 steps of 16 rows, 3 epochs",
        "step 1/12  epoch 0.25  loss 12.3457  lr 1.00e-05  grad_norm 1.23  tokens/s 12,345  1,234 TFLOP/s  mfu 41.2%  "
        "mem 1.2 GiB  eta 0:00:06",
        "step 12/12  epoch 3.00  loss 1.5000  lr 1.00e-05  grad_norm inf  tokens/s 2,000  0.123 TFLOP/s  mfu —  "
        "mem 1.2 GiB  skipped 1  eta 0:00:00",
        "step 12  eval_loss 2.1234  perplexity 8.359  12,345 tokens in 3.2 s",
        "saved out/checkpoint-12",
        "finished: 12 steps in 0:01:23",
        "best: out/checkpoint-12  eval_loss 2.1234",
    ]


def test_one_row_is_a_row() -> None:
    output = io.StringIO()
    Console("demo", 0, RichConsole(file=output)).on_train_begin(replace(SCHEDULE, global_batch_size=1))
    assert output.getvalue().startswith("run 'demo': 12 steps of 1 row, ")


def test_a_resumed_run_that_stops_says_so() -> None:
    output = io.StringIO()
    console = Console("demo", 7, RichConsole(file=output))
    console.on_train_begin(SCHEDULE)
    console.on_train_end(summary("stopped", 9))
    assert output.getvalue().splitlines() == [
        "run 'demo': 12 steps of 16 rows, 3 epochs, resumed after step 7",
        "stopped: after step 9 of 12 in 0:00:06",
    ]


def test_a_terminal_that_only_knows_ascii() -> None:
    raw = io.BytesIO()
    output = io.TextIOWrapper(raw, encoding="ascii")
    run([Console("demo", 0, RichConsole(file=output))], range(1, 13), logging_steps=12)
    assert b"mfu ?  mem" in raw.getvalue()


def test_a_terminal_has_a_progress_bar() -> None:
    output = io.StringIO()
    run([Console("demo", 0, RichConsole(file=output, force_terminal=True, width=120))], range(1, 13), logging_steps=4)
    assert "12 of 12 steps" in output.getvalue()
    assert "step 8/12  epoch 2.00" in output.getvalue()
    assert output.getvalue().rstrip().endswith("finished: 12 steps in 0:00:06")


def test_metrics_of_any_name_are_means_and_shown_everywhere(tmp_path: Path) -> None:
    recorder, output = Recorder(), io.StringIO()
    console = Console("demo", 0, RichConsole(file=output))
    callbacks = [recorder, console, Metrics(tmp_path), TensorBoard(tmp_path / "runs"), LossPlot(tmp_path)]
    every = CallbackList(callbacks, logging_steps=2)
    every.on_train_begin(SCHEDULE)
    every.on_step_end(step(1, metrics={"load_balancing_loss": 1.5, "reward": -0.25}))
    every.on_step_end(step(2, metrics={"load_balancing_loss": 1.25, "reward": -0.75}))
    every.on_step_end(step(3, metrics={"load_balancing_loss": 1.75, "reward": -0.25}))
    every.on_evaluate(EvalReport(**asdict(evaluation(3)) | {"metrics": {"accuracy": 0.625}}))
    every.on_train_end(summary("stopped", 3))
    assert recorder.reports[-1].metrics == {"load_balancing_loss": 1.75, "reward": -0.25}
    assert recorder.reports[1].metrics == {"load_balancing_loss": 1.25, "reward": -0.75}
    assert "mem 1.2 GiB  balance 1.25  reward -0.75  eta" in output.getvalue()
    assert "perplexity 8.359  accuracy 0.625  12,345 tokens" in output.getvalue()
    lines = read_json_lines(tmp_path / "metrics.jsonl")
    assert [line.get("reward") for line in lines] == [-0.25, -0.75, None, -0.25]
    assert lines[2]["eval_accuracy"] == 0.625
    assert "metrics" not in lines[0]
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    assert [event.value for event in events.Scalars("train/reward")] == [-0.25, -0.75, -0.25]
    assert [event.value for event in events.Scalars("eval/accuracy")] == [0.625]


def test_a_metric_need_not_be_of_every_step() -> None:
    recorder = Recorder()
    every = CallbackList([recorder], logging_steps=2)
    every.on_train_begin(SCHEDULE)
    for number, metrics in enumerate(({}, {}, {"reward": 0.5}, {}), start=1):
        every.on_step_end(step(number, metrics=metrics))
    assert recorder.reports[-1].metrics == {"reward": 0.5}


def test_lines_of_steps_keep_their_keys(tmp_path: Path) -> None:
    run([Metrics(tmp_path)], range(1, 2))
    [line] = read_json_lines(tmp_path / "metrics.jsonl")
    assert (line["load_balancing_loss"], line["z_loss"], line["data_seconds"]) == (None, None, 0.0)


def test_unreadable_pictures_are_named_once_and_counted(tmp_path: Path) -> None:
    """The file keeps what an earlier process of the run wrote."""
    output = io.StringIO()
    for number in range(2):
        every = CallbackList([Console("demo", 0, RichConsole(file=output)), Quarantine(tmp_path, keep=number > 0)])
        every.on_train_begin(SCHEDULE)
        for step_number in range(1, 4):
            each = Unreadable(2, "a[b].jpg", "damaged-picture", "image: damaged", "at byte 5")
            every.on_unreadable([each] if number == 0 else [each, each._replace(where="c.jpg")])
            every.on_step_end(step(step_number, unreadable_pictures=1))
        if number == 0:
            lines = output.getvalue().splitlines()
    warning = "warning: left out of the loss: a[b].jpg: image: damaged (at byte 5)"
    assert [line for line in lines if "warning" in line] == [warning]
    assert sum("unreadable media 1" in line for line in lines) == 3
    kept = read_json_lines(tmp_path / "bad_rows.jsonl")
    assert [row["where"] for row in kept] == ["a[b].jpg", "c.jpg"]
    assert kept[0] == {
        "where": "a[b].jpg", "code": "damaged-picture", "reason": "image: damaged", "detail": "at byte 5",
    }  # fmt: skip


def test_waiting_for_data_is_warned_of_once() -> None:
    output = io.StringIO()
    every = CallbackList([Console("demo", 0, RichConsole(file=output))])
    every.on_train_begin(SCHEDULE)
    for number in range(1, 13):
        waited = 0.4 if number < 3 else 0.02 if number < 7 else 0.3
        every.on_step_end(step(number, data_seconds=waited))
    lines = output.getvalue().splitlines()
    assert [line for line in lines if "warning" in line] == ["warning: 15% of the time is spent waiting for data"]
    assert "dataloader_num_workers" in output.getvalue()
    at = lines.index("warning: 15% of the time is spent waiting for data")
    assert lines[at - 1].startswith("step 7/12")
    assert "data 60%" in lines[at - 1]
    assert "data" not in lines[at - 2]


# --- files ------------------------------------------------------------------------------------------------------------


def steps_of(path: Path, key: str) -> list[int]:
    return [record[key] for record in read_json_lines(path)]


def test_metrics(tmp_path: Path) -> None:
    run([Metrics(tmp_path)], range(1, 13), 6, evaluate_at=(6,))
    first, logged, evaluated, _ = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (first["step"], logged["step"], logged["num_steps"], logged["loss"]) == (1, 6, 5, 2.5)
    assert logged["mfu"] is None
    assert evaluated == {
        "step": 6,
        "epoch": 1.5,
        "eval_loss": 2.1234,
        "eval_perplexity": 8.3594,
        "eval_num_tokens": 12345,
        "eval_seconds": 3.21,
        "eval_unreadable_pictures": 0,
    }


def test_numbers_that_are_not_finite_are_still_json(tmp_path: Path) -> None:
    every = CallbackList([Metrics(tmp_path)])
    every.on_train_begin(SCHEDULE)
    every.on_step_end(step(1, loss=float("nan"), grad_norm=float("inf")))
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert (line["loss"], line["grad_norm"]) == (None, None)


def test_a_resume_drops_what_lies_beyond_it(tmp_path: Path) -> None:
    files = {"metrics.jsonl": (Metrics, "step"), "trainer_log.jsonl": (TrainerLog, "current_steps")}
    for name, (kind, key) in files.items():
        run([kind(tmp_path)], range(1, 11), evaluate_at=(7, 9))
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 11, "current_st')  # torn by a kill
        run([kind(tmp_path, 7)], range(8, 13))
        assert steps_of(tmp_path / name, key) == [1, 2, 3, 4, 5, 6, 7, 7, 8, 9, 10, 11, 12]
        run([kind(tmp_path, 0)], range(1, 3))  # from the start again
        assert steps_of(tmp_path / name, key) == [1, 2]


def test_an_evaluation_before_the_first_step_of_an_earlier_run_is_dropped(tmp_path: Path) -> None:
    for _ in range(2):  # it starts again from the beginning, with eval_on_start
        every = CallbackList([Metrics(tmp_path)])
        every.on_train_begin(SCHEDULE)
        every.on_evaluate(evaluation(0))
        every.on_train_end(summary("failed", 0))
    assert steps_of(tmp_path / "metrics.jsonl", "step") == [0]


def test_lines_are_there_after_kill_9(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        every = CallbackList([Metrics(tmp_path)])
        every.on_train_begin(SCHEDULE)
        every.on_step_end(step(1))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert steps_of(tmp_path / "metrics.jsonl", "step") == [1]


def test_trainer_log_has_llama_factorys_keys(tmp_path: Path) -> None:
    run([TrainerLog(tmp_path)], range(1, 13), 8, evaluate_at=(8,))
    _, logged, evaluated, _ = read_json_lines(tmp_path / "trainer_log.jsonl")
    common = {"current_steps": 8, "total_steps": 12, "epoch": 2.0, "percentage": 66.67, "elapsed_time": "0:00:00"}
    common["remaining_time"] = "0:00:02"
    assert logged == {**common, "loss": 2.375, "lr": 1e-5}
    assert evaluated == {**common, "eval_loss": 2.1234}


def test_a_resume_after_the_last_step_still_names_the_epoch(tmp_path: Path) -> None:
    every = CallbackList([Results(tmp_path)])
    every.on_train_begin(SCHEDULE)
    every.on_train_end(summary("finished", 12))
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    assert (state["epoch"], state["global_step"]) == (SCHEDULE.num_epochs, 12)


def test_results(tmp_path: Path) -> None:
    run([Metrics(tmp_path), Results(tmp_path)], range(1, 13), 4, evaluate_at=(4,))
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    assert (state["global_step"], state["max_steps"], state["num_train_epochs"]) == (12, 12, 3)
    history = state["log_history"]
    assert [entry["step"] for entry in history] == [1, 4, 4, 8, 12]
    assert history[1] == {"epoch": 1.0, "grad_norm": 1.234, "learning_rate": 1e-5, "loss": 2.625, "step": 4}
    assert history[2] == {"epoch": 1.0, "eval_loss": 2.1234, "eval_runtime": 3.21, "step": 4}
    results = json.loads((tmp_path / "all_results.json").read_text())
    assert results["train_loss"] == pytest.approx(sum(3 - number / 8 for number in range(1, 13)) / 12)
    assert results["train_samples_per_second"] == pytest.approx(12 * 16 / 6.4)
    assert results["eval_loss"] == 2.1234


def test_a_run_that_stopped_has_a_state_and_no_results(tmp_path: Path) -> None:
    run([Metrics(tmp_path), Results(tmp_path)], range(1, 4))
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 3
    assert not (tmp_path / "all_results.json").exists()


# --- plot and TensorBoard ---------------------------------------------------------------------------------------------


def test_smoothing_follows_a_constant_and_calms_noise() -> None:
    assert smooth([2.0] * 100) == pytest.approx([2.0] * 100)
    noise = smooth([(-1.0) ** number for number in range(400)])
    assert max(map(abs, noise[100:-100])) < 0.1
    slope = [float(number) for number in range(400)]
    assert smooth(slope)[100:-100] == pytest.approx(slope[100:-100], abs=0.5)  # it does not lag behind
    assert smooth([3.0, 1.0]) == [3.0, 1.0]


def test_the_plot_is_an_image_of_the_losses(tmp_path: Path) -> None:
    assert not draw(tmp_path / "metrics.jsonl", tmp_path / "training_loss.png")
    run([Metrics(tmp_path), LossPlot(tmp_path)], range(1, 13), evaluate_at=(4, 8, 12))
    with Image.open(tmp_path / "training_loss.png") as image:
        assert image.format == "PNG"
        assert min(image.size) > 500
        colours = {pixel[:3] for _, pixel in image.convert("RGB").getcolors(1 << 20)}
    assert {(31, 119, 180), (255, 127, 14)} <= colours  # the training loss and the evaluation loss


def test_a_plot_says_that_its_rewards_are_filtered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(plot, "as_png", lambda figure: figures.append(figure) or b"")
    record = {"step": 1, "loss": 1.0, "reward": 0.5, "reward_unfiltered": 0.2}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert draw(tmp_path / "metrics.jsonl", tmp_path / "training_loss.png")
    labels = [line.get_label() for axes in figures[0].axes for line in axes.get_lines()]
    assert labels[:2] == ["training loss", "training, groups that the filter keeps"]


def test_the_plot_is_drawn_while_the_run_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    image = tmp_path / "training_loss.png"
    every = CallbackList([Metrics(tmp_path), LossPlot(tmp_path)])
    every.on_train_begin(SCHEDULE)
    drawn = []
    for number in range(1, 9):
        now += 10.0
        every.on_step_end(step(number))
        drawn.append(image.exists())
        image.unlink(missing_ok=True)
    assert drawn == [False, False, True, False, False, True, False, False]
    every.on_train_end(summary("failed", 8))
    assert image.exists()


def test_tensorboard_hides_what_a_resume_does_again(tmp_path: Path) -> None:
    run([TensorBoard(tmp_path)], range(1, 11), evaluate_at=(9,))
    time.sleep(1.01)  # event files are named by the second
    run([TensorBoard(tmp_path, 7)], range(8, 13), evaluate_at=(12,))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 13))
    assert [event.step for event in events.Scalars("eval/loss")] == [12]
    assert events.Scalars("train/learning_rate")[0].value == pytest.approx(1e-5)


# --- from settings ----------------------------------------------------------------------------------------------------


def whole_run(output: Path, **logging_settings: Any) -> set[str]:
    from megatune.config.settings import Settings

    settings = Settings(logging={"logging_steps": 3, **logging_settings}, run={"run_name": "first/try"})
    every = build_callbacks(settings, output)
    every.on_train_begin(SCHEDULE)
    for number in range(1, 13):
        every.on_step_end(step(number))
    every.on_train_end(summary())
    assert steps_of(output / "metrics.jsonl", "step") == [1, 3, 6, 9, 12]
    return {path.name for path in output.iterdir()}


FILES = {"metrics.jsonl", "trainer_log.jsonl", "trainer_state.json", "train_results.json", "all_results.json"}


def test_settings_choose_the_callbacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    everything = whole_run(tmp_path / "a", report_to=["tensorboard"], plot_loss=True)
    assert everything == FILES | {"training_loss.png", "runs"}
    assert [path.name for path in (tmp_path / "a" / "runs").iterdir()] == ["first-try"]
    assert whole_run(tmp_path / "b", report_to=["none"], plot_loss=False) == FILES
    assert caplog.records == []
