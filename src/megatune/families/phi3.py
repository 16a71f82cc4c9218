"""Phi-3, Phi-3.5 and Phi-4: a llama whose files have queries, keys and values in one tensor, and gates and ups in
another."""

from collections.abc import Iterable

from megatune.families.dense import DECODER, layer_weight
from megatune.families.family import Family
from megatune.families.mistral import windows
from megatune.families.weights import Layers, TensorLayout, Weight

FUSED_QKV = layer_weight(
    "self_attention.linear_qkv.weight",
    TensorLayout.GROUPED,
    ("self_attn.qkv_proj.weight", "qkv_size", "hidden_size"),
    blocks=("query_size", "key_value_size", "key_value_size"),
    layers=Layers.ATTENTION,
)
FUSED_GATE_UP = layer_weight(
    "mlp.linear_fc1.weight",
    TensorLayout.GATE_UP,
    ("mlp.gate_up_proj.weight", "gate_up_size", "hidden_size"),
    blocks=("ffn_hidden_size", "ffn_hidden_size"),
    layers=Layers.DENSE,
)


def with_fused(weights: Iterable[Weight], *fused: Weight) -> tuple[Weight, ...]:
    """Replace the weights that have the same engine names as the fused ones."""
    named = {weight.engine: weight for weight in fused}
    return tuple(named.get(weight.engine, weight) for weight in weights)


FAMILY = Family(
    model_type="phi3",
    weights=with_fused(DECODER, FUSED_QKV, FUSED_GATE_UP),
    required={
        "attention_bias": False, "attention_dropout": 0, "embd_pdrop": 0, "resid_pdrop": 0,
        "hidden_act": "silu",
    },
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "pad_token_id": 32000},
    rope_types=("default", "longrope"),
    partial_rotary=True,
    windows=windows,
)  # fmt: skip
