"""Runs that end badly and go on by themselves."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import settings_of

from megatune.config.settings import Settings
from megatune.errors import ExitCode, MegatuneError
from megatune.launch.supervisor import counted_signals
from megatune.training import restarts
from megatune.training.restarts import BadStepsFile, check_restarts, run_restarting


class Runs:
    """Stands for `run_ranks`: run N saves the checkpoints and ends as the Nth entry says, and reports it."""

    def __init__(self, folder: Path, *ends: tuple[list[int], int, str]) -> None:
        self.folder, self.ends, self.settings = folder, list(ends), []
        self.run_dir = folder / "launch"
        self.run_dir.mkdir(parents=True, exist_ok=True)

    def __call__(self, settings: Settings) -> int:
        steps, code, what = self.ends[len(self.settings)]
        self.settings.append(settings)
        for step in steps:
            (self.folder / f"checkpoint-{step}").mkdir()
        report = {"findings": [{"what": what}], "exit_code": code, "ended": time.time()}
        (self.run_dir / "report.json").write_text(json.dumps(report))
        return code

    def start(self, **changes: Any) -> int:
        settings = settings_of(self.folder / "model", self.folder, **changes)
        return run_restarting(self, settings, self.run_dir, self.folder / "STOP")

    @property
    def noted(self) -> list[dict[str, Any]]:
        return json.loads((self.run_dir / "report.json").read_text()).get("restarts", [])


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "_FIRST_WAIT", 0.001)


DIED, DONE = int(ExitCode.PROCESS_DIED), int(ExitCode.DONE)


def test_a_run_goes_on_from_what_it_has_saved_itself(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-9").mkdir()  # of an earlier run, which this one is to overwrite
    runs = Runs(tmp_path, ([], DIED, "rank 1 died at step 2"), ([3, 6], DIED, "rank 0 died at step 7"), ([], DONE, ""))
    assert runs.start(max_restarts=5, overwrite_output_dir=True) == DONE
    # The first had come to no checkpoint of its own, and starts over; what is there of another run is not taken for it.
    asked = [(each.run.overwrite_output_dir, each.run.resume_from_checkpoint) for each in runs.settings]
    assert asked == [(True, None), (True, None), (False, None)]
    assert [one["from"] for one in runs.noted] == [None, "checkpoint-6"]


def test_restarts_are_noted_and_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = [
        ([3], DIED, "rank 1 died at step 4"),
        ([6], DIED, "rank 0 died at step 7"),
        ([9], DIED, "rank 1 hung at step 10"),
    ]
    runs = Runs(tmp_path, *ends)
    assert runs.start(max_restarts=2, resume_from_checkpoint=False) == DIED
    assert [(one["from"], one["exit_code"]) for one in runs.noted] == [("checkpoint-3", DIED), ("checkpoint-6", DIED)]
    assert [each.run.resume_from_checkpoint for each in runs.settings] == [False, None, None]
    told = capsys.readouterr().err
    assert "restart 1 of 2, from checkpoint-3, in 0 s" in told
    assert "restart 2 of 2, from checkpoint-6, in 0 s" in told


def test_the_same_end_from_the_same_checkpoint_is_given_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = [
        ([3], DIED, "rank 1 died at step 5"),
        ([], DIED, "rank 0 hung at step 4"),
        ([], DIED, "rank 0 died at step 4"),
    ]
    runs = Runs(tmp_path, *ends)
    assert runs.start(max_restarts=9) == DIED
    assert len(runs.settings) == 3
    assert "not restarted: from checkpoint-3 it has already ended in this way" in capsys.readouterr().err


@pytest.mark.parametrize("code", [DONE, *map(int, (ExitCode.STOPPED, ExitCode.DATA, ExitCode.NOT_FINITE))])
def test_what_a_restart_does_not_mend_ends(code: int, tmp_path: Path) -> None:
    runs = Runs(tmp_path, ([3], code, "whatever"))
    assert runs.start(max_restarts=3) == code
    assert runs.noted == []


def test_a_bad_step_that_a_kill_tore_does_not_spoil_the_next(tmp_path: Path) -> None:
    file = BadStepsFile(tmp_path)
    file.add({"step": 2, "action": "skip", "left_out": []})
    with file.path.open("a") as stream:
        stream.write('{"step": 5, "act')
    assert file.begin(3) == []
    file.add({"step": 5, "action": "go_back", "left_out": [4, 5]})
    assert [record["left_out"] for record in file.went_back()] == [[4, 5]]


def test_going_back_is_no_restart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It waits for nothing, counts apart, and is the end where nothing new was noted."""
    file, bad = BadStepsFile(tmp_path), int(ExitCode.NOT_FINITE)
    ends = [([3], bad, "step 5"), ([6], DIED, "rank 1 died"), ([], bad, "step 8"), ([], bad, "step 9")]

    class Spoiled(Runs):
        def __call__(self, settings: Settings) -> int:
            code = super().__call__(settings)
            if code == bad and len(self.settings) < 4:
                file.add({"step": 5, "action": "go_back", "left_out": [5]})
            return code

    runs = Spoiled(tmp_path, *ends)
    assert runs.start(max_restarts=1, on_bad_step="go_back", no_load_optim=True) == bad
    assert [(one["from"], one["exit_code"]) for one in runs.noted] == [
        ("checkpoint-3", bad), ("checkpoint-6", DIED), ("checkpoint-6", bad)
    ]  # fmt: skip
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("megatune: ")]
    assert told == [
        "megatune: goes back to checkpoint-3",
        "megatune: restart 1 of 1, from checkpoint-6, in 0 s",
        "megatune: goes back to checkpoint-6",
    ]
    # What the user said of an earlier run's optimizer is not said of this one's.
    assert [each.run.no_load_optim for each in runs.settings] == [True, False, False, False]


