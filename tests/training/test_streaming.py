"""Whole runs over streamed rows: resumed exactly, in any layout, evaluated, and honest about bad rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from runs import assert_same_tensors, evaluations, leave_as_crashed, metrics, settings_of, train

from megatune.config.settings import Settings
from megatune.data.report import TokenReport
from megatune.demo.checkpoint import make_checkpoint
from megatune.engine import groups
from megatune.errors import ExitCode, MegatuneError
from megatune.launch.context import RankContext
from megatune.launch.world import RankEnv
from megatune.training.feed import ModelLimits, StreamFollower, check_limits, open_stream
from megatune.training.run_schedule import RunSchedule

DP2 = {"per_device_train_batch_size": 2}
TP2 = {"tensor_model_parallel_size": 2}
NUM_ROWS, HELD_OUT = 40, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "qwen3", num_layers=2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of different lengths; two that are none among them, in the first and in the third block."""
    rows = [
        json.dumps({"instruction": f"Count to {n}", "output": " ".join(map(str, range(n + 1)))})
        for n in range(NUM_ROWS)
    ]
    rows[6:6], rows[33:33] = ["{broken"], ['{"instruction": "no answer"}']
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


def streamed(model: Path, data: Path, output_dir: Path, **changes: Any) -> Settings:
    """Twelve steps of eight rows: more than two passes over the data, a step often across two blocks."""
    values = {
        "dataset": str(data),
        "streaming": True,
        "buffer_size": 15,
        "on_bad_row": "quarantine",
        "val_size": HELD_OUT,
        "eval_strategy": "steps",
        "eval_steps": 6,
        **changes,
    }
    return settings_of(model, output_dir, **values)


@pytest.fixture(scope="module")
def straight(pool: RankPool, model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks, never interrupted."""
    folder = tmp_path_factory.mktemp("straight")
    assert pool.run(2, train, streamed(model, data, folder / "out", eval_on_start=True, **DP2), folder) == [0, 0]
    return folder / "out"


def test_a_crashed_run_ends_as_if_nothing_had_happened(
    pool: RankPool, model: Path, data: Path, straight: Path, tmp_path: Path
) -> None:
    settings = streamed(model, data, tmp_path / "out", eval_on_start=True, dataloader_num_workers=0, **DP2)
    assert pool.run(2, train, settings, tmp_path, 8) == [-1, -1]
    state = json.loads((tmp_path / "out/checkpoint-6/training/state.json").read_text())
    assert state["stream"]["first_row"] == NUM_ROWS - HELD_OUT, "row 48 is in the first block of the second epoch"
    assert pool.run(2, train, settings, tmp_path) == [0, 0]
    assert_same_tensors(straight, tmp_path / "out")
    assert_same_tensors(straight / "checkpoint-12/training", tmp_path / "out/checkpoint-12/training")
    one, other = metrics(straight), metrics(tmp_path / "out")
    assert list(other) == list(range(1, 13))
    for step, record in one.items():
        assert [other[step][key] for key in ("loss", "grad_norm", "epoch")] == [
            record[key] for key in ("loss", "grad_norm", "epoch")
        ]
    assert one[4]["epoch"] is None, "how long the first epoch is, nobody knows"
    assert one[9]["epoch"] == pytest.approx(72 / (NUM_ROWS - HELD_OUT))
    assert {step: record["eval_loss"] for step, record in evaluations(straight).items()} == {
        step: record["eval_loss"] for step, record in evaluations(tmp_path / "out").items()
    }
    assert list(evaluations(straight)) == [0, 6, 12]
    for folder in (straight, tmp_path / "out"):
        bad = [json.loads(line) for line in (folder / "bad_rows.jsonl").read_text().splitlines()]
        assert [row["where"] for row in bad] == [f"{data}:7", f"{data}:34"]
    assert not list(tmp_path.glob("cache/stream/*")), "what was read ahead is left behind"


def test_a_run_goes_on_in_another_layout(
    pool: RankPool, model: Path, data: Path, straight: Path, tmp_path: Path
) -> None:
    leave_as_crashed(straight, 6, tmp_path / "out")
    assert pool.run(2, train, streamed(model, data, tmp_path / "out", **TP2), tmp_path) == [0, 0]
    expected, seen = metrics(straight), metrics(tmp_path / "out")
    for step in range(7, 13):
        assert seen[step]["loss"] == pytest.approx(expected[step]["loss"], rel=1e-5), f"step {step}"
        assert seen[step]["num_input_tokens"] == expected[step]["num_input_tokens"], f"step {step}: other rows"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"on_bad_row": "error"}, "rows cannot be trained on"),
        ({"buffer_size": 16, "on_bad_row": "skip"}, "the training rows differ from those that the run began with"),
    ],
)
def test_a_run_ends_with_what_the_producer_or_the_checkpoint_refuses(
    change: dict[str, Any], message: str, pool: RankPool, model: Path, data: Path, tmp_path: Path
) -> None:
    if "buffer_size" in change:
        first = streamed(model, data, tmp_path / "out", max_steps=3, eval_strategy="no", val_size=0, on_bad_row="skip")
        assert pool.run(1, train, first, tmp_path) == [0]
    with pytest.raises(AssertionError, match=message):
        pool.run(1, train, streamed(model, data, tmp_path / "out", eval_strategy="no", val_size=0, **change), tmp_path)


def test_a_token_beyond_the_models_vocabulary_is_refused_with_its_block(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATUNE_CACHE", str(tmp_path))
    context = RankContext(RankEnv(0, 0, 1, 1, "localhost", 1, 0), tmp_path)
    monkeypatch.setattr(groups, "_store", torch.distributed.HashStore())
    settings = streamed(model, data, tmp_path / "out")
    stream = open_stream(context, settings, model, None)
    try:
        follower = StreamFollower(
            stream, context, settings, RunSchedule(8, None, 1, 0, 0), ModelLimits(100, 10**6), None
        )
        with pytest.raises(MegatuneError, match=r"token id \d+ is beyond the model's vocabulary of 100") as refusal:
            follower.before(0)
    finally:
        stream.close()
    assert refusal.value.exit_code == ExitCode.INPUT


def test_a_document_beyond_the_models_positions_is_refused() -> None:
    """Packed rows may be longer than the model's positions, their documents may not."""
    check_limits(TokenReport(longest=4096, capacity=8192), ModelLimits(100, 4096))
    with pytest.raises(MegatuneError, match="has 4097 tokens, the model 4096 positions") as refusal:
        check_limits(TokenReport(longest=4097, capacity=8192), ModelLimits(100, 4096))
    assert refusal.value.exit_code == ExitCode.DATA
