"""Checkpoints in blocks of fp8 are read in bf16, bit for bit as Transformers dequantizes them, whatever part a rank
holds, and written in bf16."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from bridging import tensors
from layouts import EXPERT_LAYOUTS, MORE_EXPERT_LAYOUTS
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from megatune.bridge.assemble import assemble
from megatune.bridge.block_formats import dequantize_fp8
from megatune.bridge.merged_model import MergedModel
from megatune.bridge.safetensors_files import SafetensorsFolder
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.settings import Settings
from megatune.errors import ExitCode, MegatuneError
from megatune.families import load_architecture
from megatune.families.table import Box, whole_box
from megatune.training.checkpoint import CheckpointFiles
from megatune.training.conversion import merge_adapters
from megatune.training.train_state import TrainState
from megatune.verify.checkpoints import write_random_adapter

LAYOUTS = {**EXPERT_LAYOUTS, **MORE_EXPERT_LAYOUTS}
CHOSEN = ("ep2", "ep2 etp2 tp2 sp")
# Wider than a block, and not made of whole ones: those at the edges are cut short, and cuts go through blocks.
SIZES = {"hidden_size": 144, "intermediate_size": 200, "moe_intermediate_size": 136, "num_hidden_layers": 2}


def as_published(model: Path, folder: Path) -> Path:
    """Copy a model with the matrices of its layers, but for the router, in random fp8."""
    shutil.copytree(model, folder)
    generator = torch.Generator().manual_seed(5)
    found = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name in [name for name in found if name.endswith("proj.weight") or "kv_a_proj" in name]:
        rows, columns = found[name].shape
        values = torch.randn(rows, columns, generator=generator)
        found[name] = values.to(torch.float8_e4m3fn)
        scales = torch.rand(-(-rows // 128), -(-columns // 128), generator=generator)
        found[f"{name}_scale_inv"] = scales / 10 + 1e-3
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return folder


@pytest.fixture(scope="module")
def published(model_dir, tmp_path_factory) -> Path:
    return as_published(model_dir("kimi_k2", **SIZES), tmp_path_factory.mktemp("published") / "model")


def expected(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint; each scale is spread over its block."""
    found = load_file(folder / "model.safetensors")
    for name in [name for name in found if name.endswith("_scale_inv")]:
        plain = name.removesuffix("_scale_inv")
        rows, columns = found[plain].shape
        spread = found.pop(name).repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        found[plain] = (found[plain].float() * spread).bfloat16()
    return found


def test_every_number_is_transformers():
    """Of whole blocks; Transformers refuses matrices that have others. All 256 numbers, nan included."""
    values = torch.arange(256, dtype=torch.uint8).repeat(256, 2).view(256, 512).view(torch.float8_e4m3fn)
    scales = torch.rand(2, 4, generator=torch.Generator().manual_seed(7))
    ours = dequantize_fp8(values, scales, whole_box((256, 512)))
    theirs = Fp8Dequantize(None)._dequantize_one(values, scales, torch.bfloat16)
    assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


@pytest.mark.parametrize("layout", CHOSEN)
def test_ranks_read_and_write_their_parts(pool, published, tmp_path, layout):
    chosen = LAYOUTS[layout]
    pool.run(chosen.world_size, save, published, chosen.settings(precision={"bf16": True}), tmp_path)
    found, wanted = tensors(tmp_path), expected(published)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == torch.bfloat16 or name.endswith("e_score_correction_bias"), name
        assert torch.equal(found[name].bfloat16(), tensor), name


def save(model: Path, settings: Settings, folder: Path) -> None:
    assembly = assemble(model, settings)
    for file in CheckpointFiles(assembly, settings, TrainState()):
        file.write(folder)


def test_a_merged_model_has_no_scales(published, tmp_path):
    MergedModel(published, []).write(tmp_path, 10**9)
    found, wanted = tensors(tmp_path), expected(published)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_model_that_an_adapter_is_merged_into_is_no_longer_quantized(published, tmp_path):
    selection = FinetuningSettings(finetuning_type="lora", lora_target=["o_proj"])
    (tmp_path / "adapter").mkdir()
    write_random_adapter(tmp_path / "adapter", published, load_architecture(published), selection, 1)
    merge_adapters(published, [tmp_path / "adapter"], tmp_path / "merged")
    config = json.loads((tmp_path / "merged/config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config


def test_parts_of_blocks_are_read(published):
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    folder, whole = SafetensorsFolder(published), expected(published)[name]
    for box in (Box(0, 144, 0, 136), Box(3, 130, 120, 136), Box(127, 129, 127, 129), Box(143, 144, 5, 6)):
        assert torch.equal(folder.read_box(name, box), whole[box.first : box.last, box.left : box.right])


def test_scales_of_other_blocks_are_refused(published, tmp_path):
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"
    found = load_file(published / "model.safetensors")
    save_file({**found, name: found[name][:, :1].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(MegatuneError) as caught:
        SafetensorsFolder(tmp_path)
    assert caught.value.exit_code == ExitCode.INPUT
    assert "kv_a_proj_with_mqa.weight is F8_E4M3 [28, 144] and its scales [1, 1]" in str(caught.value)


@pytest.mark.parametrize("blocks", [None, [64, 64]])
def test_other_blocks_are_refused_by_config(published, tmp_path, blocks):
    config = json.loads((published / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = blocks
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(MegatuneError, match="fp8 with weight_block_size") as caught:
        load_architecture(tmp_path)
    assert caught.value.exit_code == ExitCode.INPUT
