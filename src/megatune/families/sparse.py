"""Building blocks of families with a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatune.architecture import Architecture, MixtureOfExperts
from megatune.families.dense import ENGINE_LAYER, layer_weight
from megatune.families.forms import CheckpointForm
from megatune.families.weights import Layers, Role, TensorLayout, Weight


def routed_experts(module: str, gate: str, up: str, down: str, router: str = "") -> tuple[Weight, ...]:
    """Declare the router and its experts by the names of the sparse feed-forward in a layer and of its projections. The
    router is its `gate` by default. With module "" experts are directly in the layer."""
    expert, ffn = f"{module}.experts.{{expert}}".removeprefix("."), "moe.moe_ffn_hidden_size"
    return (
        sparse_weight(
            "router.weight",
            TensorLayout.REPLICATED,
            (f"{router or f'{module}.gate'}.weight", "moe.num_experts", "hidden_size"),
            linear=False,
        ),
        sparse_weight(
            "experts.weight1",
            TensorLayout.GATE_UP,
            (f"{expert}.{gate}.weight", ffn, "hidden_size"),
            (f"{expert}.{up}.weight", ffn, "hidden_size"),
        ),
        sparse_weight("experts.weight2", TensorLayout.COLUMNS, (f"{expert}.{down}.weight", "hidden_size", ffn)),
    )


def shared_experts(module: str) -> tuple[Weight, ...]:
    """Declare the shared experts, as one feed-forward with this name; with "" it is the layer's own."""
    hf, size = f"mlp.{module}".removesuffix("."), "moe.shared_expert_intermediate_size"

    def exists(architecture: Architecture) -> bool:
        return architecture.moe is not None and architecture.moe.shared_expert_intermediate_size > 0

    return (
        sparse_weight(
            "shared_experts.linear_fc1.weight",
            TensorLayout.GATE_UP,
            (f"{hf}.gate_proj.weight", size, "hidden_size"),
            (f"{hf}.up_proj.weight", size, "hidden_size"),
            exists=exists,
        ),
        sparse_weight(
            "shared_experts.linear_fc2.weight",
            TensorLayout.COLUMNS,
            (f"{hf}.down_proj.weight", "hidden_size", size),
            exists=exists,
        ),
    )


def sparse_weight(engine: str, layout: TensorLayout, *hf: tuple[str | int, ...], **declared: Any) -> Weight:
    """Declare a weight of sparse feed-forwards by its name in the engine's; see `layer_weight`."""
    return layer_weight(f"mlp.{engine}", layout, *hf, layers=Layers.SPARSE, **declared)


def fused_experts(
    experts: str, prefixes: tuple[tuple[str, str], ...] = (), *, transposed: bool = False
) -> CheckpointForm:
    """Declare files that stack all experts of a layer in two tensors; `experts` is their prefix, with {layer}."""
    names = (("weight1", "gate_up_proj"), ("weight2", "down_proj"))
    fused = tuple((f"{ENGINE_LAYER}.mlp.experts.{engine}", f"{experts}.{name}") for engine, name in names)
    return CheckpointForm(prefixes, fused, transposed)


EXPERTS = routed_experts("mlp", "gate_proj", "up_proj", "down_proj")
SHARED_EXPERT_GATE = sparse_weight(
    "shared_experts.gate_weight",
    TensorLayout.REPLICATED,
    ("mlp.shared_expert_gate.weight", 1, "hidden_size"),
    linear=False,
)


def expert_bias(name: str, *shape: str | int) -> Weight:
    """Declare the bias that is added to scores to choose experts."""
    return sparse_weight("router.expert_bias", TensorLayout.REPLICATED, (name, *shape), role=Role.BUFFER)


EXPERT_BIAS = expert_bias("mlp.gate.e_score_correction_bias", "moe.num_experts")


def sparse_layers(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Read which layers are sparse, from mlp_layer_types; by default all but the first."""
    count = config["num_hidden_layers"]
    kinds = config.get("mlp_layer_types") or ["dense", *["sparse"] * (count - 1)]
    return tuple(kind == "sparse" for kind in kinds)


def qwen_experts(config: Mapping[str, Any], **declared: Any) -> MixtureOfExperts | None:
    """Read Qwen's experts: in every `decoder_sparse_step`-th layer, except `mlp_only_layers`; None without experts."""
    dense, step = set(config["mlp_only_layers"]), config["decoder_sparse_step"]
    layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(config["num_hidden_layers"]))
    if not any(layers):
        return None
    return MixtureOfExperts(
        layers=layers,
        num_experts=config["num_experts"],
        router_topk=config["num_experts_per_tok"],
        moe_ffn_hidden_size=config["moe_intermediate_size"],
        pre_softmax=not config["norm_topk_prob"],
        aux_loss_coeff=aux_loss_coeff(config),
        **declared,
    )


def local_experts(config: Mapping[str, Any], **declared: Any) -> MixtureOfExperts:
    """Read experts of every layer by Mixtral's keys."""
    return MixtureOfExperts(
        layers=(True,) * config["num_hidden_layers"],
        num_experts=config["num_local_experts"],
        router_topk=config["num_experts_per_tok"],
        moe_ffn_hidden_size=config["intermediate_size"],
        aux_loss_coeff=aux_loss_coeff(config),
        **declared,
    )


def aux_loss_coeff(config: Mapping[str, Any]) -> float:
    """Read the coefficient of the load-balancing loss, with Transformers' default for Qwen and Mixtral."""
    return float(config.get("router_aux_loss_coef", 0.001) or 0.0)


def expert_problems(architecture: Architecture) -> Iterator[tuple[str, str]]:
    """Yield problems of the router, with reasons."""
    moe = architecture.moe
    if moe is None:
        return
    if moe.router_topk > moe.num_experts:
        yield f"num_experts_per_tok = {moe.router_topk} is impossible", f"there are {moe.num_experts} experts"
    if not moe.num_groups:
        return
    size = moe.num_experts // moe.num_groups
    if moe.num_experts % moe.num_groups or size < 2:
        why = f"groups must be equal, with at least two experts, but there are {moe.num_experts} experts"
        yield f"n_group = {moe.num_groups} is impossible", why
    elif moe.router_topk > moe.group_topk * size:
        why = f"{moe.group_topk} groups have {moe.group_topk * size} experts, but each token needs {moe.router_topk}"
        yield f"topk_group = {moe.group_topk} is impossible", why
