"""What frozen parts leave of gradients, optimizer and computing, counted as Transformers' modules have them."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from activation_cases import machine
from layouts import Layout
from model_sizes import model_class, tiny_config

from megatune.architecture import Architecture
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.families import read_architecture
from megatune.plan.case import Case, PlannedModel
from megatune.plan.flops import model_flops, num_parameters, train_flops
from megatune.plan.memory.parameters import StateConfig, elements_of
from megatune.plan.memory.tensors import held_parameters, num_trained_parameters
from megatune.plan.time import step_time

FREEZE_SETTINGS = {"tower": "freeze_vision_tower", "projector": "freeze_multi_modal_projector",
            "language": "freeze_language_model"}  # fmt: skip
PARTS = [(), ("tower",), ("projector",), ("language",), ("tower", "projector"), ("tower", "projector", "language")]
FREEZE = FinetuningSettings(finetuning_type="freeze", freeze_trainable_layers=1)


@cache
def architecture(family: str) -> Architecture:
    return read_architecture(tiny_config(family).to_dict(), "config.json")


@cache
def parameters(family: str) -> dict[str, int]:
    """Elements of Transformers' parameters, by name, in its order."""
    with torch.device("meta"):
        model = model_class(family).from_config(tiny_config(family))
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


def part_of(name: str) -> str:
    if "visual." not in name:
        return "language"
    return "deepstack" if "deepstack" in name else "projector" if ".merger." in name else "tower"


def planned(model: Architecture, trainable: FinetuningSettings, layout: Layout, **settings: Any) -> Case:
    chosen = layout.settings(**settings).model_copy(update={"finetuning": trainable})
    named = PlannedModel(name="tiny", architecture=model)
    return Case(model=named, settings=chosen, world_size=layout.world_size, machine=machine())


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_frozen_parts_have_weights_only(family, parts):
    model, sizes = architecture(family), parameters(family)
    trainable = FinetuningSettings(**{switch: part not in parts for part, switch in FREEZE_SETTINGS.items()})
    trained = {*parts, *(["deepstack"] if "tower" in parts else [])}
    beside = sum(size for name, size in sizes.items() if part_of(name) in trained - {"language"})
    whole = sum(size for name, size in sizes.items() if part_of(name) in trained)
    assert num_trained_parameters(model, trainable) == whole
    layout = Layout(4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True})
    language = [elements_of(StateConfig.of(planned(model, FinetuningSettings(), layout)), stage) for stage in (0, 1)]
    found = [elements_of(StateConfig.of(planned(model, trainable, layout)), stage) for stage in (0, 1)]
    assert [one.dense + one.expert for one in found] == [one.dense + one.expert for one in language]
    held = [one.trained_dense + one.trained_expert if "language" in parts else 0 for one in language]
    # The encoder is whole on every rank of the first stage, and nowhere else.
    assert [one.trained_dense + one.trained_expert for one in found] == [held[0] + beside, held[1]]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_an_encoder_is_held_in_the_order_of_its_modules(family):
    """Buckets of gradients and the optimizer's shards follow from it."""
    model = PlannedModel(name="tiny", architecture=architecture(family))
    *encoder, _ = held_parameters(model, FinetuningSettings(), 1, 1, 1, False).at["first"]
    assert [one.numel for one in encoder] == [
        size for name, size in parameters(family).items() if part_of(name) != "language"
    ]


@pytest.mark.parametrize("family", ["llama", "qwen2", "deepseek_v3", "qwen3_vl_moe"])
def test_what_freezing_trains_is_counted(family):
    layers = FREEZE.model_copy(update={"freeze_extra_modules": ["norm"], "freeze_trainable_modules": ["mlp"]})
    expected = sum(
        size for name, size in parameters(family).items()
        if "visual" not in name and (".layers.3.mlp." in name or name.endswith((".norm.weight", "model.norm.weight")))
    )  # fmt: skip
    assert num_trained_parameters(architecture(family), layers) == expected


def test_operations_of_frozen_layers_are_left_out():
    model, layout = architecture("llama"), Layout(1)
    case = planned(model, FREEZE, layout)
    length, rows = case.sequence_length, case.global_batch_size
    sizes = parameters("llama")
    layer = sum(size for name, size in sizes.items() if ".layers.3." in name and "norm" not in name)
    # Of attention half of the scores, and of their product with the values; forward once, backward twice.
    attention = 2 * model.query_size * length**2
    forward = 2 * length * (model.num_layers * layer + sizes["lm_head.weight"]) + model.num_layers * attention
    # The last layer's inputs and weights, and what comes to it from the output layer.
    backward = 2 * length * (2 * layer + sizes["lm_head.weight"]) + 2 * attention
    assert model_flops(case) == rows * (forward + backward)
    assert model_flops(planned(model, FinetuningSettings(), layout)) == rows * train_flops(model, [length])


def test_layers_before_the_first_trained_one_take_a_forward_pass():
    model = read_architecture(tiny_config("llama", num_hidden_layers=8, hidden_size=1024, intermediate_size=4096,
                                          num_attention_heads=16, head_dim=64).to_dict(), "config.json")  # fmt: skip
    layout = Layout(2, {"pipeline_model_parallel_size": 2})
    last, first, whole = (
        step_time(planned(model, one, layout)).chunks
        for one in (FREEZE, FREEZE.model_copy(update={"freeze_trainable_layers": -1}), FinetuningSettings())
    )
    assert [chunk.forward for (chunk,) in last] == pytest.approx([chunk.forward for (chunk,) in whole])
    assert last[0][0].backward < 1e-3 * whole[0][0].backward  # what the word embedding launches
    assert 0 < last[1][0].backward < 0.5 * whole[1][0].backward
    # Gradients go through the others to the first one.
    assert 0.4 * whole[1][0].backward < first[1][0].backward < 0.7 * whole[1][0].backward
    assert num_parameters(model) > num_trained_parameters(model, FREEZE)