def test_going_back_is_noticed_where_an_earlier_run_in_the_folder_went_back_too(tmp_path: Path) -> None:
    file, bad = BadStepsFile(tmp_path), int(ExitCode.NOT_FINITE)
    for step in (3, 5):
        file.add({"step": step, "action": "go_back", "left_out": [step]})

    class Spoiled(Runs):
        def __call__(self, settings: Settings) -> int:
            code = super().__call__(settings)
            if code == bad:
                file.begin(None)  # as a run from the start does
                file.add({"step": 5, "action": "go_back", "left_out": [5]})
            return code

    runs = Spoiled(tmp_path, ([3], bad, "step 5"), ([6], DONE, ""))
    assert runs.start(on_bad_step="go_back", overwrite_output_dir=True) == DONE
    assert [one["from"] for one in runs.noted] == ["checkpoint-3"]


@pytest.mark.parametrize("how", ["signal", "file"])
def test_a_stop_between_two_runs_is_followed(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def signalled() -> Iterator[Counter[int]]:
        with counted_signals() as signals:
            signal.raise_signal(signal.SIGTERM)
            yield signals

    monkeypatch.setattr(restarts, "_FIRST_WAIT", 60.0)
    if how == "signal":
        monkeypatch.setattr(restarts, "counted_signals", signalled)
    else:
        (tmp_path / "STOP").touch()
    assert Runs(tmp_path, ([3], DIED, "rank 1 died")).start(max_restarts=3) == ExitCode.STOPPED


def test_restarts_of_what_another_launcher_starts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(tmp_path / "model", tmp_path, max_restarts=3)
    check_restarts(settings, is_joined=False, nnodes=1)
    back = settings_of(tmp_path / "model", tmp_path, on_bad_step="go_back")
    check_restarts(back, is_joined=False, nnodes=1)
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS", raising=False)
    with pytest.raises(MegatuneError, match="go_back under torchrun without --max-restarts"):
        check_restarts(back, is_joined=True, nnodes=1)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    check_restarts(back, is_joined=True, nnodes=1)
    anew = settings_of(tmp_path / "model", tmp_path, on_bad_step="go_back", overwrite_output_dir=True)
    with pytest.raises(MegatuneError, match="in a run that never resumes"):
        check_restarts(anew, is_joined=True, nnodes=1)
    with pytest.raises(MegatuneError, match="on_bad_step: go_back with NNODES=2"):
        check_restarts(back, is_joined=False, nnodes=2)
    with pytest.raises(MegatuneError, match="torchrun --max-restarts 3"):
        check_restarts(settings, is_joined=True, nnodes=1)
    with pytest.raises(MegatuneError, match="torchrun --nnodes 2 --max-restarts 3"):
        check_restarts(settings, is_joined=False, nnodes=2)
