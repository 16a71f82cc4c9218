"""Adapters: counts that are known, and what they leave of gradients and optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exact_state import rank_state
from layouts import Layout
from model_sizes import tiny_config
from test_plan_parameters import RULES, assert_planned
from test_plan_parameters import architecture as tiny

from megatune.architecture import Architecture
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.rules import check
from megatune.config.settings import Settings
from megatune.families import FAMILIES
from megatune.plan.case import Case, PlannedModel
from megatune.plan.flops import num_parameters
from megatune.plan.machine import Device, Link, Machine
from megatune.plan.memory.parameters import StateConfig, elements_of, stage_state
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
        # Alone of matrices that the engine stacks; every length of a row; a module that is trained whole.
        (
            LLAMA_3_8B,
            LORA.model_copy(update={"lora_target": ["q_proj", "v_proj"]}),
            32 * 8 * (4096 + 4096 + 4096 + 1024),
        ),
        (
            LLAMA_3_8B,
            LORA.model_copy(update={"lora_target": ["up_proj"], "use_dora": True}),
            32 * (8 * (4096 + 14336) + 14336),
        ),
        (
            LLAMA_3_8B,
            LORA.model_copy(update={"lora_target": ["o_proj"], "additional_target": ["lm_head"]}),
            32 * 8 * (4096 + 4096) + 128256 * 4096,
        ),
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
    found = elements_of(StateConfig.of(planned(LLAMA_3_8B, layout, LORA)), 0)
    # A of q, k, v, gate and up is whole, B halved; of o and down B is whole, A halved.
    cut_outputs = 5 * 4096 + (4096 + 2 * 1024 + 2 * 14336) // 2
    cut_inputs = (4096 + 14336) // 2 + 2 * 4096
    assert found.trained_dense == 32 * 8 * (cut_outputs + cut_inputs)
    assert (
        found.dense - found.trained_dense
        == elements_of(StateConfig.of(planned(LLAMA_3_8B, layout, FinetuningSettings())), 0).dense
    )


def test_experts_have_an_adapter_each():
    config = tiny_config("qwen3_moe", num_hidden_layers=2, decoder_sparse_step=1)
    architecture = FAMILIES["qwen3_moe"].architecture(config.to_dict())
    layout = Layout(4, {"expert_model_parallel_size": 4})
    found = elements_of(StateConfig.of(planned(architecture, layout, LORA)), 0)
    # Two layers of two local experts; gate, up and down of 64 by 40.
    assert found.trained_expert == 2 * 2 * 3 * 8 * (64 + 40)
    # Queries, keys, values and output of 4 heads of 24 channels and 2 key/value heads.
    assert found.trained_dense == 2 * 8 * ((64 + 96) + 2 * (64 + 48) + (96 + 64))


@pytest.mark.parametrize("world_size", [1, 4])
def test_adapters_alone_have_gradients_and_an_optimizer(world_size):
    case = planned(QWEN2_5_7B, Layout(world_size), LORA)
    states = [rank_state(case, rank) for rank in range(world_size)]
    trained = 20_185_088
    # The model in bf16, adapters in fp32, which need no master weights.
    assert {one.weights for one in states} == {2 * num_parameters(QWEN2_5_7B) + 4 * trained}
    assert {one.gradients for one in states} == {4 * trained}
    assert {one.master_weights for one in states} == {0}
    # One scalar on each rank.
    assert sum(one.optimizer_state for one in states) == 8 * trained + 4 * world_size
    assert max(one.optimizer_state for one in states) == stage_state(StateConfig.of(case), 0).optimizer_state


_TP2, _PP2, _SP = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}, {"sequence_parallel": True}
_OF_ATTENTION = {"lora_target": ["q_proj", "v_proj"]}
SELECTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "q and v": _OF_ATTENTION,
    "all, and words": {"additional_target": ["embed_tokens", "norm", "lm_head"], "lora_rank": 3},
    "DoRA of attention": {"use_dora": True, "lora_target": ["linear_qkv", "linear_proj"]},
}
OF_EXPERTS = {"lora_target": [r".*\.experts\.\d+\.(gate|down)_proj"]}
# A covering design: each family meets every selection, precision and way to cut.
_DENSE = {
    "1": Layout(1),
    "tp2 sp": Layout(2, _TP2 | _SP),
    "dp2": Layout(2),
    "pp2 dp2": Layout(4, _PP2),
    "tp4": Layout(4, {"tensor_model_parallel_size": 4}),
    "no distributed optimizer": Layout(2, {"use_distributed_optimizer": False}),
    "dp3": Layout(3),
    "overlap": Layout(4, _PP2 | {"overlap_grad_reduce": True, "overlap_param_gather": True}),
}
_SPARSE = {
    "ep2": Layout(2, {"expert_model_parallel_size": 2}),
    "ep2 etp1 tp2 sp": Layout(2, _TP2 | _SP | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
    "ep2 dp4": Layout(4, {"expert_model_parallel_size": 2}),
    "etp2 tp2 sp": Layout(2, _TP2 | _SP),
}  # fmt: skip
FAMILIES_AND_MORE = {
    "qwen3": ({"num_hidden_layers": 2}, {}),
    "qwen3_moe": ({"num_hidden_layers": 2}, {}),
    "deepseek_v3": ({"num_hidden_layers": 3}, {}),
    "qwen3_vl": ({"num_hidden_layers": 2}, {"freeze_vision_tower": False}),
}
_PRECISIONS: list[tuple[dict[str, Any], dict[str, bool]]] = [
    ({}, _BF16),
    ({}, {}),
    ({"exp_avg_dtype": "bf16"}, _BF16 | {"accumulate_allreduce_grads_in_fp32": False}),
    ({"optimizer": "sgd"}, {"fp16": True}),
    ({"optimizer_cpu_offload": True}, _BF16),
]


def adapted_cases(world_size: int) -> dict[str, tuple[Architecture, Settings]]:
    """Every family in layouts of this many ranks; selections and precisions in turn."""
    found: dict[str, tuple[Architecture, Settings]] = {}
    turn = 0
    for family, (sizes, more) in FAMILIES_AND_MORE.items():
        model = tiny(family, **sizes)
        for name, one in (_DENSE | (_SPARSE if model.moe else {})).items():
            for selection in list(SELECTIONS)[turn % 2 :: 2]:
                optimizer, precision = _PRECISIONS[turn % len(_PRECISIONS)]
                turn += 1
                if one.world_size != world_size or check(one.settings(), model, world_size, rules=RULES):
                    continue
                trainable = FinetuningSettings(finetuning_type="lora", **SELECTIONS[selection] | more)
                settings = one.settings(optimizer, precision).model_copy(update={"finetuning": trainable})
                found[f"{family}, {name}, {selection}, {optimizer}, {precision}"] = (model, settings)
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_state_of_adapters_of_experts_alone_is_planned_to_the_byte(pool, world_size):
    """Of dense weights nothing has gradients."""
    trainable = FinetuningSettings(finetuning_type="lora", **OF_EXPERTS)
    model = tiny("qwen3_moe", num_hidden_layers=2)
    cases = {
        f"{name}, {precision}": (model, one.settings({}, precision).model_copy(update={"finetuning": trainable}))
        for name, one in (_DENSE | _SPARSE).items()
        for precision in (_BF16, {})
        if one.world_size == world_size and not check(one.settings(), model, world_size, rules=RULES)
    }
    assert_planned(pool, world_size, cases)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_state_of_adapters_is_planned_to_the_byte(pool, world_size):
    assert_planned(pool, world_size, adapted_cases(world_size))
