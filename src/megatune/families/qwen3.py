"""Qwen3, dense."""

from megatune.families.dense import DECODER, QK_NORMS
from megatune.families.family import Family

FAMILY = Family(
    model_type="qwen3",
    weights=(*DECODER, *QK_NORMS),
    constants={"qk_layernorm": True},
    required={"attention_bias": False, "use_sliding_window": False, "attention_dropout": 0, "hidden_act": "silu"},
    # Transformers' default differs from hidden_size / num_attention_heads.
    head_dim_default=128,
)
