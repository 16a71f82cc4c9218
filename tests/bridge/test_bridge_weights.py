"""Weights in and out of the engine, bit for bit, in every layout; and checkpoints that are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from bridging import assert_same_bits, resave_weights, tensors
from layouts import LAYOUTS, MORE_EXPERT_LAYOUTS, MORE_LAYOUTS, MORE_SEQUENCE_LAYOUTS
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatune.bridge import assemble as assembling
from megatune.bridge.assemble import assemble, open_checkpoint
from megatune.bridge.safetensors_files import SafetensorsFolder
from megatune.config.settings import Settings
from megatune.engine import groups
from megatune.errors import ExitCode, MegatuneError
from megatune.families import FAMILIES, load_architecture
from megatune.families.table import Box


@pytest.mark.covering
@pytest.mark.parametrize("layout", [*LAYOUTS, "tp4 sp", "pp4"])
@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", True), ("qwen3", False)])
def test_round_trip_keeps_every_bit(pool, model_dir, tmp_path, family, tied, layout):
    """301 rows of vocabulary come back as 301: padding is never saved."""
    model = model_dir(family, tied=tied)
    chosen = {**LAYOUTS, **MORE_LAYOUTS}[layout]
    pool.run(chosen.world_size, resave_weights, model, chosen.settings(), tmp_path, 5 * 10**9)
    assert_same_bits(tensors(tmp_path), tensors(model))


@pytest.mark.parametrize("layout", ["1", "tp2 pp2 dp2 sp", "tp2 pp2 vpp2"])
def test_files_in_and_out(pool, model_dir, tmp_path, layout):
    """A sharded checkpoint in, a sharded one out: ranks write different files, and Transformers loads them."""
    from transformers import AutoModelForCausalLM

    model = model_dir("qwen3", max_shard_size="100KB")
    assert len(list(model.glob("model-*.safetensors"))) > 3
    written = pool.run(LAYOUTS[layout].world_size, resave_weights, model, LAYOUTS[layout].settings(), tmp_path, 100_000)
    assert_same_bits(tensors(tmp_path), tensors(model))

    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{index:05d}-of-{len(files):05d}.safetensors" for index in range(1, len(files) + 1)]
    names = [name for rank in written for name in rank]
    assert sorted(names) == [*files, "model.safetensors.index.json"]
    assert "model.safetensors.index.json" in written[0]
    if layout == "tp2 pp2 dp2 sp":  # both replicas of both stages write, and both tensor-parallel ranks
        assert sum(1 for rank in written if rank) == 8

    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    sizes = {name: tensor.nbytes for name, tensor in tensors(tmp_path).items()}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    for file in files:
        in_file = [name for name, where in index["weight_map"].items() if where == file]
        assert set(in_file) == set(load_file(tmp_path / file))
        # A file is full before another one begins; the engine's fused tensors stay together.
        assert sum(sizes[name] for name in in_file) <= 100_000

    shutil.copy(model / "config.json", tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert_same_bits(dict(loaded.named_parameters()), tensors(model))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits_are_saved_as_they_are(pool, model_dir, tmp_path, precision):
    model = model_dir("qwen2")
    settings = LAYOUTS["tp2"].settings(precision={precision: True})
    pool.run(2, resave_weights, model, settings, tmp_path, 5 * 10**9)
    dtype = getattr(torch, settings.precision.params_dtype)
    assert_same_bits(tensors(tmp_path), {name: tensor.to(dtype) for name, tensor in tensors(model).items()})


def bytes_read_by_each_tensor(model: Path, settings: Settings) -> dict[str, int]:
    """On every rank: how many bytes of each tensor it read."""
    sizes: dict[str, int] = {}
    read = SafetensorsFolder.read_box

    def counted(folder: SafetensorsFolder, name: str, box: Box) -> Tensor:
        values = read(folder, name, box)
        sizes[name] = sizes.get(name, 0) + values.numel() * values.element_size()
        return values

    SafetensorsFolder.read_box = counted
    try:
        assemble(model, settings)
    finally:
        SafetensorsFolder.read_box = read
    return sizes


def test_each_rank_reads_only_what_it_owns(pool, model_dir):
    model = model_dir("llama")
    whole = {name: tensor.nbytes for name, tensor in tensors(model).items()}
    by_rank = pool.run(4, bytes_read_by_each_tensor, model, LAYOUTS["tp2 pp2 vpp2"].settings())
    for name, size in whole.items():
        sizes = [rank[name] for rank in by_rank if name in rank]
        if "norm" in name:
            assert sizes == [size, size], f"{name}: both tensor-parallel ranks of one stage read all of it"
        else:
            assert len(sizes) == 2
            assert sum(sizes) == size, f"{name}: every byte is read once"


def read_together(model: Path, settings: Settings, folder: Path) -> int:
    """On every rank: how many bytes it read. However small, parameters are read together, in blocks; then saved."""
    kept = assembling._MIN_SHARED_READ, assembling._SHARED_READ
    assembling._MIN_SHARED_READ, assembling._SHARED_READ = 1, 1000
    try:
        sizes = bytes_read_by_each_tensor(model, settings)
        groups.destroy_model_parallel()
        resave_weights(model, settings, folder, 5 * 10**9)
    finally:
        assembling._MIN_SHARED_READ, assembling._SHARED_READ = kept
    return sum(sizes.values())


@pytest.mark.covering
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *(("qwen3", layout) for layout in ("dp2", "cp2 dp2", "tp2 pp2 dp2 sp")),
        *(("qwen3_moe", layout) for layout in ("ep2 dp4", "ep2 etp1 tp2 sp pp2 dp2")),
    ],
)
def test_ranks_that_hold_the_same_read_a_part_each(pool, model_dir, tmp_path, family, layout):
    model = model_dir(family)
    chosen = {**LAYOUTS, **MORE_SEQUENCE_LAYOUTS, **MORE_EXPERT_LAYOUTS}[layout]
    found = pool.run(chosen.world_size, read_together, model, chosen.settings(), tmp_path)
    read = tensors(tmp_path)
    assert_same_bits(read, tensors(model))
    whole = sum(tensor.nbytes for tensor in read.values())
    # Norms and the router are whole on every tensor-parallel rank.
    assert whole <= sum(found) < 1.05 * whole
    assert max(found) < 1.4 * whole / chosen.world_size  # a stage may have more than another


# Refusals. None needs an engine.


@pytest.fixture
def copy(model_dir, tmp_path) -> Path:
    """A checkpoint to spoil."""
    folder = tmp_path / "copy"
    shutil.copytree(model_dir("qwen3"), folder)
    return folder


def refusal(folder: Path) -> MegatuneError:
    with pytest.raises(MegatuneError) as raised:
        open_checkpoint(folder, load_architecture(folder))
    assert raised.value.exit_code == ExitCode.INPUT == 66
    return raised.value


def test_missing_unknown_and_misshapen_tensors_are_all_named(copy):
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(96)
    weights["model.norm.weight"] = torch.zeros(65)
    save_file(weights, copy / "model.safetensors")
    error = refusal(copy)
    assert len(error.findings) == 3
    assert "1 keys are missing: model.layers.2.mlp.up_proj.weight" in str(error)
    assert "1 keys are unknown: model.layers.0.self_attn.q_proj.bias" in str(error)
    assert "model.norm.weight is [65], but config.json requires [64]" in str(error)


def test_many_keys_are_counted_and_some_named(copy):
    weights = load_file(copy / "model.safetensors")
    save_file({name: tensor for name, tensor in weights.items() if "mlp" not in name}, copy / "model.safetensors")
    assert "12 keys are missing: model.layers.0.mlp.down_proj.weight" in str(refusal(copy))
    assert "and 7 more" in str(refusal(copy))


def test_output_layer_beside_tied_embeddings_is_their_copy(model_dir, tmp_path):
    """Published checkpoints have it. Transformers also saves one that differs, whatever config.json says."""
    shutil.copytree(model_dir("qwen2", tied=True), tmp_path / "copy")
    weights = load_file(tmp_path / "copy" / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "copy" / "model.safetensors")
    open_checkpoint(tmp_path / "copy", load_architecture(tmp_path / "copy"))
    weights["lm_head.weight"][3] += 1
    save_file(weights, tmp_path / "copy" / "model.safetensors")
    assert "lm_head.weight differs from model.embed_tokens.weight" in str(refusal(tmp_path / "copy"))


def test_tensors_of_other_dtypes_are_refused(copy):
    """Integers would be cast to weights without a word."""
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(64, dtype=torch.int64)
    save_file(weights, copy / "model.safetensors")
    assert "model.norm.weight is I64" in str(refusal(copy))


def test_pickles_are_refused(copy):
    (copy / "model.safetensors").unlink()
    torch.save({}, copy / "pytorch_model.bin")
    error = refusal(copy)
    assert "there is no model.safetensors" in str(error)
    assert "pytorch_model.bin is a pickle" in str(error)


def test_truncated_file_is_refused(copy):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "the file is damaged or truncated" in str(refusal(copy))


def test_truncated_shard_is_refused(model_dir, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(model_dir("qwen3", max_shard_size="100KB"), folder)
    path = sorted(folder.glob("model-*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:50])
    assert path.name in str(refusal(folder))


def test_missing_shard_is_named(model_dir, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(model_dir("qwen3", max_shard_size="100KB"), folder)
    path = sorted(folder.glob("model-*.safetensors"))[0]
    path.unlink()
    assert f"weight files are missing: {path.name}" in str(refusal(folder))


def test_index_that_is_none_is_refused(copy):
    (copy / "model.safetensors.index.json").write_text("{}")
    assert "is not an index of weights" in str(refusal(copy))


def test_every_tensor_of_a_checkpoint_is_accounted_for(model_dir):
    for family in FAMILIES:
        for tied in (False, True):
            folder = model_dir(family, tied=tied)
            open_checkpoint(folder, load_architecture(folder))
            with safe_open(folder / "model.safetensors", "pt") as file:
                assert SafetensorsFolder(folder).names() == set(file.keys())
