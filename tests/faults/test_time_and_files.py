"""A time limit, and files with which a user asks a run for something."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pool import RankPool
from runs import assert_same_tensors, settings_of, train

from megatune.config.settings import Settings
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import ExitCode
from megatune.launch.context import RankContext
from megatune.training import run as training
from megatune.training import run_schedule
from megatune.training.run_schedule import TimeBudget
from megatune.training.storage.store import list_checkpoints


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "qwen3", num_layers=2)


class Clock:
    """Stands for `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


def test_the_last_step_begins_while_there_is_time_to_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_schedule, "time", clock := Clock())
    budget = TimeBudget(10.0, began=1000.0)
    clock.now += 100  # loading: stands for a save until there was one
    assert not budget.is_spent()
    clock.now += 100  # a step
    assert not budget.is_spent()  # at 200: this one, another and the save would end at 500
    budget.saved(5.0)
    clock.now += 100
    assert not budget.is_spent()
    clock.now += 100
    assert budget.is_spent()  # at 400: two more and a save would end at 610
    assert not TimeBudget(None, began=0.0).is_spent()


def limited(settings: Settings, folder: Path) -> int:
    """A rank's run that began almost a minute ago."""
    import time

    budget = TimeBudget(1.0, began=time.monotonic() - 59.9)
    inner = training._train
    try:
        training._train = lambda *given, **named: inner(*given, **named, budget=budget)
        return train(settings, folder)
    finally:
        training._train = inner


def test_a_run_ends_with_a_checkpoint_before_its_time_is_over(
    pool: RankPool, model: Path, tmp_path: Path, told: Callable[..., None]
) -> None:
    settings = settings_of(model, tmp_path / "out", max_steps=4, save_steps=100, exit_duration_in_mins=1.0)
    assert pool.run(1, limited, settings, tmp_path) == [ExitCode.STOPPED]
    (saved,) = list_checkpoints(tmp_path / "out")
    assert saved.name == "checkpoint-1"
    assert pool.run(1, train, settings, tmp_path) == [0]
    assert pool.run(1, train, settings_of(model, tmp_path / "whole", max_steps=4, save_steps=100), tmp_path) == [0]
    assert_same_tensors(tmp_path / "whole", tmp_path / "out")
    got = "stopped before exit_duration_in_mins (1) is over: checkpoint-1 is kept; the same command resumes from there"
    told(case="T33", fault="the time that exit_duration_in_mins allows ends", got=got)


def asked_to_save(settings: Settings, folder: Path) -> int:
    """A rank's run, whose user asks for a checkpoint as its second step begins."""
    beat = RankContext.beat

    def beat_and_ask(context: RankContext, phase: str, step: int, **more: float | None) -> None:
        beat(context, phase, step, **more)
        if (phase, step, context.rank) == ("train", 2, 0):
            context.stop_file.with_name("SAVE").touch()
            context._next_save_poll = 0.0  # it looks once a second

    RankContext.beat = beat_and_ask  # type: ignore[method-assign]
    try:
        return train(settings, folder)
    finally:
        RankContext.beat = beat  # type: ignore[method-assign]


def test_a_file_asks_for_a_checkpoint(pool: RankPool, model: Path, tmp_path: Path, told: Callable[..., None]) -> None:
    settings = settings_of(model, tmp_path / "out", max_steps=3, save_steps=100, gradient_accumulation_steps=2)
    assert pool.run(2, asked_to_save, settings, tmp_path) == [0, 0]
    assert [path.name for path in list_checkpoints(tmp_path / "out")] == ["checkpoint-2", "checkpoint-3"]
    assert not list(tmp_path.glob("**/SAVE"))
    told(case="T31", fault="a file SAVE in output_dir", got="saved checkpoint-2: the run continues, the file is gone")
