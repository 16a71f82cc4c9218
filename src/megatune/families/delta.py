"""Gated delta nets: how a family's config.json describes them, and their tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatune.architecture import Architecture, DeltaNet
from megatune.families.dense import ENGINE_LAYER, HF_LAYER
from megatune.families.weights import HFTensor, Layers, TensorLayout, Weight

LINEAR_ATTENTION = "linear_attention"
DIMENSIONS = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip


def delta_nets(config: Mapping[str, Any]) -> DeltaNet | None:
    """Read which layers have a gated delta net, and its sizes; None where no layer has one."""
    count, every = config["num_hidden_layers"], config.get("full_attention_interval") or 4
    kinds = config.get("layer_types") or [
        "" if (layer + 1) % every == 0 else LINEAR_ATTENTION for layer in range(count)
    ]
    layers = tuple(kind == LINEAR_ATTENTION for kind in kinds)
    if not any(layers):
        return None
    return DeltaNet(
        layers=layers,
        num_key_heads=config["linear_num_key_heads"],
        num_value_heads=config["linear_num_value_heads"],
        key_head_dim=config["linear_key_head_dim"],
        value_head_dim=config["linear_value_head_dim"],
        conv_kernel_size=config["linear_conv_kernel_dim"],
    )


def delta_problems(architecture: Architecture) -> Iterator[tuple[str, str]]:
    """Find what no gated delta net can do, and say why."""
    delta = architecture.delta
    if delta is not None and delta.num_value_heads % delta.num_key_heads:
        why = f"each of the {delta.num_key_heads} key heads has as many value heads"
        yield f"linear_num_value_heads = {delta.num_value_heads} is impossible", why


def _has_delta_nets(architecture: Architecture) -> bool:
    return architecture.delta is not None


def _weight(engine: str, layout: TensorLayout, *hf: HFTensor) -> Weight:
    name = f"{ENGINE_LAYER}.self_attention.{engine}"
    return Weight(name, layout, hf, Layers.DELTA, _has_delta_nets, groups="delta.num_key_heads")


def _tensor(name: str, *shape: str | int, blocks: tuple[str, ...] = ()) -> HFTensor:
    return HFTensor(f"{HF_LAYER}.linear_attn.{name}", shape, blocks)


_MIXED = ("delta.key_size", "delta.key_size", "delta.value_size")
_REST = (
    _weight(
        "conv_weight",
        TensorLayout.GROUPED,
        _tensor("conv1d.weight", "delta.conv_size", 1, "delta.conv_kernel_size", blocks=_MIXED),
    ),
    _weight("A_log", TensorLayout.ROWS, _tensor("A_log", "delta.num_value_heads")),
    _weight("dt_bias", TensorLayout.ROWS, _tensor("dt_bias", "delta.num_value_heads")),
    _weight("norm_weight", TensorLayout.REPLICATED, _tensor("norm.weight", "delta.value_head_dim")),
    _weight("out_proj.weight", TensorLayout.COLUMNS, _tensor("out_proj.weight", "hidden_size", "delta.value_size")),
)


def _projection(*hf: HFTensor) -> tuple[Weight, ...]:
    return _weight("in_proj.weight", TensorLayout.GROUPED, *hf), *_REST


# Qwen3-Next's tensors are in groups themselves, one for each key head.
GROUPED_DELTA_NETS = _projection(
    _tensor("in_proj_qkvz.weight", "delta.qkvz_size", "hidden_size"),
    _tensor("in_proj_ba.weight", "delta.ba_size", "hidden_size"),
)
# Qwen3.5's have all queries, then all keys, then all values.
DELTA_NETS = _projection(
    _tensor("in_proj_qkv.weight", "delta.conv_size", "hidden_size", blocks=_MIXED),
    _tensor("in_proj_z.weight", "delta.value_size", "hidden_size"),
    _tensor("in_proj_b.weight", "delta.num_value_heads", "hidden_size"),
    _tensor("in_proj_a.weight", "delta.num_value_heads", "hidden_size"),
)
