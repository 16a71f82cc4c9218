"""Megatron-Core's checkpoints: written and read bit for bit, and what Megatron-Core itself makes of them."""

from __future__ import annotations

import math
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from bridging import assert_same_bits, tensors
from model_sizes import MakeModel
from pool import RankPool
from torch.distributed import checkpoint as dcp
from torch_dist_kit import to_mcore

from megatune.bridge.assemble import load_model, open_checkpoint
from megatune.bridge.merged_model import MergedModel
from megatune.bridge.torch_dist import source
from megatune.bridge.torch_dist.export import TorchDistFiles
from megatune.bridge.torch_dist.table import Chunk, read_table
from megatune.config.settings import Settings
from megatune.engine.groups import build
from megatune.errors import MegatuneError, with_article
from megatune.families import FAMILIES, load_architecture
from megatune.families.table import Box, rows_of, whole_box
from megatune.families.weights import Slice, engine_shape, layers_of

# Megatron-Core has no layers whose heads have two sizes.
REFUSED = ("gemma4", "gemma4_text")


@pytest.mark.parametrize("family", REFUSED)
def test_heads_of_two_sizes_are_refused(family: str, model_dir: MakeModel, tmp_path: Path) -> None:
    with pytest.raises(MegatuneError, match="neither be read nor written in Megatron-Core's torch_dist format"):
        to_mcore(model_dir(family), tmp_path / "mcore")
    # Nor are weights that somebody else has written: a run that starts from them ends before it reads any.
    folder = to_mcore(model_dir("llama"), tmp_path / "other")
    shutil.copy(model_dir(family) / "config.json", folder)
    with pytest.raises(MegatuneError, match=f"{with_article(family)} can neither be read nor written in Megatron-Core"):
        open_checkpoint(folder, load_architecture(folder))


@pytest.mark.parametrize(
    ("family", "tied"), [*((family, False) for family in FAMILIES if family not in REFUSED), ("qwen3", True)]
)
def test_there_and_back(family: str, tied: bool, model_dir: MakeModel, tmp_path: Path) -> None:
    model = model_dir(family, tied=tied)
    folder = to_mcore(model, tmp_path / "mcore", max_file_bytes=200_000)
    assert len(list(folder.glob("iter_0000001/*.distcp"))) > 1
    (tmp_path / "hf").mkdir()
    MergedModel(folder, []).write(tmp_path / "hf", 5 * 10**9)
    written = tensors(tmp_path / "hf")
    if family == "gemma3":  # by the names of the published files, which Transformers reads, too
        written = {name.replace("vision_tower.vision_model.", "vision_tower."): each for name, each in written.items()}
    assert_same_bits(written, tensors(model))


def test_a_rank_may_read_no_rows(model_dir: MakeModel, tmp_path: Path) -> None:
    """As the last of many replicas does that share the rows of a matrix."""
    model = model_dir("qwen3_next")
    folder, _ = open_checkpoint(to_mcore(model, tmp_path / "mcore"), load_architecture(model))
    for name, shape in folder.shapes.items():
        assert folder.read_box(name, Box(1, 1, 0, whole_box(shape).right)).shape == (0, whole_box(shape).right)


