"""Merged models: W + s · B · A to one rounding, in the checkpoint's own names, arrangement, dtypes and files."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from adapter_kit import (
    MLP,
    QKVO,
    Tensors,
    all_tensors,
    assert_same_numbers,
    load,
    logits,
    lora,
    peft_adapter,
    random_adapter,
    with_adapter,
)
from bridging import tensors
from model_sizes import MakeModel
from safetensors.torch import load_file, save_file

from megatune.bridge import merged_model
from megatune.bridge.adapter_files import MergedFolder, open_adapter, write_adapter, write_adapter_config
from megatune.bridge.assemble import open_checkpoint
from megatune.bridge.merged_model import MergedModel
from megatune.families import FAMILIES, load_architecture
from megatune.families.table import Box, whole_box


def merge(model: Path, adapters: list[Path], out: Path, max_file_bytes: int = 5 * 10**9) -> merged_model.Merged:
    out.mkdir()
    shutil.copyfile(model / "config.json", out / "config.json")
    return MergedModel(model, adapters).write(out, max_file_bytes)


def new_adapter(model: Path, folder: Path, **changes: object) -> Path:
    architecture, selection = load_architecture(model), lora(**changes)
    folder.mkdir()
    values = Tensors(random_adapter(architecture, selection))
    write_adapter(folder / "adapter_model.safetensors", values, architecture, selection)
    write_adapter_config(folder, architecture, selection, str(model))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_model_computes_what_peft_does(family: str, model_dir: MakeModel, tmp_path: Path) -> None:
    model = model_dir(family)
    adapter = new_adapter(model, tmp_path / "adapter")
    merged = merge(model, [adapter], tmp_path / "merged")
    before, after = tensors(model), tensors(tmp_path / "merged")
    assert before.keys() == after.keys()
    assert {name: (each.shape, each.dtype) for name, each in before.items()} == {
        name: (each.shape, each.dtype) for name, each in after.items()
    }
    changed = [name for name, each in before.items() if not torch.equal(after[name], each)]
    assert (merged.num_tensors, merged.num_changed) == (len(before), len(changed))
    assert_same_numbers(logits(load(tmp_path / "merged")), logits(with_adapter(model, adapter)), 5e-5)


def test_experts_that_files_have_transposed(model_dir: MakeModel, tmp_path: Path) -> None:
    """Published checkpoints of Qwen3-VL-MoE."""
    model, published = model_dir("qwen3_vl_moe"), tmp_path / "published"
    shutil.copytree(model, published)
    turned = {
        name: tensor.transpose(1, 2).contiguous() if tensor.dim() == 3 else tensor
        for name, tensor in load_file(model / "model.safetensors").items()
    }
    save_file(turned, published / "model.safetensors")
    adapter = new_adapter(model, tmp_path / "adapter")
    merge(model, [adapter], tmp_path / "one")
    merge(published, [adapter], tmp_path / "other")
    one, other = tensors(tmp_path / "one"), tensors(tmp_path / "other")
    assert [name for name, tensor in one.items() if tensor.dim() == 3]
    for name, tensor in one.items():
        assert torch.equal(other[name].transpose(1, 2) if tensor.dim() == 3 else other[name], tensor), name


def test_merging_is_exact_to_one_rounding(model_dir: MakeModel, tmp_path: Path) -> None:
    """Of two adapters, one after the other: in fp32 as in double precision, in bf16 what is nearest to that."""
    model, half = model_dir("qwen3"), tmp_path / "half"
    shutil.copytree(model, half)
    save_file({name: each.bfloat16() for name, each in tensors(model).items()}, half / "model.safetensors")
    first = new_adapter(model, tmp_path / "first")
    peft_adapter(model, tmp_path / "second", target_modules=QKVO + MLP, use_rslora=True)
    adapters = [first, tmp_path / "second"]
    scalings = [3.0, 6.0]
    merge(model, adapters, tmp_path / "single")
    merge(half, adapters, tmp_path / "bf16")
    prefix = "base_model.model."
    for base, found in ((tensors(model), tensors(tmp_path / "single")), (tensors(half), tensors(tmp_path / "bf16"))):
        for name, weight in base.items():
            exact, path = weight.double(), prefix + name.removesuffix("weight")
            for folder, scaling in zip(adapters, scalings, strict=True):
                parts = load_file(folder / "adapter_model.safetensors")
                if f"{path}lora_A.weight" in parts:
                    a, b = (parts[f"{path}lora_{each}.weight"].double() for each in "AB")
                    exact = exact + scaling * b @ a
            assert found[name].dtype == weight.dtype
            error, bound = (found[name].double() - exact).abs(), 4 * 2.0**-23 * exact.abs().max()
            if found[name].dtype == torch.bfloat16:
                assert (found[name] == exact.bfloat16()).double().mean() > 0.999  # else fp32 could not tell
                assert (error <= 2.0**-8 * exact.abs() + bound).all(), name
            else:
                assert (error <= bound).all(), name


def test_a_chain_of_decomposed_adapters_and_whole_modules(model_dir: MakeModel, tmp_path: Path) -> None:
    """Each adapter is beside what those before it made of the model."""
    model = model_dir("qwen3")
    whole = {"additional_target": ["embed_tokens"]}
    chain = [new_adapter(model, tmp_path / str(index), use_dora=True, **whole) for index in (0, 1)]
    merge(model, chain[:1], tmp_path / "a")
    merge(tmp_path / "a", chain[1:], tmp_path / "b")
    merge(model, chain, tmp_path / "both")
    step_by_step, together = tensors(tmp_path / "b"), tensors(tmp_path / "both")
    for name, tensor in step_by_step.items():
        assert_same_numbers(together[name], tensor)
    name = "model.layers.0.self_attn.q_proj.weight"
    lengths = load_file(chain[1] / "adapter_model.safetensors")[
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"
    ]
    assert_same_numbers(together[name].norm(dim=1), lengths)
    embedding = load_file(chain[1] / "adapter_model.safetensors")["base_model.model.model.embed_tokens.weight"]
    assert torch.equal(together["model.embed_tokens.weight"], embedding)


def test_slices_are_those_of_the_whole(model_dir: MakeModel, tmp_path: Path) -> None:
    """As ranks read them; columns of decomposed matrices need the lengths of whole rows."""
    model = model_dir("qwen3_moe")
    architecture = load_architecture(model)
    adapter = new_adapter(model, tmp_path / "adapter", use_dora=True, lora_target=["self_attn.q_proj", "o_proj"])
    merged = MergedFolder(open_checkpoint(model, architecture)[0], open_adapter(adapter, architecture))
    for name, shape in all_tensors(architecture):
        whole = merged.whole(name).view(whole_box(shape).shape)
        boxes = [whole_box(shape)._replace(first=1, last=shape[0] - 1)]
        boxes += [Box(0, shape[0], 3, shape[1] // 2)] if len(shape) == 2 else []
        for box in boxes:
            assert_same_numbers(merged.read_box(name, box), whole[box.slices])


def test_files_are_as_large_as_asked(model_dir: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors are read and written a few rows at a time."""
    model = model_dir("qwen3", max_shard_size="100KB")
    adapter = new_adapter(model, tmp_path / "adapter")
    merge(model, [adapter], tmp_path / "whole")
    monkeypatch.setattr(merged_model, "_PART", 1000)
    merged = merge(model, [adapter], tmp_path / "parts", max_file_bytes=200_000)
    assert not (tmp_path / "whole/model.safetensors.index.json").exists()
    files = sorted((tmp_path / "parts").glob("*.safetensors"))
    assert [path.name for path in files] == [
        f"model-{index + 1:05d}-of-{merged.num_files:05d}.safetensors" for index in range(merged.num_files)
    ]
    assert merged.num_files > 2
    assert all(path.stat().st_size < 200_000 + 4096 for path in files)
    one, other = tensors(tmp_path / "whole"), tensors(tmp_path / "parts")
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert_same_numbers(other[name], tensor)
    index = json.loads((tmp_path / "parts/model.safetensors.index.json").read_text())
    assert (
        index["metadata"]["total_size"] == merged.num_bytes == sum(4 * math.prod(each.shape) for each in one.values())
    )
    assert index["weight_map"].keys() == one.keys()
    assert_same_numbers(logits(load(tmp_path / "parts")), logits(load(tmp_path / "whole")), 1e-5)


