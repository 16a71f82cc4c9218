"""Llama 2, 3, 3.1, 3.2 and the DeepSeek-R1 distillations built on them."""

from megatune.families.dense import DECODER
from megatune.families.family import Family

FAMILY = Family(
    model_type="llama",
    weights=DECODER,
    # Other values are not supported, and reported by name.
    required={"attention_bias": False, "mlp_bias": False, "attention_dropout": 0, "hidden_act": "silu"},
    # inv_freq is computed, not learned; old checkpoints contain it.
    ignored_keys=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
)
