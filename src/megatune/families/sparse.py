"""Pieces that families with a mixture of experts declare themselves from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatune.architecture import Architecture, MixtureOfExperts
from megatune.families.dense import ENGINE_LAYER, HF_LAYER
from megatune.families.weights import HFTensor, Layers, Layout, Weight


def routed_experts(module: str, gate: str, up: str, down: str) -> tuple[Weight, ...]:
    """The router and its experts.

    Args:
        module: the sparse feed-forward's name in a layer.
        gate, up, down: names of an expert's projections.
    """
    layer, expert = f"{HF_LAYER}.{module}", f"{HF_LAYER}.{module}.experts.{{expert}}"
    ffn = "moe.moe_ffn_hidden_size"
    return (
        Weight(
            f"{ENGINE_LAYER}.mlp.router.weight",
            Layout.REPLICATED,
            (HFTensor(f"{layer}.gate.weight", ("moe.num_experts", "hidden_size")),),
            Layers.SPARSE,
        ),
        Weight(
            f"{ENGINE_LAYER}.mlp.experts.weight1",
            Layout.GATE_UP,
            (
                HFTensor(f"{expert}.{gate}.weight", (ffn, "hidden_size")),
                HFTensor(f"{expert}.{up}.weight", (ffn, "hidden_size")),
            ),
            Layers.SPARSE,
        ),
        Weight(
            f"{ENGINE_LAYER}.mlp.experts.weight2",
            Layout.COLUMNS,
            (HFTensor(f"{expert}.{down}.weight", ("hidden_size", ffn)),),
            Layers.SPARSE,
        ),
    )


def shared_experts(module: str) -> tuple[Weight, ...]:
    """The experts that every token goes to, as one feed-forward of this name."""
    size = "moe.shared_expert_intermediate_size"
    engine = f"{ENGINE_LAYER}.mlp.shared_experts"
    return (
        Weight(
            f"{engine}.linear_fc1.weight",
            Layout.GATE_UP,
            (
                HFTensor(f"{HF_LAYER}.mlp.{module}.gate_proj.weight", (size, "hidden_size")),
                HFTensor(f"{HF_LAYER}.mlp.{module}.up_proj.weight", (size, "hidden_size")),
            ),
            Layers.SPARSE,
        ),
        Weight(
            f"{engine}.linear_fc2.weight",
            Layout.COLUMNS,
            (HFTensor(f"{HF_LAYER}.mlp.{module}.down_proj.weight", ("hidden_size", size)),),
            Layers.SPARSE,
        ),
    )


EXPERTS = routed_experts("mlp", "gate_proj", "up_proj", "down_proj")
SHARED_EXPERT_GATE = Weight(
    f"{ENGINE_LAYER}.mlp.shared_experts.gate_weight",
    Layout.REPLICATED,
    (HFTensor(f"{HF_LAYER}.mlp.shared_expert_gate.weight", (1, "hidden_size")),),
    Layers.SPARSE,
)
EXPERT_BIAS = Weight(
    f"{ENGINE_LAYER}.mlp.router.expert_bias",
    Layout.REPLICATED,
    (HFTensor(f"{HF_LAYER}.mlp.gate.e_score_correction_bias", ("moe.num_experts",)),),
    Layers.SPARSE,
    is_buffer=True,
)


def qwen_layers(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Qwen's rule for which layers are sparse: every so many, some excepted."""
    dense, step = set(config["mlp_only_layers"]), config["decoder_sparse_step"]
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(config["num_hidden_layers"]))


def expert_problems(architecture: Architecture) -> Iterator[tuple[str, str]]:
    """What no router can do, and why."""
    moe = architecture.moe
    if moe is None:
        return
    if moe.router_topk > moe.num_experts:
        yield f"num_experts_per_tok = {moe.router_topk} is impossible", f"there are {moe.num_experts} experts"
    if moe.num_groups:
        yield from _group_problems(moe)


def _group_problems(moe: MixtureOfExperts) -> Iterator[tuple[str, str]]:
    size = moe.num_experts // moe.num_groups
    if moe.num_experts % moe.num_groups or size < 2:
        yield (
            f"n_group = {moe.num_groups} is impossible",
            f"groups are equal, of at least two experts, and there are {moe.num_experts} experts",
        )
    elif moe.router_topk > moe.group_topk * size:
        yield (
            f"topk_group = {moe.group_topk} is impossible",
            f"{moe.group_topk} groups have {moe.group_topk * size} experts, a token goes to {moe.router_topk}",
        )
