"""OLMo 2: norms only after attention and feed-forward, and over the queries and the keys of all heads."""

from megatune.families.dense import (
    ATTENTION,
    EMBEDDING,
    FINAL_NORM,
    MLP,
    OUTPUT_LAYER,
    SCORE,
    WIDE_QK_NORMS,
    layer_norms,
)
from megatune.families.family import Family

POST_NORMS = layer_norms(
    post_attention_layernorm="post_attention_layernorm", post_mlp_layernorm="post_feedforward_layernorm"
)

FAMILY = Family(
    model_type="olmo2",
    weights=(EMBEDDING, *POST_NORMS, *ATTENTION, *WIDE_QK_NORMS, *MLP, FINAL_NORM, OUTPUT_LAYER, SCORE),
    constants={"qk_layernorm": True, "wide_qk_norms": True, "post_norms": True, "pre_norms": False},
    required={"attention_bias": False, "attention_dropout": 0, "hidden_act": "silu"},
    defaults={"rms_norm_eps": 1e-5, "pad_token_id": 1},
)
