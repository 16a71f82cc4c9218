"""Whole runs over packed rows: resumed exactly, in any layout, and evaluated as without packing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pool import RankPool
from runs import assert_same_tensors, evaluations, leave_as_crashed, metrics, settings_of, train

from megatune.demo.checkpoint import make_checkpoint

PACKED = {"packing": True, "cutoff_len": 256, "per_device_train_batch_size": 2}
TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
SP = {"sequence_parallel": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "qwen3", num_layers=2)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "tp2 sp cp2": (4, {TP: 2, CP: 2, **SP}),
    "pp2 dp2": (4, {PP: 2, "per_device_train_batch_size": 1}),
}


@pytest.mark.extended("tp2 sp cp2", "one process")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_crashed_run_ends_as_if_nothing_had_happened(name: str, pool: RankPool, model: Path, tmp_path: Path) -> None:
    world_size, layout = LAYOUTS[name]
    whole, crashed = (
        settings_of(model, tmp_path / each, max_steps=6, **PACKED | layout) for each in ("whole", "crashed")
    )
    assert pool.run(world_size, train, whole, tmp_path) == [0] * world_size
    leave_as_crashed(tmp_path / "whole", 3, tmp_path / "crashed")
    assert pool.run(world_size, train, crashed, tmp_path) == [0] * world_size
    assert_same_tensors(tmp_path / "whole", tmp_path / "crashed")
    one, other = metrics(tmp_path / "whole"), metrics(tmp_path / "crashed")
    assert [one[step]["loss"] for step in one] == [other[step]["loss"] for step in range(1, 7)]


@pytest.mark.extended
def test_a_run_goes_on_in_another_layout(pool: RankPool, model: Path, tmp_path: Path) -> None:
    whole = settings_of(model, tmp_path / "whole", **PACKED)
    assert pool.run(1, train, whole, tmp_path) == [0]
    expected = metrics(tmp_path / "whole")
    for name in ("tp2 sp cp2", "pp2 dp2"):
        world_size, layout = LAYOUTS[name]
        assert pool.run(1, train, settings_of(model, tmp_path / name, **PACKED), tmp_path, 7) == [-1]
        elsewhere = settings_of(model, tmp_path / name, **PACKED | layout)
        assert pool.run(world_size, train, elsewhere, tmp_path) == [0] * world_size
        seen = metrics(tmp_path / name)
        for step in range(7, 13):
            assert seen[step]["loss"] == pytest.approx(expected[step]["loss"], rel=1e-5), f"step {step}"
            assert seen[step]["num_input_tokens"] == expected[step]["num_input_tokens"], f"step {step}: other rows"


def test_an_epoch_counts_what_it_counts_without_packing(pool: RankPool, model: Path, tmp_path: Path) -> None:
    """Every token is read once, every label trained once, and attention costs what documents cost, not rows."""
    totals, reports = {}, {}
    for packing in (False, True):
        folder = tmp_path / str(packing)
        settings = settings_of(
            model, folder / "out", **PACKED | {"packing": packing, "max_steps": -1, "num_train_epochs": 1}
        )
        assert pool.run(1, train, settings, folder) == [0]
        logged = metrics(folder / "out").values()
        reports[packing] = json.loads(next(folder.glob("cache/rows/*/report.json")).read_text())["train"]
        assert len(logged) == -(-reports[packing]["rows"] // 4)
        totals[packing] = [
            sum(record["num_input_tokens"] for record in logged),
            sum(record["num_tokens"] for record in logged),
            sum(record["model_tflops"] * record["seconds"] for record in logged),
        ]
    assert totals[True] == pytest.approx(totals[False], rel=1e-9)
    report = reports[True]
    assert totals[True][:2] == [report["tokens"], report["trained"]]
    assert report["rows"] < report["documents"] / 2
    assert report["rows"] % 4 == 1  # the last step is short: three of its four micro-batches are padding


def test_evaluation_does_not_depend_on_packing(pool: RankPool, model: Path, tmp_path: Path) -> None:
    # A learning rate that changes nothing that fp32 could show: the model is the same, whatever was trained on.
    common = {"val_size": 0.2, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 1, "learning_rate": 1e-12}
    found = {}
    for packing in (False, True):
        settings = settings_of(model, tmp_path / str(packing), **PACKED | common | {"packing": packing})
        assert pool.run(1, train, settings, tmp_path) == [0]
        found[packing] = evaluations(tmp_path / str(packing))[1]
    assert found[True]["eval_loss"] == pytest.approx(found[False]["eval_loss"], rel=1e-6)
    assert found[True]["eval_num_tokens"] == found[False]["eval_num_tokens"]
