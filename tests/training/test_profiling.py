"""profile: true leaves a trace and a table of the steps and ranks that the settings name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from pool import RankPool
from runs import metrics, settings_of, train

from megatune.demo.checkpoint import make_checkpoint

PROFILED = {"profile": True, "profile_step_start": 2, "profile_step_end": 4, "profile_ranks": [0, 1]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "qwen3", num_layers=2)


def test_a_trace_of_two_steps(pool: RankPool, model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, tmp_path / "out", max_steps=5, save_strategy="no", **PROFILED)
    assert pool.run(2, train, settings, tmp_path) == [0, 0]
    assert list(metrics(tmp_path / "out")) == [1, 2, 3, 4, 5]
    folder = tmp_path / "out/profile"
    assert sorted(path.name for path in folder.iterdir()) == [
        "rank-0.json.gz",
        "rank-0.txt",
        "rank-1.json.gz",
        "rank-1.txt",
    ]
    for rank in (0, 1):
        with gzip.open(folder / f"rank-{rank}.json.gz", "rt") as file:
            names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
        assert {"aten::mm", "aten::addmm", "aten::embedding"} & set(names)
        assert names.count("gloo:all_reduce") >= 2
        # Twice as many forward passes as a step has micro-batches.
        assert names.count("aten::embedding") == 2 * 2
        table = (folder / f"rank-{rank}.txt").read_text()
        assert "Self CPU" in table
        assert "aten::mm" in table


def test_a_resume_beyond_the_steps_profiles_nothing_again(pool: RankPool, model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, tmp_path / "out", max_steps=6, save_steps=3, profile=True, profile_step_start=1,
                           profile_step_end=2)  # fmt: skip
    assert pool.run(1, train, settings, tmp_path, 4) == [-1]
    trace = tmp_path / "out/profile/rank-0.json.gz"
    trace.unlink()
    assert pool.run(1, train, settings, tmp_path) == [0]
    assert not trace.exists()


def test_steps_beyond_the_run_are_refused(pool: RankPool, model: Path, tmp_path: Path) -> None:
    settings = settings_of(
        model, tmp_path / "out", max_steps=-1, num_train_epochs=1, **PROFILED | {"profile_step_end": 9}
    )
    with pytest.raises(AssertionError, match=r"profile_step_end 9 is beyond the 4 steps of this run"):
        pool.run(2, train, settings, tmp_path)
