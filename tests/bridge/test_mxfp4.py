"""Checkpoints in MXFP4 are read in bf16, bit for bit as Transformers reads them, whatever part of them a rank holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bridging import tensors
from layouts import EXPERT_LAYOUTS, MORE_EXPERT_LAYOUTS
from mxfp4_kit import as_published
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatune.bridge.assemble import assemble, open_checkpoint
from megatune.bridge.block_formats import dequantize_mxfp4
from megatune.bridge.merged_model import MergedModel
from megatune.bridge.safetensors_files import SafetensorsFolder
from megatune.config.settings import Settings
from megatune.errors import ExitCode, MegatuneError
from megatune.families import load_architecture
from megatune.families.table import Box
from megatune.training.checkpoint import CheckpointFiles
from megatune.training.model_files import with_dtype
from megatune.training.train_state import TrainState
from megatune.verify.reference import load_reference_model

LAYOUTS = {
    **{name: EXPERT_LAYOUTS[name] for name in ("1", "ep2", "pp2")},
    "ep2 etp2 tp2 sp": MORE_EXPERT_LAYOUTS["ep2 etp2 tp2 sp"],
}


@pytest.fixture(scope="module")
def published(model_dir, tmp_path_factory) -> Path:
    return as_published(model_dir("gpt_oss"), tmp_path_factory.mktemp("published") / "model")


def expected(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, in Transformers' own words."""
    found = load_file(folder / "model.safetensors")
    for name in [name for name in found if name.endswith("_blocks")]:
        plain = name.removesuffix("_blocks")
        found[plain] = convert_moe_packed_tensors(found.pop(name), found.pop(f"{plain}_scales"))
    return found


def test_every_number_and_scale_is_theirs():
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16).expand(256, 16, 1, 16).contiguous()
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1, 1).expand(256, 16, 1).contiguous()
    ours = torch.stack([dequantize_mxfp4(*each) for each in zip(blocks, scales, strict=True)])
    theirs = convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(ours.transpose(1, 2).contiguous().view(torch.int16), theirs.view(torch.int16))


def test_transformers_loads_what_we_read(published):
    model = load_reference_model(published, torch.bfloat16)
    loaded = {name: parameter.detach() for name, parameter in model.named_parameters()}
    found = expected(published)
    assert loaded.keys() == found.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in found.items())


def save(model: Path, settings: Settings, folder: Path) -> None:
    assembly = assemble(model, settings)
    for file in CheckpointFiles(assembly, settings, TrainState()):
        file.write(folder)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_read_and_write_their_parts(pool, published, tmp_path, layout):
    chosen = LAYOUTS[layout]
    pool.run(chosen.world_size, save, published, chosen.settings(precision={"bf16": True}), tmp_path)
    found, wanted = tensors(tmp_path), expected(published)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name], tensor), name


def test_a_merged_model_has_no_packed_tensors(published, tmp_path):
    MergedModel(published, []).write(tmp_path, 10**9)
    found, wanted = tensors(tmp_path), expected(published)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    config = json.loads((published / "config.json").read_text())
    assert "quantization_config" not in with_dtype(config, "bfloat16")


def test_parts_of_blocks_are_read(published):
    folder, _ = open_checkpoint(published, load_architecture(published))
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    whole = expected(published)["model.layers.1.mlp.experts.down_proj"][5].T
    for box in (Box(0, 64, 0, 96), Box(3, 9, 24, 48), Box(63, 64, 95, 96), Box(7, 8, 31, 65)):
        assert torch.equal(folder.read_box(name, box), whole[box.first : box.last, box.left : box.right])


def test_scales_of_other_blocks_are_refused(published, tmp_path):
    name = "model.layers.0.mlp.experts.down_proj_scales"
    found = load_file(published / "model.safetensors")
    save_file({**found, name: found[name][:, :, :2].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(MegatuneError) as caught:
        SafetensorsFolder(tmp_path)
    assert caught.value.exit_code == ExitCode.INPUT
    assert "down_proj has blocks [8, 64, 3, 16] and scales [8, 64, 2]" in str(caught.value)
