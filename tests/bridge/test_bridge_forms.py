"""Checkpoints whose files name or arrange tensors otherwise than the weight map: read, and written as they were."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from bridging import assert_same_bits, resave_weights, tensors
from layouts import EXPERT_LAYOUTS, LAYOUTS, MORE_EXPERT_LAYOUTS
from safetensors.torch import load_file, save_file

from megatune.bridge.assemble import load_model, open_checkpoint
from megatune.bridge.export import export_weights
from megatune.config.settings import Settings
from megatune.engine.groups import build
from megatune.families import FAMILIES, load_architecture
from megatune.families.forms import find_form

ALL = LAYOUTS | EXPERT_LAYOUTS | MORE_EXPERT_LAYOUTS
FUSED = ("experts.gate_up_proj", "experts.down_proj")


def transposed(model: Path, folder: Path) -> Path:
    """The checkpoint as the hub has it: experts' matrices the other way around, saved by Transformers 4."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    weights = {
        name: tensor.transpose(1, 2).contiguous() if name.endswith(FUSED) else tensor
        for name, tensor in weights.items()
    }
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_version": "4.57.0"}))
    return folder


def with_module_names(model: Path, folder: Path) -> Path:
    """The checkpoint as some trainers save it."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    renamed = {
        f"model.{name}" if name.startswith("visual.") else name.replace("model.", "model.language_model."): tensor
        for name, tensor in weights.items()
    }
    assert len(renamed) == len(weights)
    save_file(renamed, folder / "model.safetensors")
    return folder


@pytest.mark.covering
@pytest.mark.parametrize("layout", ["1", "tp2 sp", "ep2 etp1 tp2 sp", "ep2 pp2", "ep2 etp2 tp2 sp", "etp1 tp2 sp"])
@pytest.mark.parametrize("from_hub", [True, False])
def test_experts_in_one_tensor(layout: str, from_hub: bool, model_dir, pool, tmp_path) -> None:
    model = model_dir("qwen3_vl_moe")
    if from_hub:
        model = transposed(model, tmp_path / "hub")
    folder = tmp_path / "saved"
    folder.mkdir()
    pool.run(ALL[layout].world_size, resave_weights, model, ALL[layout].settings(), folder, 5 * 10**9)
    assert_same_bits(tensors(folder), tensors(model))


def test_experts_in_one_tensor_fill_files(model_dir, pool, tmp_path) -> None:
    """Those of a layer are in one file, however small files are to be."""
    model, folder = model_dir("qwen3_vl_moe"), tmp_path / "saved"
    folder.mkdir()
    pool.run(2, resave_weights, model, ALL["ep2"].settings(), folder, 20_000)
    assert len(list(folder.glob("model-*.safetensors"))) > 10
    assert_same_bits(tensors(folder), tensors(model))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("layout", ["1", "tp2 pp2 vpp2"])
def test_names_from_before_modules(family: str, layout: str, model_dir, pool, tmp_path) -> None:
    model = model_dir(family)
    assert any(name.startswith("visual.") for name in tensors(model))
    for index, checkpoint in enumerate((model, with_module_names(model, tmp_path / "renamed"))):
        folder = tmp_path / f"saved-{index}"
        folder.mkdir()
        pool.run(ALL[layout].world_size, resave_weights, checkpoint, ALL[layout].settings(), folder, 5 * 10**9)
        assert_same_bits(tensors(folder), tensors(checkpoint))


def exported(model: Path, settings: Settings) -> dict[str, torch.Tensor]:
    """On every rank."""
    coords = build(settings.parallel, seed=0, timeout=30)
    return dict(export_weights(load_model(model, settings, coords), [0]))


@pytest.mark.parametrize(("family", "layout"), [("qwen3_vl_moe", "ep2 etp1 tp2 sp"), ("qwen2_vl", "pp2")])
def test_a_stream_of_weights_is_as_the_checkpoint(family: str, layout: str, model_dir, pool, tmp_path) -> None:
    model = model_dir(family)
    first, *_ = pool.run(ALL[layout].world_size, exported, model, ALL[layout].settings())
    assert_same_bits(first, tensors(model))


@pytest.mark.parametrize(("version", "is_transposed"), [("4.57.0", True), ("5.17.0", False), (None, True)])
def test_square_matrices_are_told_by_the_version(version: str | None, is_transposed: bool, model_dir, tmp_path) -> None:
    model = model_dir("qwen3_vl_moe", moe_intermediate_size=64, hidden_size=64)
    folder = tmp_path / "copy"
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    weights = {name: tensor for name, tensor in weights.items() if "gate_up_proj" not in name}
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["transformers_version"] = version
    (folder / "config.json").write_text(json.dumps(config))
    architecture = load_architecture(folder)
    family = FAMILIES["qwen3_vl_moe"]
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    form = find_form(
        family.forms, family.weight_map(architecture), architecture, shapes, shapes.__getitem__, version or ""
    )
    assert form.transposed is is_transposed


def test_a_tensor_that_is_missing_is_named_as_files_have_it(model_dir, tmp_path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(model_dir("qwen2_vl"), folder)
    weights = load_file(folder / "model.safetensors")
    del weights["visual.merger.ln_q.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(Exception, match=r"1 keys are missing: visual\.merger\.ln_q\.weight"):
        open_checkpoint(folder, load_architecture(folder))
