"""Megatron-Core's checkpoints: written and read bit for bit, and what Megatron-Core itself makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bridging import assert_same_bits, tensors
from model_sizes import MakeModel
from torch.distributed import checkpoint as dcp
from torch_dist_kit import to_mcore

from megatune.bridge.merged_model import MergedModel
from megatune.families import FAMILIES


@pytest.mark.parametrize(("family", "tied"), [*((family, False) for family in FAMILIES), ("qwen3", True)])
def test_there_and_back(family: str, tied: bool, model_dir: MakeModel, tmp_path: Path) -> None:
    model = model_dir(family, tied=tied)
    folder = to_mcore(model, tmp_path / "mcore", max_file_bytes=200_000)
    assert len(list(folder.glob("iter_0000001/*.distcp"))) > 1
    (tmp_path / "hf").mkdir()
    MergedModel(folder, []).write(tmp_path / "hf", 5 * 10**9)
    assert_same_bits(tensors(tmp_path / "hf"), tensors(model))


def test_plain_torch_reads_it(model_dir: MakeModel, tmp_path: Path) -> None:
    """Layers lie in one tensor, a chunk each."""
    folder = to_mcore(model_dir("llama"), tmp_path / "mcore") / "iter_0000001"
    found = {"decoder.layers.mlp.linear_fc2.weight": torch.empty(4, 64, 96)}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    expected = [tensors(model_dir("llama"))[f"model.layers.{layer}.mlp.down_proj.weight"] for layer in range(4)]
    assert torch.equal(found["decoder.layers.mlp.linear_fc2.weight"], torch.stack(expected))
