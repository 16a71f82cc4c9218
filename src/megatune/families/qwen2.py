"""Qwen1.5, Qwen2, Qwen2.5 and the DeepSeek-R1 distillations built on them."""

from megatune.families.dense import DECODER, QKV_BIAS
from megatune.families.family import Family

FAMILY = Family(
    model_type="qwen2",
    weights=(*DECODER, QKV_BIAS),
    constants={"add_qkv_bias": True},
    required={"use_sliding_window": False, "attention_dropout": 0, "hidden_act": "silu"},
)
