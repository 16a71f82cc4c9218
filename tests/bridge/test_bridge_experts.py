"""Experts and latent attention in and out of the engine, bit for bit, in every layout; and refused checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from bridging import assert_same_bits, move, resave_weights, tensors
from layouts import EXPERT_LAYOUTS, MORE_EXPERT_LAYOUTS
from safetensors.torch import load_file, save_file

from megatune.bridge.assemble import open_checkpoint
from megatune.errors import MegatuneError
from megatune.families import load_architecture

ALL = {**EXPERT_LAYOUTS, **MORE_EXPERT_LAYOUTS}


CUTTING = ("ep2 etp2 tp2 sp", "ep2 etp1 tp2 sp pp2 dp2", "cp2 ep2 tp2 sp etp1 pp2, packed")
# Families with unlike tensors go through all, the others through those that cut most.
ROUND_TRIPS = {
    "qwen3_moe": (*CUTTING, "1", "pp2", "ep2", "etp2", "ep2 etp1 tp2 sp", "etp1 tp2 sp", "ep4 dp4", "ep2 dp4",
                  "ep2 pp2 vpp2"),
    "deepseek_v3": (*CUTTING, "1", "pp2", "ep2", "ep2 etp1 tp2 sp", "ep2 pp2 vpp2"),
    "qwen2_moe": CUTTING,
    "mixtral": CUTTING,
}  # fmt: skip


@pytest.mark.covering
@pytest.mark.parametrize(
    ("family", "layout"), [(family, layout) for family, layouts in ROUND_TRIPS.items() for layout in layouts]
)
def test_round_trip_keeps_every_bit(pool, model_dir, tmp_path, family, layout):
    model = model_dir(family)
    pool.run(ALL[layout].world_size, resave_weights, model, ALL[layout].settings(), tmp_path, 5 * 10**9)
    assert_same_bits(tensors(tmp_path), tensors(model))


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        ("ep2 pp2", {"q_lora_rank": None}),
        ("ep2 pp2", {"first_k_dense_replace": 2}),  # no experts on the first stage
        ("pp2", {"first_k_dense_replace": 4}),  # nor on any
    ],
)
def test_other_members_of_deepseek_v3(pool, model_dir, tmp_path, layout, sizes):
    model = model_dir("deepseek_v3", tied=True, **sizes)
    pool.run(ALL[layout].world_size, resave_weights, model, ALL[layout].settings(), tmp_path, 5 * 10**9)
    assert_same_bits(tensors(tmp_path), tensors(model))


@pytest.mark.parametrize("layout", ["ep2 etp1 tp2 sp pp2 dp2", "ep2 dp4", "ep2 etp2 tp2 sp"])
def test_every_rank_writes_its_experts(pool, model_dir, tmp_path, layout):
    """A sharded checkpoint in, a sharded one out, which Transformers loads."""
    from transformers import AutoModelForCausalLM

    model = model_dir("qwen3_moe", max_shard_size="100KB")
    written = pool.run(ALL[layout].world_size, resave_weights, model, ALL[layout].settings(), tmp_path, 40_000)
    assert_same_bits(tensors(tmp_path), tensors(model))
    assert all(any(name.startswith("model-") for name in rank) for rank in written)

    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{index:05d}-of-{len(files):05d}.safetensors" for index in range(1, len(files) + 1)]
    assert sorted(name for rank in written for name in rank) == [*files, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file in files for name in load_file(tmp_path / file)}

    shutil.copy(model / "config.json", tmp_path)
    expected, found = (AutoModelForCausalLM.from_pretrained(folder, dtype="auto") for folder in (model, tmp_path))
    assert_same_bits(found.state_dict(), expected.state_dict())


def test_experts_of_one_layer_go_into_several_files(pool, model_dir, tmp_path):
    """A file is full before another one begins, however large the engine's tensor of all experts is."""
    model = model_dir("qwen3_moe")
    pool.run(
        1, resave_weights, model, ALL["1"].settings(), tmp_path, 80_000
    )  # an expert has 30 KB, the word embedding 77
    sizes = [sum(tensor.nbytes for tensor in load_file(file).values()) for file in tmp_path.glob("*.safetensors")]
    assert max(sizes) <= 80_000
    assert_same_bits(tensors(tmp_path), tensors(model))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_bias_of_the_router_stays_fp32(pool, model_dir, tmp_path, precision):
    model = model_dir("deepseek_v3")
    settings = ALL["ep2"].settings(precision={precision: True})
    pool.run(2, resave_weights, model, settings, tmp_path, 5 * 10**9)
    dtype = getattr(torch, settings.precision.params_dtype)
    expected = {
        name: tensor if name.endswith("e_score_correction_bias") else tensor.to(dtype)
        for name, tensor in tensors(model).items()
    }
    found = tensors(tmp_path)
    assert_same_bits(found, expected)
    assert {name: tensor.dtype for name, tensor in found.items()} == {n: t.dtype for n, t in expected.items()}