def test_a_rank_reads_every_chunk_once(model_dir: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its rows alternate between tensors, as those of a gated delta net do."""
    architecture, rank = load_architecture(model_dir("qwen3_next")), Slice(tp_size=2, tp_rank=1)
    folder, _ = open_checkpoint(to_mcore(model_dir("qwen3_next"), tmp_path / "mcore"), architecture)
    read, load = list[Chunk](), source._load

    def noted(chunk: Chunk, *rest: Any) -> torch.Tensor:
        read.append(chunk)
        return load(chunk, *rest)

    monkeypatch.setattr(source, "_load", noted)
    for weight in FAMILIES["qwen3_next"].weight_map(architecture):
        for layer in layers_of(weight, architecture):
            target = torch.empty(math.prod(engine_shape(weight, architecture, rank)))
            folder.fill(target, rows_of(weight, architecture, rank, layer))
    assert read
    assert len(set(read)) == len(read)


def test_gates_and_ups_that_alternate_are_apart_in_megatrons(model_dir: MakeModel, tmp_path: Path) -> None:
    """Files of gpt-oss have a gate, its up, the next gate; Megatron-Core has all gates first, of biases, too."""
    model = model_dir("gpt_oss")
    folder, files = to_mcore(model, tmp_path / "mcore") / "iter_0000001", tensors(model)
    key = "decoder.layers.mlp.experts.experts.linear_fc1"
    found = {f"{key}.weight": torch.empty(4, 8, 192, 64), f"{key}.bias": torch.empty(4, 8, 192)}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    expected = files[name].transpose(1, 2)
    assert torch.equal(found[f"{key}.weight"][1, :, :96], expected[:, ::2])
    assert torch.equal(found[f"{key}.weight"][1, :, 96:], expected[:, 1::2])
    assert torch.equal(found[f"{key}.bias"][1, :, 96:], files[f"{name}_bias"][:, 1::2])


def test_plain_torch_reads_it(model_dir: MakeModel, tmp_path: Path) -> None:
    """Layers lie in one tensor, a chunk each."""
    folder = to_mcore(model_dir("llama"), tmp_path / "mcore") / "iter_0000001"
    found = {"decoder.layers.mlp.linear_fc2.weight": torch.empty(4, 64, 96)}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    expected = [tensors(model_dir("llama"))[f"model.layers.{layer}.mlp.down_proj.weight"] for layer in range(4)]
    assert torch.equal(found["decoder.layers.mlp.linear_fc2.weight"], torch.stack(expected))


def test_what_plain_torch_writes(model_dir: MakeModel, tmp_path: Path) -> None:
    """A chunk for each tensor, and matrices column by column, as strides may have it."""
    folder = to_mcore(model_dir("llama"), tmp_path / "mcore") / "iter_0000001"
    found = {name: torch.empty(stored.shape) for name, stored in read_table(folder).items()}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    turned = {name: each.mT.contiguous().mT if each.dim() > 1 else each for name, each in found.items()}
    shutil.rmtree(folder)
    dcp.save(turned, checkpoint_id=folder, no_dist=True)
    (tmp_path / "hf").mkdir()
    MergedModel(tmp_path / "mcore", []).write(tmp_path / "hf", 5 * 10**9)
    assert_same_bits(tensors(tmp_path / "hf"), tensors(model_dir("llama")))


def test_a_chunk_is_written_without_what_it_is_a_view_of(tmp_path: Path) -> None:
    files, whole = TorchDistFiles(tmp_path, 10**9), torch.zeros(1000, 100)
    files.add("rows", (1, 100), (0, 0), whole[:1])
    files.close({}, 1)
    assert (tmp_path / "__0_0.distcp").stat().st_size < 10_000


def one_in_rows(folder: Path, name: str) -> None:
    """Write a tensor anew, each row of it a chunk by itself."""
    files = TorchDistFiles(folder / "new", 10**9)
    (folder / "new").mkdir()
    whole = torch.empty(torch.Size(read_table(folder)[name].shape))
    dcp.load({name: whole}, checkpoint_id=folder, no_dist=True)
    for row in range(len(whole)):
        files.add(name, tuple(whole.shape), (row, *(0 for _ in whole.shape[1:])), whole[row : row + 1])
    files.close({}, 1)
    (folder / "new/__0_0.distcp").rename(folder / "__7_0.distcp")
    tables = [pickle.loads((each / ".metadata").read_bytes()) for each in (folder, folder / "new")]
    tables[0].state_dict_metadata |= tables[1].state_dict_metadata
    kept = {index: info for index, info in tables[0].storage_data.items() if index.fqn != name}
    for info in tables[1].storage_data.values():
        info.relative_path = "__7_0.distcp"
    tables[0].storage_data = kept | tables[1].storage_data
    (folder / ".metadata").write_bytes(pickle.dumps(tables[0]))


def load_in_ranks(model: Path, settings: Settings) -> list[bytes]:
    """On every rank: the bits of its parameters."""
    loaded = load_model(model, settings, build(settings.parallel, seed=0, timeout=60), trained=False)
    return [local.parameter.data.numpy().tobytes() for local in loaded.parameters]


@pytest.mark.parametrize(
    ("family", "ranks", "parallel"),
    [
        ("qwen3", 4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
        ("deepseek_v3", 2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        ("mixtral", 2, {"expert_model_parallel_size": 2}),
        ("qwen3_vl_moe", 2, {"pipeline_model_parallel_size": 2}),
    ],
)
def test_ranks_read_what_they_read_of_hugging_face(
    pool: RankPool, model_dir: MakeModel, tmp_path: Path, family: str, ranks: int, parallel: dict[str, int]
) -> None:
    model, settings = model_dir(family), Settings.model_validate({"parallel": parallel})
    folder = to_mcore(model, tmp_path / "mcore")
    if family == "qwen3":
        one_in_rows(folder / "iter_0000001", "embedding.word_embeddings.weight")
    expected, found = (pool.run(ranks, load_in_ranks, each, settings) for each in (model, folder))
    assert found == expected
    assert all(expected)
