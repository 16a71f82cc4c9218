"""Layers that predict further tokens are in published checkpoints and in no model: they are kept as they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from bridging import tensors
from safetensors.torch import load_file, save_file

from megatune.bridge.assemble import assemble
from megatune.bridge.merged_model import MergedModel
from megatune.config.settings import ParallelSettings, PrecisionSettings, RunSettings, Settings
from megatune.training.checkpoint import CheckpointFiles
from megatune.training.conversion import to_mcore
from megatune.training.train_state import TrainState


def with_mtp(model: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Copy a checkpoint, with tensors of such a layer in another dtype."""
    shutil.copytree(model, folder)
    generator = torch.Generator().manual_seed(5)
    # Some families have such a layer behind the last one.
    first = "model.layers.4" if model.name.startswith("glm4") else "mtp"
    shapes = {"fc.weight": (64, 128), "norm.weight": (64,), "layers.0.self_attn.k_norm.weight": (24,), "scale": ()}
    beside = {f"{first}.{name}": shape for name, shape in shapes.items()}
    made = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in beside.items()}
    save_file({**load_file(folder / "model.safetensors"), **made}, folder / "model.safetensors", {"format": "pt"})
    return made


def save(model: Path, settings: Settings, folder: Path) -> int:
    assembly = assemble(model, settings)
    files = CheckpointFiles(assembly, settings, TrainState())
    for file in files:
        file.write(folder)
    return files.model_bytes


@pytest.mark.parametrize(("world_size", "parallel"), [(1, {}), (2, {"pipeline_model_parallel_size": 2})], ids=str)
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "glm4_moe"])
def test_what_no_layer_uses_is_written_back(pool, model_dir, tmp_path, family, world_size, parallel):
    made = with_mtp(model_dir(family), tmp_path / "model")
    settings = Settings(
        run=RunSettings(ddp_timeout=30), parallel=ParallelSettings(**parallel), precision=PrecisionSettings(bf16=False)
    )
    (tmp_path / "saved").mkdir()
    sizes = pool.run(world_size, save, tmp_path / "model", settings, tmp_path / "saved")
    found, before = tensors(tmp_path / "saved"), tensors(tmp_path / "model")
    assert found.keys() == before.keys()
    for name, tensor in before.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert made.keys() <= found.keys()
    assert sum(sizes) == sum(tensor.nbytes for tensor in before.values())
    index = json.loads((tmp_path / "saved/model.safetensors.index.json").read_text())["weight_map"]
    assert {index[name] for name in made} == {max(index.values())}


def test_merging_copies_them(model_dir, tmp_path):
    made = with_mtp(model_dir("qwen3_5"), tmp_path / "model")
    (tmp_path / "merged").mkdir()
    MergedModel(tmp_path / "model", []).write(tmp_path / "merged", 10**9)
    found = tensors(tmp_path / "merged")
    assert all(torch.equal(found[name], tensor) for name, tensor in made.items())


def test_megatrons_form_has_no_place_for_it_and_says_so(model_dir, tmp_path):
    made = with_mtp(model_dir("qwen3_next"), tmp_path / "model")
    line = to_mcore(tmp_path / "model", [], tmp_path / "mcore", name="tiny")
    assert f"{len(made)} tensors that the model does not use ({min(made)}, ...) are not in it" in line
