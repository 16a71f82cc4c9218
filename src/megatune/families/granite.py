"""Granite 3, dense: a llama with four scaling factors."""

from megatune.families.dense import DECODER
from megatune.families.family import Family

FAMILY = Family(
    model_type="granite",
    weights=DECODER,
    constants={"has_classifier": False},
    read={
        "embedding_multiplier": "embedding_multiplier",
        "noise_multiplier": "embedding_multiplier",
        "softmax_scale": "attention_multiplier",
        "residual_multiplier": "residual_multiplier",
        "logits_scaling": "logits_scaling",
    },
    # Granite 3.0's dropout of 0.1 is ignored, like all dropouts.
    required={"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"},
    # In Transformers attention_multiplier is also 1 by default.
    defaults={
        "embedding_multiplier": 1, "attention_multiplier": 1, "residual_multiplier": 1, "logits_scaling": 1,
    },
)  # fmt: skip
