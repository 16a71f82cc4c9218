"""Olmo 3: norms behind attention and feed-forward only, and over the queries and the keys of all heads."""

from typing import Any

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
from megatune.families.family import Config, Family
from megatune.families.gemma3_text import local_rope, local_rope_problems, windows
from megatune.families.rope import rope_parameters

_NORMS = layer_norms(
    post_attention_layernorm="post_attention_layernorm", post_mlp_layernorm="post_feedforward_layernorm"
)


def _numbers(config: Config) -> dict[str, Any]:
    """Read the angles of layers with a window, which are not scaled."""
    return {"local_rotary_base": float(local_rope(config).get("rope_theta") or rope_parameters(config)["rope_theta"])}


FAMILY = Family(
    model_type="olmo3",
    weights=(EMBEDDING, *_NORMS, *ATTENTION, *WIDE_QK_NORMS, *MLP, FINAL_NORM, OUTPUT_LAYER, SCORE),
    constants={"qk_layernorm": True, "wide_qk_norms": True, "post_norms": True, "pre_norms": False},
    required={"attention_bias": False, "attention_dropout": 0, "hidden_act": "silu"},
    dimensions=("sliding_window", "sliding_window_pattern"),
    defaults={
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
        "pad_token_id": 1,
    },
    derive=_numbers,
    windows=windows,
    problems=local_rope_problems,
)
