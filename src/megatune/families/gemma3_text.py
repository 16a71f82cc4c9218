"""Gemma 3, text only: layers with and without windows, pre- and post-norms, scaled embeddings, GeGLU."""

from collections.abc import Iterator
from typing import Any

from megatune.families.dense import ATTENTION, EMBEDDING, FINAL_NORM, MLP, OUTPUT_LAYER, QK_NORMS, SCORE, layer_norms
from megatune.families.family import Config, Family
from megatune.families.rope import SLIDING_ATTENTION

_NORMS = layer_norms(
    input_layernorm="input_layernorm",
    post_attention_layernorm="post_attention_layernorm",
    pre_mlp_layernorm="pre_feedforward_layernorm",
    post_mlp_layernorm="post_feedforward_layernorm",
)


def windows(config: Config) -> tuple[int | None, ...]:
    """Read which layers have a window: by default all but every `sliding_window_pattern`-th."""
    count, every, window = config["num_hidden_layers"], config["sliding_window_pattern"], config["sliding_window"]
    kinds = config.get("layer_types") or [SLIDING_ATTENTION if (each + 1) % every else "" for each in range(count)]
    return tuple(window if kind == SLIDING_ATTENTION else None for kind in kinds)


def local_rope(config: Config) -> dict[str, Any]:
    """Read the rotary settings of layers with a window; {} if they have no separate ones."""
    return (config.get("rope_parameters") or {}).get(SLIDING_ATTENTION) or {}


def local_rope_problems(config: Config) -> Iterator[tuple[str, str]]:
    """Yield unsupported rotary settings of layers with a window, with reasons."""
    kind = local_rope(config).get("rope_type", "default")
    if kind != "default":
        yield f"rotary scaling {kind!r} of layers with a window is not supported", "only layers without one are scaled"


def _numbers(config: Config) -> dict[str, Any]:
    return {
        "embedding_multiplier": config["hidden_size"] ** 0.5,
        "softmax_scale": config["query_pre_attn_scalar"] ** -0.5,
        "local_rotary_base": float(local_rope(config).get("rope_theta") or config["rope_local_base_freq"]),
    }


FAMILY = Family(
    model_type="gemma3_text",
    weights=(EMBEDDING, *_NORMS, *ATTENTION, *QK_NORMS, *MLP, FINAL_NORM, OUTPUT_LAYER, SCORE),
    constants={"qk_layernorm": True, "zero_centered_norms": True, "post_norms": True, "activation": "gelu_tanh"},
    required={
        "attention_bias": False, "attention_dropout": 0, "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": None, "attn_logit_softcapping": None, "use_bidirectional_attention": False,
    },
    dimensions=("query_pre_attn_scalar", "sliding_window", "sliding_window_pattern"),
    defaults={
        "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 6, "rope_theta": 1e6,
        "rope_local_base_freq": 1e4, "tie_word_embeddings": True, "max_position_embeddings": 131072,
        "pad_token_id": 0,
    },
    rope_types=("default", "linear"),
    head_dim_default=256,
    derive=_numbers,
    windows=windows,
    problems=local_rope_problems,
)  # fmt: skip
