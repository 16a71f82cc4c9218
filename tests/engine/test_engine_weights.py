"""What the weight map says of a built model's tensors: their layer in any stack, and how ranks cut them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from layouts import EXPERT_LAYOUTS, LAYOUTS

from megatune.architecture import Architecture
from megatune.bridge.assemble import assemble
from megatune.config.settings import Settings
from megatune.engine.weights import named_weights
from megatune.families import FAMILIES
from megatune.families.family import Family
from megatune.families.weights import HFTensor, Role, Stack, TensorLayout, Weight, hf_shapes, layers_of
from megatune.verify.measure import measure_loss, shard_samples
from megatune.verify.samples import random_samples


def gradient_norm(model: Path, settings: Settings, with_subclass: bool) -> float:
    """On every rank: the norm of the gradient, with a subclass of Megatron-Core's linear layer where asked for."""
    from megatune.engine import specs
    from megatune.engine.optimizer import step

    class Linear(specs.ColumnParallelLinear):
        pass

    stock = specs.ColumnParallelLinear
    specs.ColumnParallelLinear = Linear if with_subclass else stock
    try:
        assembly = assemble(model, settings)
    finally:
        specs.ColumnParallelLinear = stock
    measure_loss(assembly, shard_samples(random_samples(301, (9, 16, 12, 7)), assembly.coords, settings.parallel))
    return step(assembly.optimizer, 0.0)[1]


@pytest.mark.parametrize("family", ["qwen2", "deepseek_v3"])
def test_a_subclass_counts_in_the_norm_of_the_gradient(pool, model_dir, family):
    model = model_dir(family)
    (expected,) = pool.run(1, gradient_norm, model, LAYOUTS["1"].settings(), False)
    for norm in pool.run(2, gradient_norm, model, LAYOUTS["tp2 sp"].settings(), True):
        assert norm == pytest.approx(expected, rel=1e-5)


def marks(model: Path, settings: Settings) -> dict[str, tuple]:
    """On every rank: what Megatron-Core reads of each weight of the first layers, by the engine's name."""
    names = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce")
    return {
        local.weight.engine.rpartition("layers.{layer}.")[2]: tuple(getattr(local.parameter, name) for name in names)
        for local in assemble(model, settings).parameters
    }


def test_marks_are_those_of_the_layout(pool, model_dir):
    for found in pool.run(2, marks, model_dir("qwen2_moe"), EXPERT_LAYOUTS["tp2 sp"].settings()):
        assert found["embedding.word_embeddings.weight"] == (True, 0, 1, True)
        assert found["self_attention.linear_qkv.bias"] == (True, 0, 1, True)
        assert found["self_attention.linear_proj.weight"] == (True, 1, 1, True)
        assert found["mlp.linear_fc1.weight"] == (True, 0, 2, True)
        assert found["mlp.router.weight"] == (False, -1, 1, True)
        assert found["mlp.experts.weight1"] == (True, 1, 2, False)
        assert found["mlp.experts.weight2"] == (True, 2, 1, False)
        assert found["decoder.final_layernorm.weight"] == (False, -1, 1, True)


@dataclass(frozen=True, kw_only=True, slots=True)
class SeeingArchitecture(Architecture):
    vision_depth: int = 4


def numbered(name: str, hf: str, **declared) -> Weight:
    return Weight(name, TensorLayout.REPLICATED, (HFTensor(hf, (2, 2)),), num_layers="vision_depth", **declared)


SEEING = Family(
    model_type="seeing",
    weights=(
        numbered("vision.layers.{layer}.fc.weight", "visual.blocks.{layer}.fc.weight", stack=Stack.VISION),
        numbered("vision.layers.{layer}.scale", "visual.blocks.{layer}.scale", stack=Stack.VISION, role=Role.BUFFER),
        numbered("projector.mergers.{layer}.0.weight", "visual.mergers.{layer}.weight", stack=Stack.PROJECTOR),
        numbered("projector.mlp.2.weight", "visual.mlp.2.weight", stack=Stack.PROJECTOR),
        numbered("decoder.layers.{layer}.adapter.weight", "layers.{layer}.adapter", role=Role.ADAPTER),
    ),
)


class Layer(torch.nn.Module):
    def __init__(self, part: str, number: int) -> None:
        super().__init__()
        self.layer_number = number  # as Megatron-Core counts, from 1, over all stages
        setattr(self, part, torch.nn.Linear(2, 2, bias=False))
        if part == "fc":
            self.register_buffer("scale", torch.ones(2))
            self.register_buffer("computed", torch.ones(2))


def test_layers_of_every_stack_are_known(monkeypatch):
    """The second stage's layers 3 and 4 of the vision tower and 7 of the decoder; modules of lists without numbers."""
    monkeypatch.setitem(FAMILIES, "seeing", SEEING)
    linear = torch.nn.Linear(2, 2, bias=False)
    model = torch.nn.Module()
    model.vision, model.projector, model.decoder = torch.nn.Module(), torch.nn.Module(), torch.nn.Module()
    model.vision.layers = torch.nn.ModuleList([Layer("fc", 3), Layer("fc", 4)])
    model.projector.mergers = torch.nn.ModuleList([torch.nn.Sequential(linear) for _ in range(2)])
    model.projector.mlp = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity(), torch.nn.Linear(2, 2, False))
    model.decoder.layers = torch.nn.ModuleList([Layer("adapter", 7)])
    sizes = dict.fromkeys(
        ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
         "vocab_size", "max_position_embeddings"), 8,
    )  # fmt: skip
    architecture = SeeingArchitecture(model_type="seeing", norm_epsilon=1e-6, rotary_base=1e4, **sizes)
    found = [
        (weight.stack, weight.role, weight.engine, layer) for weight, layer, _, _ in named_weights(model, architecture)
    ]
    fc, scale = "vision.layers.{layer}.fc.weight", "vision.layers.{layer}.scale"
    assert found == [
        (Stack.VISION, Role.BASE, fc, 2),
        (Stack.VISION, Role.BASE, fc, 3),
        (Stack.PROJECTOR, Role.BASE, "projector.mergers.{layer}.0.weight", 0),
        (Stack.PROJECTOR, Role.BASE, "projector.mlp.2.weight", 0),
        (Stack.DECODER, Role.ADAPTER, "decoder.layers.{layer}.adapter.weight", 6),
        (Stack.VISION, Role.BUFFER, scale, 2),
        (Stack.VISION, Role.BUFFER, scale, 3),
    ]
    assert layers_of(SEEING.weights[0], architecture) == [0, 1, 2, 3]
    assert list(hf_shapes(SEEING.weights[0], architecture, 3)) == ["visual.blocks.3.fc.weight"]
