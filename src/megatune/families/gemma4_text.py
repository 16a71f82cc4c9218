"""Gemma 4, text only: Gemma 3's norms and windows, heads of another size in layers without a window, and experts in
addition to the dense feed-forward."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatune.architecture import GlobalHeads, MixtureOfExperts
from megatune.families import gemma3_text
from megatune.families.dense import (
    ATTENTION,
    EMBEDDING,
    FINAL_NORM,
    MLP,
    OUTPUT_LAYER,
    QK_NORMS,
    global_heads,
    layer_norms,
    layer_weight,
)
from megatune.families.family import Config, Family
from megatune.families.rope import FULL_ATTENTION, SLIDING_ATTENTION
from megatune.families.sparse import fused_experts, routed_experts, shared_experts, sparse_weight
from megatune.families.weights import Layers, Role, TensorLayout

_ATTENTION = (*ATTENTION, *QK_NORMS)
_WHOLE = TensorLayout.REPLICATED
_EXPERTS = (
    *routed_experts("", "gate_proj", "up_proj", "down_proj", router="router.proj"),
    sparse_weight("router.input_scale", _WHOLE, ("router.scale", "hidden_size")),
    sparse_weight("router.expert_scale", _WHOLE, ("router.per_expert_scale", "moe.num_experts")),
    # The dense feed-forward, which every token goes to in addition to experts, is their shared expert.
    *shared_experts(""),
    *layer_norms(
        Layers.SPARSE,
        **{
            "mlp.shared_layernorm": "pre_feedforward_layernorm",
            "mlp.post_shared_layernorm": "post_feedforward_layernorm_1",
            "mlp.routed_layernorm": "pre_feedforward_layernorm_2",
            "mlp.post_routed_layernorm": "post_feedforward_layernorm_2",
        },
    ),
)
_NORMS = (
    *layer_norms(
        input_layernorm="input_layernorm",
        post_attention_layernorm="post_attention_layernorm",
        post_mlp_layernorm="post_feedforward_layernorm",
    ),
    *layer_norms(Layers.DENSE, pre_mlp_layernorm="pre_feedforward_layernorm"),
)
# A file may only state the kind: proportional rotary embedding belongs to layers without a window.
_ROPE = {
    FULL_ATTENTION: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING_ATTENTION: {"rope_type": "default", "rope_theta": 1e4},
}


def _experts(config: Config) -> MixtureOfExperts | None:
    if not config.get("enable_moe_block"):
        return None
    return MixtureOfExperts(
        layers=(True,) * config["num_hidden_layers"],
        num_experts=config["num_experts"],
        router_topk=config["top_k_experts"],
        moe_ffn_hidden_size=config["moe_intermediate_size"],
        shared_expert_intermediate_size=config["intermediate_size"],
        scaled_router=True,
        separate_norms=True,
    )


def _global_heads(config: Config) -> GlobalHeads:
    """Read the heads of layers without a window, whose number and size files store in separate keys, or layer by layer,
    as Transformers writes them."""
    layers = windows(config)
    at = str(layers.index(None)) if None in layers else ""
    own = {str(layer): heads for layer, heads in (config.get("per_layer_config") or {}).items()}.get(at) or {}
    are_values = bool(config.get("attention_k_eq_v"))
    groups = config.get("num_global_key_value_heads") if are_values else None
    return GlobalHeads(
        kv_channels=own.get("head_dim") or config.get("global_head_dim") or 512,
        num_query_groups=own.get("num_key_value_heads") or groups or config["num_key_value_heads"],
        keys_are_values=are_values,
    )


def windows(config: Config) -> tuple[int | None, ...]:
    """Read which layers have a window: as in Gemma 3, but never the last."""
    return (*gemma3_text.windows(config)[:-1], None)


def _numbers(config: Config) -> dict[str, Any]:
    return {
        "embedding_multiplier": config["hidden_size"] ** 0.5,
        "logits_softcap": config.get("final_logit_softcapping"),
        "local_rotary_base": float(gemma3_text.local_rope(config).get("rope_theta") or 1e4),
        "global_heads": _global_heads(config),
    }


def _problems(config: Config) -> Iterator[tuple[str, str]]:
    yield from gemma3_text.local_rope_problems(config)
    if config.get("use_bidirectional_attention") == "all":
        yield "use_bidirectional_attention = 'all' is not supported", "text tokens only see earlier tokens"
    for key in ("num_experts", "top_k_experts", "moe_intermediate_size") if config.get("enable_moe_block") else ():
        if not isinstance(config.get(key), int) or config[key] < 1:
            yield f"{key} = {config.get(key)!r} is not a whole number above 0", "enable_moe_block requires it"


FAMILY = Family(
    model_type="gemma4_text",
    weights=(
        EMBEDDING, *_NORMS, *(replace(weight, layers=Layers.LOCAL) for weight in _ATTENTION),
        *global_heads(_ATTENTION), *MLP, *_EXPERTS,
        layer_weight("layer_scalar", _WHOLE, ("layer_scalar", 1), role=Role.BUFFER), FINAL_NORM, OUTPUT_LAYER,
    ),
    constants={
        "qk_layernorm": True, "value_norms": True, "post_norms": True, "layer_scalars": True, "softmax_scale": 1.0,
        "activation": "gelu_tanh", "has_classifier": False,
    },
    required={
        "attention_bias": False, "attention_dropout": 0, "hidden_activation": "gelu_pytorch_tanh",
        # For E2B and E4B: keys and values shared between layers, and embeddings per layer.
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
    },
    dimensions=("sliding_window", "sliding_window_pattern"),
    defaults={
        "hidden_size_per_layer_input": 256, "sliding_window": 512, "sliding_window_pattern": 6,
        "tie_word_embeddings": True, "max_position_embeddings": 131072, "rope_parameters": _ROPE,
        "pad_token_id": 0,
    },
    rope_types=("default", "proportional"),
    head_dim_default=256,
    experts=_experts,
    derive=_numbers,
    windows=windows,
    problems=_problems,
    forms=(fused_experts("model.layers.{layer}.experts"),),
)  # fmt: skip
