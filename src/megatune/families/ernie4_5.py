"""ERNIE 4.5, dense: a llama with interleaved rotary embedding."""

from megatune.families.dense import DECODER
from megatune.families.family import Family

FAMILY = Family(
    model_type="ernie4_5",
    weights=DECODER,
    constants={"rope_interleaved": True, "has_classifier": False},
    required={"use_bias": False, "hidden_act": "silu"},
    defaults={
        "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True, "max_position_embeddings": 131072,
        "pad_token_id": 0, "num_key_value_heads": 2, "head_dim": 128,
    },
    nulls=("pad_token_id", "num_key_value_heads", "head_dim"),
)  # fmt: skip
