"""What a run is told that goes on from an earlier one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from runs import DEMO, settings_of

from megatune.config.load import dump
from megatune.data.cache.key import local_parts
from megatune.errors import MegatuneError
from megatune.training.train_state import check_rerun, rerun_lines


@pytest.fixture
def output_dir(tmp_path: Path) -> Path:
    """Of a run with checkpoints, which trained to step 6."""
    for step in (3, 6):
        (tmp_path / f"out/checkpoint-{step}").mkdir(parents=True)
    (tmp_path / "out/run.yaml").write_text(dump(settings_of(tmp_path, tmp_path / "out"), {}))
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({}, []),
        ({"overwrite_output_dir": True, "learning_rate": 1.0}, []),
        ({"resume_from_checkpoint": False, "learning_rate": 1.0}, []),
        (
            {"max_steps": 20, "lr_scheduler_type": "linear"},
            ["max_steps: 12 in the run before, 20 now", "lr_scheduler_type: cosine in the run before, linear now"],
        ),
    ],
)
def test_what_is_trained_otherwise_is_told(changes: dict[str, Any], lines: list[str], output_dir: Path) -> None:
    settings = settings_of(output_dir.parent, output_dir, **changes)
    head, *told = rerun_lines(settings, dump(settings, {})) or [""]
    assert sorted(told) == sorted(f"changed    {line}" for line in lines)
    assert (f"from {output_dir}/checkpoint-6" in head) == bool(lines)


def test_the_run_of_the_checkpoint_that_is_named_is_the_one_before(output_dir: Path, tmp_path: Path) -> None:
    named = {"resume_from_checkpoint": str(output_dir / "checkpoint-3")}
    settings = settings_of(tmp_path, tmp_path / "other", seed=7, **named)
    text = dump(settings, {})
    assert any("seed: 42 in the run before, 7 now" in line for line in rerun_lines(settings, text))
    (output_dir / "run.yaml").write_text("a: [b")  # somebody else's
    assert rerun_lines(settings, text) == []


def test_data_that_changed_is_found_before_processes_start(output_dir: Path, tmp_path: Path) -> None:
    """From the digests of a checkpoint's state; what only ranks know, such as the tokenizer's, is left to them."""
    rows = tmp_path / "rows.jsonl"
    shutil.copy(Path(DEMO) / "identity.json", tmp_path / "rows.json")
    rows.write_text("\n".join(json.dumps(row) for row in json.loads((tmp_path / "rows.json").read_text())))
    settings = settings_of(tmp_path, output_dir, dataset=str(rows))
    (output_dir / "checkpoint-6/training").mkdir()
    state = {"step": 6, "seed": 42, "rows_parts": {**local_parts(settings), "the tokenizer": "0"}}
    (output_dir / "checkpoint-6/training/state.json").write_text(json.dumps(state))
    check_rerun(settings, None)
    rows.write_text(rows.read_text() + "\n" + rows.read_text().splitlines()[0])
    with pytest.raises(MegatuneError, match=r"changed: the file rows\.jsonl of dataset") as raised:
        check_rerun(settings, None)
    assert str(raised.value).startswith(f"{output_dir}/checkpoint-6: the training rows differ from those")
    with pytest.raises(MegatuneError, match="the settings of the data"):
        check_rerun(settings_of(tmp_path, output_dir, dataset=str(rows), cutoff_len=64), None)
    check_rerun(settings, None, ["data.cutoff_len"])
