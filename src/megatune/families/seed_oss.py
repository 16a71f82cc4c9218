"""Seed-OSS."""

from megatune.families.dense import DECODER, QKV_BIAS
from megatune.families.family import Family

FAMILY = Family(
    model_type="seed_oss",
    weights=(*DECODER, QKV_BIAS),
    read={"add_qkv_bias": "attention_bias"},
    # Its published dropouts of 0.1 are ignored, like all dropouts.
    required={"attention_out_bias": False, "mlp_bias": False, "hidden_act": "silu"},
    defaults={"attention_bias": True, "max_position_embeddings": 524288, "pad_token_id": 1},
    head_dim_default=128,
)
