"""Whole runs over pictures in several layouts: a resume is exact, and any layout trains and evaluates the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pool import RankPool
from runs import assert_same_tensors, evaluations, leave_as_crashed, metrics, settings_of, train

from megatune.demo.checkpoint import make_checkpoint

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
EP, SP = "expert_model_parallel_size", "sequence_parallel"
OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
TRAINED = {"freeze_vision_tower": False, "freeze_multi_modal_projector": False}
NUM_ROWS = 24


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with one picture, with two of different sizes, and with text alone; and the same as one more file."""
    folder = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(0)
    rows = []
    for number in range(NUM_ROWS):
        names = []
        for index in range(number % 3):
            width, height = (int(size) for size in generator.integers(28, 120, 2))
            names.append(f"{number}-{index}.png")
            pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / names[-1])
        question = f"{'<image>' * len(names)}What is number {number}?"
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": f"It is number {number}, with {len(names)} pictures."},
                ],
                "images": names,
            }
        )
    (folder / "pictures.json").write_text(json.dumps(rows))
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages", "images": "images"}
    entry = {"file_name": "pictures.json", "formatting": "sharegpt", "columns": columns, "tags": tags}
    (folder / "dataset_info.json").write_text(json.dumps({"pictures": entry}))
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: make_checkpoint(family, folder / family) for family in ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")}


def vision_settings(model: Path, data: Path, output_dir: Path, **changes: Any) -> Any:
    """Seven steps of eight rows."""
    values: dict[str, Any] = {
        "dataset_dir": data,
        "dataset": "pictures",
        "template": "qwen3_vl_nothink",
        "cutoff_len": 512,
        "image_max_pixels": 96 * 96,
    }
    values |= {"max_steps": 7, "dataloader_num_workers": 0, **TRAINED}
    return settings_of(model, output_dir, **{**values, **changes})


def eight_rows(world_size: int, **parallel: Any) -> dict[str, Any]:
    dp_size = world_size // (parallel.get(TP, 1) * parallel.get(PP, 1) * parallel.get(CP, 1))
    return {**parallel, "per_device_train_batch_size": 4 // dp_size}


SAME_LAYOUT: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tp2 sp dp2, overlaps, bf16": ("qwen2_5_vl", 4, {**eight_rows(4, **{TP: 2, SP: True}, **OVERLAPS), "bf16": True}),
    "ep2, packed, recomputed": (
        "qwen3_vl_moe", 2, {**eight_rows(2, **{EP: 2}), "packing": True, "recompute_granularity": "full"}
    ),
    "cp2, streaming": (
        "qwen3_vl", 2, {**eight_rows(2, **{CP: 2}), "streaming": True, "buffer_size": 10}
    ),
}  # fmt: skip


@pytest.mark.extended("ep2, packed, recomputed", "tp2 sp dp2, overlaps, bf16")
@pytest.mark.parametrize("name", SAME_LAYOUT)
def test_a_crashed_run_ends_as_if_nothing_had_happened(
    name: str, pool: RankPool, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    family, world_size, changes = SAME_LAYOUT[name]
    whole, crashed = (
        vision_settings(models[family], data, tmp_path / each, max_steps=6, **changes) for each in ("whole", "crashed")
    )
    assert pool.run(world_size, train, whole, tmp_path) == [0] * world_size
    leave_as_crashed(tmp_path / "whole", 3, tmp_path / "crashed")
    assert pool.run(world_size, train, crashed, tmp_path) == [0] * world_size
    assert_same_tensors(tmp_path / "whole", tmp_path / "crashed")
    assert_same_tensors(tmp_path / "whole/checkpoint-6/training", tmp_path / "crashed/checkpoint-6/training")
    one, other = metrics(tmp_path / "whole"), metrics(tmp_path / "crashed")
    assert list(other) == list(range(1, 7))
    assert [one[step]["loss"] for step in one] == [other[step]["loss"] for step in other]
    assert [one[step]["grad_norm"] for step in one] == [other[step]["grad_norm"] for step in other]


def test_a_run_goes_on_in_other_layouts_and_evaluates_alike(
    pool: RankPool, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    """From one process to tensor, then to pipeline and context parallelism."""
    evaluated = {"val_size": 4, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    straight = vision_settings(models["qwen3_vl"], data, tmp_path / "straight", **eight_rows(1), **evaluated)
    assert pool.run(1, train, straight, tmp_path) == [0]
    output_dir = tmp_path / "out"
    # Of four layers the first pipeline stage holds the three that the encoder's earlier layers feed.
    pipeline = {PP: 2, CP: 2, "decoder_first_pipeline_num_layers": 3}
    stages = ((1, {}, 3), (2, {TP: 2, SP: True}, 5), (4, pipeline, None))
    for world_size, parallel, crash_at in stages:
        settings = vision_settings(
            models["qwen3_vl"], data, output_dir, **eight_rows(world_size, **parallel), **evaluated
        )
        expected = 0 if crash_at is None else -1
        assert pool.run(world_size, train, settings, tmp_path, crash_at) == [expected] * world_size
    wanted, seen = metrics(tmp_path / "straight"), metrics(output_dir)
    for step in range(1, 8):
        assert seen[step]["loss"] == pytest.approx(wanted[step]["loss"], rel=1e-5), f"step {step}"
        assert seen[step]["num_input_tokens"] == wanted[step]["num_input_tokens"], f"step {step}: other rows"
    wanted, seen = evaluations(tmp_path / "straight"), evaluations(output_dir)
    assert list(seen) == [2, 4, 6, 7]
    for step, report in wanted.items():
        assert seen[step]["eval_loss"] == pytest.approx(report["eval_loss"], rel=1e-5), f"step {step}"
