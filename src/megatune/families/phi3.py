"""Phi-3, Phi-3.5 and Phi-4: a llama whose queries, keys and values are one tensor in files, and whose gates and ups are
another."""

from megatune.families.dense import ATTENTION, FRAME, layer_weight
from megatune.families.family import Family
from megatune.families.mistral import windows
from megatune.families.weights import Layers, TensorLayout

_QKV = layer_weight(
    "self_attention.linear_qkv.weight",
    TensorLayout.GROUPED,
    ("self_attn.qkv_proj.weight", "qkv_size", "hidden_size"),
    blocks=("query_size", "key_value_size", "key_value_size"),
    layers=Layers.ATTENTION,
)
_GATE_UP = layer_weight(
    "mlp.linear_fc1.weight",
    TensorLayout.GATE_UP,
    ("mlp.gate_up_proj.weight", "gate_up_size", "hidden_size"),
    blocks=("ffn_hidden_size", "ffn_hidden_size"),
    layers=Layers.DENSE,
)
_FUSED = {weight.engine: weight for weight in (_QKV, _GATE_UP)}

FAMILY = Family(
    model_type="phi3",
    weights=tuple(_FUSED.get(weight.engine, weight) for weight in (*FRAME, *ATTENTION)),
    required={
        "attention_bias": False, "attention_dropout": 0, "embd_pdrop": 0, "resid_pdrop": 0,
        "hidden_act": "silu",
    },
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "pad_token_id": 32000},
    rope_types=("default", "longrope"),
    partial_rotary=True,
    windows=windows,
)  # fmt: skip
