"""A run that is resumed with other data, another tokenizer or other settings: named, and refused or allowed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pool import RankPool
from runs import DEMO, settings_of, train

from megatune.config.load import dump
from megatune.demo.checkpoint import make_checkpoint
from megatune.training.train_state import rerun_lines


@pytest.fixture(scope="module")
def trained(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a data set, and three steps of a run."""
    folder = tmp_path_factory.mktemp("trained")
    make_checkpoint("qwen3", folder / "model", num_layers=2)
    rows = json.loads((DEMO / "identity.json").read_text())
    (folder / "rows.json").write_text(json.dumps(rows[:40]))
    (folder / "dataset_info.json").write_text('{"mine": {"file_name": "rows.json"}}')
    settings = settings_of(folder / "model", folder / "out", max_steps=3, **of_data(folder))
    assert pool.run(1, train, settings, folder) == [0]
    return folder


def of_data(folder: Path) -> dict[str, Any]:
    return {"dataset": "mine", "dataset_dir": folder}


def other_row(folder: Path) -> None:
    rows = json.loads((folder / "rows.json").read_text())
    rows[7]["output"] += " Indeed."
    (folder / "rows.json").write_text(json.dumps(rows))


def other_tokenizer(folder: Path) -> None:
    path = folder / "model/tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-5]
    path.write_text(json.dumps(tokenizer))


CHANGES: dict[str, tuple[Callable[[Path], None] | None, dict[str, Any], str]] = {
    "one answer of the data": (other_row, {}, "changed: the file rows.json of dataset mine"),
    "the tokenizer": (other_tokenizer, {}, "changed: the tokenizer"),
    "cutoff_len": (None, {"cutoff_len": 32}, "changed: the settings of the data"),
    "the seed": (None, {"seed": 1}, "seed was 42, and is 1 in this run"),
    "rows per step": (None, {"gradient_accumulation_steps": 1}, "rows per step (batch size × accumulation ×"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_would_lose_the_order_of_rows_is_refused_by_name(
    name: str, pool: RankPool, trained: Path, tmp_path: Path, told: Callable[..., None]
) -> None:
    change, settings, words = CHANGES[name]
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    if change is not None:
        change(folder)
    (folder / "out/run.yaml").write_text("of: the run before")
    before = _contents(folder / "out")
    changed = settings_of(folder / "model", folder / "out", **{**of_data(folder), "max_steps": 6, **settings})
    with pytest.raises(AssertionError) as refusal:
        pool.run(1, train, changed, folder)
    assert words in str(refusal.value)
    assert "start again from the model with overwrite_output_dir: true" in str(refusal.value)
    assert _contents(folder / "out") == before
    line = next(line for line in str(refusal.value).splitlines() if words in line)
    told(case="T20", fault=f"{name} changed between a run and its resume", got=line.strip().removeprefix("why: "))


def _contents(output_dir: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in output_dir.rglob("*") if path.is_file()}


def test_what_a_resume_may_change_is_listed(tmp_path: Path, told: Callable[..., None]) -> None:
    before, after = (settings_of(tmp_path / "model", tmp_path, learning_rate=rate) for rate in (1e-3, 5e-4))
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "run.yaml").write_text(dump(before, {}))
    lines = rerun_lines(after, dump(after, {}))
    assert lines[1:] == ["changed    learning_rate: 0.001 in the run before, 0.0005 now"]
    told(case="T20", fault="the learning rate changed between a run and its resume", got=lines[1])
