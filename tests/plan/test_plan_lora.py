"""Adapters: counts that are known, and what they leave of gradients and optimizer."""

from __future__ import annotations

import pytest
import torch
from exact_state import rank_state
from layouts import Layout
from model_sizes import tiny_config

from megatune.architecture import Architecture
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.families import FAMILIES
from megatune.plan.case import Case, PlannedModel
from megatune.plan.flops import num_parameters
from megatune.plan.machine import Device, Link, Machine
from megatune.plan.memory.parameters import stage_parameters, state_bytes
from megatune.plan.memory.tensors import num_trained_parameters

_LINK = Link(name="link", bandwidth=1e9, latency=1e-6)
_DEVICE = Device(name="device", generation="cpu", memory=1, flops={}, bandwidth=1e9, link="link")
_MACHINE = Machine(device=_DEVICE, gpus_per_node=8, link=_LINK, network=_LINK)
_BF16 = {"bf16": True}

LORA = FinetuningSettings(finetuning_type="lora")
QWEN2_5_7B = Architecture(
    model_type="qwen2", num_layers=28, hidden_size=3584, ffn_hidden_size=18944, num_attention_heads=28,
    num_query_groups=4, kv_channels=128, vocab_size=152064, max_position_embeddings=32768, norm_epsilon=1e-6,
    rotary_base=1e6, add_qkv_bias=True,
)  # fmt: skip
LLAMA_3_8B = Architecture(
    model_type="llama", num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32,
    num_query_groups=8, kv_channels=128, vocab_size=128256, max_position_embeddings=8192, norm_epsilon=1e-5,
    rotary_base=5e5,
)  # fmt: skip


def planned(architecture: Architecture, layout: Layout, trainable: FinetuningSettings) -> Case:
    model = PlannedModel(name="model", architecture=architecture)
    return Case(
        model=model, settings=layout.settings({}, _BF16).model_copy(update={"finetuning": trainable}),
        world_size=layout.world_size, machine=_MACHINE,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "trainable", "expected"),
    [
        # What PEFT counts with an adapter beside each of the seven matrices of a layer.
        (QWEN2_5_7B, LORA, 20_185_088),
        (LLAMA_3_8B, LORA, 20_971_520),
        (LLAMA_3_8B, LORA.model_copy(update={"lora_rank": 16}), 2 * 20_971_520),
        # By hand: 32 layers, r (in + out) of the output projection.
        (LLAMA_3_8B, LORA.model_copy(update={"lora_target": ["o_proj"]}), 32 * 8 * (4096 + 4096)),
        (LLAMA_3_8B, LORA.model_copy(update={"freeze_language_model": True}), 0),
    ],
)
def test_adapters_are_as_many_as_peft_has(architecture, trainable, expected):
    assert num_trained_parameters(architecture, trainable) == expected


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_linear_layer_of_transformers_has_an_adapter(family):
    from transformers import AutoModelForCausalLM

    config = tiny_config(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linear = [one for name, one in model.named_modules() if isinstance(one, torch.nn.Linear) and name != "lm_head"]
    architecture = FAMILIES[family].architecture(config.to_dict())
    expected = sum(8 * (one.in_features + one.out_features) for one in linear)
    assert num_trained_parameters(architecture, LORA) == expected


def test_tensor_parallelism_cuts_one_of_the_two_matrices():
    layout = Layout(2, {"tensor_model_parallel_size": 2})
    found = stage_parameters(planned(LLAMA_3_8B, layout, LORA), 0)
    # A of q, k, v, gate and up is whole, B halved; of o and down B is whole, A halved.
    cut_outputs = 5 * 4096 + (4096 + 2 * 1024 + 2 * 14336) // 2
    cut_inputs = (4096 + 14336) // 2 + 2 * 4096
    assert found.trained_dense == 32 * 8 * (cut_outputs + cut_inputs)
    assert (
        found.dense - found.trained_dense
        == stage_parameters(planned(LLAMA_3_8B, layout, FinetuningSettings()), 0).dense
    )


def test_experts_have_an_adapter_each():
    config = tiny_config("qwen3_moe", num_hidden_layers=2, decoder_sparse_step=1)
    architecture = FAMILIES["qwen3_moe"].architecture(config.to_dict())
    layout = Layout(4, {"expert_model_parallel_size": 4})
    found = stage_parameters(planned(architecture, layout, LORA), 0)
    # Two layers of two local experts; gate, up and down of 64 by 40.
    assert found.trained_expert == 2 * 2 * 3 * 8 * (64 + 40)
    # Queries, keys, values and output of 4 heads of 24 channels and 2 key/value heads.
    assert found.trained_dense == 2 * 8 * ((64 + 96) + 2 * (64 + 48) + (96 + 64))


@pytest.mark.parametrize("world_size", [1, 4])
def test_adapters_alone_have_gradients_and_an_optimizer(world_size):
    case = planned(QWEN2_5_7B, Layout(world_size), LORA)
    states = [rank_state(case, rank) for rank in range(world_size)]
    trained = 20_185_088
    assert {one.weights for one in states} == {2 * (num_parameters(QWEN2_5_7B) + trained)}
    assert {one.gradients for one in states} == {4 * trained}
    assert sum(one.master_weights for one in states) == 4 * trained
    # One scalar on each rank.
    assert sum(one.optimizer_state for one in states) == 8 * trained + 4 * world_size
    assert max(one.optimizer_state for one in states) == state_bytes(case, 0).optimizer_state