def test_a_tied_model_stays_tied(model_dir: MakeModel, tmp_path: Path) -> None:
    """Though its files carry an output layer."""
    model = tmp_path / "model"
    shutil.copytree(model_dir("qwen3", tied=True), model)
    held = load_file(model / "model.safetensors")
    save_file(held | {"lm_head.weight": held["model.embed_tokens.weight"].clone()}, model / "model.safetensors")
    adapter = new_adapter(model, tmp_path / "adapter", additional_target=["embed_tokens"])
    merge(model, [adapter], tmp_path / "merged")
    assert "lm_head.weight" not in tensors(tmp_path / "merged")
    assert_same_numbers(logits(load(tmp_path / "merged")), logits(with_adapter(model, adapter)), 5e-5)


def test_a_tied_vision_model_stays_tied(model_dir: MakeModel, tmp_path: Path) -> None:
    """Though its files carry an output layer by the name that it has there."""
    model = tmp_path / "model"
    shutil.copytree(model_dir("gemma3", tied=True), model)
    held = load_file(model / "model.safetensors")
    words = held["language_model.model.embed_tokens.weight"].clone()
    save_file(held | {"language_model.lm_head.weight": words}, model / "model.safetensors")
    merge(model, [new_adapter(model, tmp_path / "adapter", additional_target=["embed_tokens"])], tmp_path / "merged")
    assert tensors(tmp_path / "merged").keys() == held.keys()
