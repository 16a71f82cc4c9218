"""Numbers in wandb, MLflow and SwanLab, read back; and that no tracker can stop or slow a run."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console as RichConsole
from test_callbacks import SCHEDULE, evaluation, step, summary

from megatune.config.settings import Settings
from megatune.training.callbacks import CallbackList, build_callbacks, trackers
from megatune.training.callbacks.base import Shown, evaluation_record
from megatune.training.callbacks.console import Console
from megatune.training.trackers import asked_trackers, read_ids

STEPS = list(range(1, 13))


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    monkeypatch.setenv("WANDB_MODE", "offline")


def use(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """Have a class of tracker_targets stand for wandb's."""
    monkeypatch.setattr("megatune.training.callbacks.WORKERS", {"wandb": f"tracker_targets:{target}"})


def report(output: Path, steps: range, *names: str, **run: Any) -> None:
    """Log steps and two evaluations as a run does; `names` default to a tracker called wandb."""
    logs = {"logging_steps": 1, "report_to": list(names or ["wandb"]), "swanlab_mode": "offline", "plot_loss": False}
    settings = Settings(logging=logs, run={"run_name": "first/try", **run}, checkpoint={"hub_token": "hf_secret"})
    every = build_callbacks(settings, output, steps[0] - 1)
    every.on_train_begin(SCHEDULE)
    for number in steps:
        every.on_step_end(step(number))
        if number in (4, 9):
            every.on_evaluate(evaluation(number))
    every.on_train_end(summary("finished" if steps[-1] == 12 else "stopped", steps[-1]))


def wandb_records(path: Path) -> Iterator[Any]:
    """Read the log of an offline run: blocks of 32 KiB with records in one or more pieces."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, pieces = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        pieces += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or its last piece
            yield Record.FromString(pieces)
            pieces = b""


def test_three_trackers_have_the_numbers_of_a_run_and_of_its_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process logs up to step 10 and is resumed after step 7: nothing is there twice."""
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 120.0)  # three libraries start, on whatever machine this is
    for steps in (range(1, 11), range(8, 13)):
        report(tmp_path, steps, "wandb", "mlflow", "swanlab")
    ids = read_ids(tmp_path)
    assert set(ids) == {"wandb", "mlflow", "swanlab"}

    runs = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    records = [record for run in runs for record in wandb_records(run)]
    began = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert {(run.run_id, run.project, run.display_name) for run in began} == {(ids["wandb"], "megatune", "first/try")}
    history = [record.history.item for record in records if record.WhichOneof("record_type") == "history"]
    rows = [{".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row} for row in history]
    assert [row["_step"] for row in rows] == STEPS
    assert [row["train/loss"] for row in rows] == [3.0 - number / 8 for number in STEPS]
    assert {row["_step"]: row["eval/loss"] for row in rows if "eval/loss" in row} == {4: 2.1234, 9: 2.1234}
    assert b"hf_secret" not in b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient((tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("megatune").experiment_id])
    logged = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(each.step, each.value) for each in logged] == [(number, 3.0 - number / 8) for number in STEPS]
    assert [each.step for each in client.get_metric_history(run.info.run_id, "eval/perplexity")] == [4, 9]
    assert (run.info.status, run.info.run_name, run.data.params["run_name"]) == ("FINISHED", "first/try", "first/try")

    found = sorted((tmp_path / "swanlog").glob("run-*/*.swanlab"))
    assert [path.stem for path in found] == [f"run-{ids['swanlab']}"] * 2
    assert all(b"train/loss" in path.read_bytes() for path in found)


def test_a_run_that_starts_over_is_a_new_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "Keeps")
    report(tmp_path, range(1, 4))
    first = read_ids(tmp_path)
    report(tmp_path, range(3, 5), overwrite_output_dir=True)
    assert read_ids(tmp_path)["wandb"] != first["wandb"]
    assert (tmp_path / "kept").read_text() == "1 2 3 stopped3 4 4 stopped"


def test_a_killed_run_has_its_last_numbers_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "Keeps")
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(trackers.Trackers, "on_train_end", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        report(tmp_path, range(1, 4))
    os.waitpid(child, 0)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and workers():
        time.sleep(0.05)
    assert not workers()
    assert (tmp_path / "kept").read_text() == "1 2 3 failed"


def test_one_that_fails_says_so_once_and_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "abcdef123456")
    use(monkeypatch, "Raises")
    report(tmp_path, range(1, 13))
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "warning" in line]
    assert line.startswith(
        "warning: wandb failed and is off for the rest of the run: ConnectionError: no server knows ***"
    )
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 12


def test_one_that_hangs_neither_slows_nor_stops_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(monkeypatch, "Hangs")
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 1.0)
    settings = Settings(logging={"logging_steps": 1, "report_to": ["wandb"], "plot_loss": False})
    (hung,) = [each for each in build_callbacks(settings, tmp_path)._callbacks if isinstance(each, trackers.Trackers)]
    hung.on_train_begin(SCHEDULE)
    while not (tmp_path / "pids").exists():
        time.sleep(0.05)
    began = time.monotonic()
    record = evaluation_record(evaluation(1))
    for number in range(1, 20001):
        hung.on_record({**record, "step": number})
    assert time.monotonic() - began < 5
    hung.on_train_end(summary())
    assert time.monotonic() - began < 10
    assert [record.message.partition(" (")[0] for record in caplog.records] == [
        "wandb does not keep up: it gets no numbers until it catches up",
        "wandb did not finish in 1 s and was ended",
    ]
    assert not [pid for pid in map(int, (tmp_path / "pids").read_text().split()) if is_alive(pid)]


def workers() -> list[psutil.Process]:
    """Processes of trackers, wherever they hang."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (
                "megatune.training.trackers.worker" in process.cmdline()
                and "tracker_targets:Keeps" in process.cmdline()
            ):
                found.append(process)
    return found


def is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


# --- what is asked for ------------------------------------------------------------------------------------------------


def test_a_library_that_is_missing_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import megatune.training.trackers as module

    monkeypatch.setattr(module, "_is_installed", lambda name: name in ("tensorboard", "wandb"))
    every = Settings(logging={"report_to": ["all"]})
    assert asked_trackers(every) == ["tensorboard", "wandb"]
    assert asked_trackers(Settings(logging={"report_to": ["none"], "use_swanlab": True})) == ["swanlab"]
    with pytest.raises(module.MegatuneError) as caught:
        module.check_installed(Settings(logging={"report_to": ["mlflow", "wandb", "swanlab"], "swanlab_mode": "local"}))
    assert caught.value.exit_code == 69
    assert [finding.fix for finding in caught.value.findings] == [
        'pip install "megatune[swanlab]"', 'pip install "megatune[mlflow]"',
        'pip install "swanlab[dashboard]", or write swanlab_mode: offline',
    ]  # fmt: skip


def test_switches_leave_out_throughput_and_perplexity() -> None:
    output = io.StringIO()
    console = Console("demo", 0, RichConsole(file=output), Shown(throughput=False, perplexity=False))

    every = CallbackList([console])
    every.on_train_begin(SCHEDULE)
    every.on_step_end(step(1))
    every.on_evaluate(evaluation(1))
    assert "grad_norm 1.23  mem 1.2 GiB" in output.getvalue()
    assert "perplexity" not in output.getvalue()
    shown = Shown(throughput=False, perplexity=False)
    assert "eval/perplexity" not in shown.scalars(evaluation_record(evaluation(1)))
    assert "eval/perplexity" in Shown().scalars(evaluation_record(evaluation(1)))