@pytest.mark.covering
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("family", "one", "other"),
    [
        ("qwen2_moe", "1", "ep2 etp1 tp2 sp pp2 dp2"),
        ("qwen3_moe", "ep2 dp4", "etp2"),
        ("qwen3_moe", "ep2 dp2, no distributed optimizer", "ep4 dp4"),
        ("mixtral", "ep2 etp2 tp2 sp", "ep2 pp2 vpp2"),
        ("deepseek_v3", "ep2 etp1 tp2 sp pp2 dp2", "1"),
        ("deepseek_v3", "cp2 ep2, packed", "ep4 dp4"),
    ],
)
def test_state_moves_between_layouts_bit_for_bit(pool, model_dir, tmp_path, family, one, other, precision):
    settings = {"precision": {} if precision == "fp32" else {precision: True}}
    model = model_dir(family)
    saved, moved = move(pool, model, ALL[one], ALL[other], tmp_path, **settings)
    trained = {name for name in tensors(model) if not name.endswith("e_score_correction_bias")}
    kinds = ["exp_avg", "exp_avg_sq", *(["main"] if precision == "bf16" else [])]
    assert saved.keys() == moved.keys() == {f"{kind}/{name}" for kind in kinds for name in trained}
    assert not [name for name, tensor in saved.items() if tensor.numpy().tobytes() != moved[name].numpy().tobytes()]
    assert all(tensor.abs().max() > 0 for tensor in saved.values())


# Refusals. None needs an engine.


@pytest.fixture
def copy(model_dir, tmp_path) -> Path:
    """A checkpoint to spoil."""
    folder = tmp_path / "copy"
    shutil.copytree(model_dir("deepseek_v3"), folder)
    return folder


def check(folder: Path) -> None:
    open_checkpoint(folder, load_architecture(folder))


def test_missing_and_unknown_experts_are_named(copy):
    weights = load_file(copy / "model.safetensors")
    weights["model.layers.1.mlp.experts.8.up_proj.weight"] = weights.pop("model.layers.1.mlp.experts.7.up_proj.weight")
    save_file(weights, copy / "model.safetensors")
    with pytest.raises(MegatuneError) as raised:
        check(copy)
    assert "1 keys are missing: model.layers.1.mlp.experts.7.up_proj.weight" in str(raised.value)
    assert "1 keys are unknown: model.layers.1.mlp.experts.8.up_proj.weight" in str(raised.value)


def test_layers_that_predict_further_tokens_are_left_out(copy):
    """As Transformers leaves them out; they come after the last layer, and nothing may come after them."""
    weights = load_file(copy / "model.safetensors")
    weights["model.layers.4.eh_proj.weight"] = torch.zeros(64, 128)
    save_file(weights, copy / "model.safetensors")
    check(copy)
    weights["model.layers.5.eh_proj.weight"] = torch.zeros(64, 128)
    save_file(weights, copy / "model.safetensors")
    with pytest.raises(MegatuneError, match=r"1 keys are unknown: model\.layers\.5\.eh_proj\.weight"):
        check(copy)
