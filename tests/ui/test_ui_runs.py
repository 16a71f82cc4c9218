"""The list of runs and their curves: what is read, what a change sends again, and how much a page can grow."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from ui_kit import evaluation, record, write_run

from megatune.training.storage.files import OutputLock, json_line
from megatune.ui.runs import Runs
from megatune.ui.series import MOST_POINTS, Series


def append(path: Path, *records: dict) -> None:
    with path.open("a") as file:
        file.writelines(map(json_line, records))


def test_the_list_has_what_a_run_left(tmp_path: Path) -> None:
    write_run(tmp_path / "sweep" / "first", outcome="stopped")
    (tmp_path / "sweep" / "first" / "checkpoint-20" / "run.yaml").write_text("stage: sft")  # no run of its own
    (tmp_path / "empty").mkdir()
    (entry,) = Runs(tmp_path).changes()["runs"]
    assert (entry["id"], entry["name"], entry["state"], entry["stage"]) == ("sweep/first", "first", "stopped", "sft")
    assert (entry["step"], entry["total_steps"], entry["eval_loss"]) == (20, 20, 1.5)
    assert len(entry["spark"]) == 20


def test_only_changes_are_sent_again(tmp_path: Path) -> None:
    first, second = (write_run(tmp_path / name) for name in ("first", "second"))
    runs = Runs(tmp_path)
    version = runs.changes()["version"]
    assert runs.changes(version) == {"version": version, "root": str(tmp_path), "runs": [], "gone": [], "more": False}
    append(second / "metrics.jsonl", record(21))
    assert [(each["id"], each["step"]) for each in runs.changes(version)["runs"]] == [("second", 21)]
    (first / "run.yaml").unlink()
    runs._scanned = -1e9  # the folders are walked every few seconds
    assert runs.changes(version)["gone"] == ["first"]


def test_a_long_list_comes_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        write_run(tmp_path / name)
    monkeypatch.setattr("megatune.ui.runs._READ_SECONDS", -1.0)
    runs = Runs(tmp_path)
    first = runs.changes()
    assert ([each["id"] for each in first["runs"]], first["more"]) == (["first"], True)
    second = runs.changes(first["version"])
    assert ([each["id"] for each in second["runs"]], second["more"]) == (["second"], False)


def test_a_run_is_live_while_its_lock_is_held(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    runs = Runs(tmp_path)
    assert not runs.is_alive("run")
    with OutputLock(folder):
        assert runs.is_alive("run")
        assert [each["state"] for each in runs.changes()["runs"]] == ["running"]
        (folder / "STOP").touch()
        assert [each["state"] for each in runs.changes()["runs"]] == ["stopping"]
    assert [each["state"] for each in runs.changes()["runs"]] == ["finished"]
    # What a run that was killed leaves: the file, without the lock.
    holder = {"pid": os.getpid(), "host": os.uname().nodename, "started": 0.0}
    (folder / ".megatune.lock").write_text(json.dumps(holder))
    assert not runs.is_alive("run")


def test_a_long_log_is_not_read_for_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run")
    append(folder / "metrics.jsonl", *(record(step, 20000) for step in range(21, 20001)))
    read, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda *args: read.append(args[1]) or pread(*args))
    (entry,) = Runs(tmp_path).changes()["runs"]
    assert entry["step"] == 20000
    assert len(entry["spark"]) == 32
    assert sum(read) < 200_000 < (folder / "metrics.jsonl").stat().st_size / 10


def test_curves_bring_what_was_added(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, *(record(step) for step in range(1, 11)), evaluation(10, 2.0))
    series = Series(path)
    series.read()
    first = series.answer(["loss", "eval_loss", "missing"])
    assert first["curves"]["loss"][1] == [float(step) for step in range(1, 11)]
    assert first["curves"]["eval_loss"] == [[10], [10.0], [5.0], [2.0]]
    assert "missing" not in first["curves"]
    append(path, record(11))
    series.read()
    asked = {key: first[key] for key in ("level", "generation")}
    added = series.answer(["loss"], first["count"], **asked)
    assert (added["from"], added["curves"]["loss"][1]) == (10, [11.0])
    with path.open("a") as file:  # a line that is still being written
        file.write('{"step": 12, "lo')
    series.read()
    assert series.answer(["loss"])["count"] == 12
    with path.open("a") as file:
        file.write('ss": 0.5}\n')
    series.read()
    assert series.answer(["loss"])["curves"]["loss"][3][-1] == 0.5


def test_time_goes_on_over_processes_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, record(1, elapsed_seconds=5.0), record(2, elapsed_seconds=10.0), record(3, elapsed_seconds=4.0))
    append(path, {"step": 3, "notice": "a picture is missing"})
    series = Series(path)
    series.read()
    answer = series.answer(["loss"])
    assert answer["curves"]["loss"][2] == [5.0, 10.0, 14.0]
    assert answer["notices"] == [{"step": 3, "text": "a picture is missing"}]


def test_a_resumed_run_replaces_its_curves(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, *(record(step) for step in range(1, 11)))
    series = Series(path)
    series.read()
    before = series.answer(["loss"])
    path.unlink()
    append(path, *(record(step) for step in range(1, 6)))
    series.read()
    after = series.answer(["loss"], before["count"], before["level"], before["generation"])
    assert after["generation"] > before["generation"]
    assert (after["from"], after["count"]) == (0, 5)


def test_a_curve_is_thinned_out_and_keeps_its_extremes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, *({"step": step, "loss": 100.0 if step == 7777 else 1.0 + step % 2} for step in range(1, 20001)))
    series = Series(path)
    series.read()
    answer = series.answer(["loss"])
    records, steps, _, values = answer["curves"]["loss"]
    assert len(values) <= MOST_POINTS
    assert (max(values), min(values)) == (100.0, 1.0)
    assert steps[values.index(100.0)] == 7777
    # What a page has after many polls is what one that is opened now gets.
    grown = tmp_path / "grown.jsonl"
    live, known, last = Series(grown), {}, {"count": 0, "level": -1, "generation": -1}
    for start in range(1, 20001, 400):
        append(grown, *({"step": s, "loss": 100.0 if s == 7777 else 1.0 + s % 2} for s in range(start, start + 400)))
        live.read()
        last = live.answer(["loss"], last["count"], last["level"], last["generation"])
        known = {place: value for place, value in known.items() if place < last["from"]}
        known |= dict(zip(last["curves"]["loss"][0], last["curves"]["loss"][3], strict=True))
        assert len(known) <= MOST_POINTS
    assert known == dict(zip(records, values, strict=True))
