"""GLM-4-9B in Transformers' format: a llama with interleaved rotary embedding of half the channels, biases in the QKV
projection, and gates and ups in one tensor."""

from megatune.families.dense import DECODER, QKV_BIAS
from megatune.families.family import Family
from megatune.families.phi3 import FUSED_GATE_UP, with_fused

FAMILY = Family(
    model_type="glm",
    weights=(*with_fused(DECODER, FUSED_GATE_UP), QKV_BIAS),
    constants={"rope_interleaved": True},
    read={"add_qkv_bias": "attention_bias"},
    required={"attention_dropout": 0, "hidden_act": "silu"},
    defaults={
        "partial_rotary_factor": 0.5, "attention_bias": True, "rms_norm_eps": 1.5625e-7, "num_key_value_heads": 2,
        "max_position_embeddings": 131072, "pad_token_id": 151329,
    },
    nulls=("pad_token_id", "num_key_value_heads"),
    partial_rotary=True,
    head_dim_default=128,
)  # fmt: skip
