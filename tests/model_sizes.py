"""Sizes of the tiny models that tests go through, by family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatune.bridge.auto import register_types

# model_dir("qwen3", tied=True, vocab_size=130), see conftest.
MakeModel = Callable[..., Path]

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Short enough that rows of the tests are longer: every branch of the scaling is computed with.
    "original_max_position_embeddings": 16,
}
# Odd on purpose: tp divides no vocabulary, heads are not hidden / heads wide, tp 4 exceeds the key/value heads.
SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 301,
    "max_position_embeddings": 128,
    # Wide enough that attention is far from uniform: a wrong position or mask must show.
    "initializer_range": 0.125,
    # Transformers gives the embedding of padding no gradient, and random rows hold every token.
    "pad_token_id": None,
}

YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    # Unequal: one part of the factor stretches cosine and sine, another one the scores.
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
# Of families with sizes of their own. Dense layers among sparse ones, at the start and in the middle.
FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3_ROPE},
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
        "mlp_only_layers": [2],
    },
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 40,
        "q_lora_rank": 28,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "rope_parameters": YARN_ROPE,
    },
}

_LATENT = {
    name: size for name, size in FAMILY_SIZES["deepseek_v3"].items() if name not in ("rope_parameters", "head_dim")
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SPARSE_TYPES = {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}
FAMILY_SIZES |= {
    "kimi_k2": {**FAMILY_SIZES["deepseek_v3"], "n_group": 1, "topk_group": 1},
    "mistral": {"sliding_window": None},
    # Its first context is shorter than rows of the tests: queries grow.
    "ministral3": {
        "rope_parameters": {**YARN_ROPE, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
    },
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "granite": {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 2.5,
    },
    "smollm3": {"no_rope_layers": [1, 0, 1, 0], "rope_parameters": _ROPE},
    "phi3": {"rope_parameters": _ROPE, "head_dim": 16},
    "gemma3_text": {
        "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2, "query_pre_attn_scalar": 20,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        "bos_token_id": None, "eos_token_id": None,
    },
    "olmo3": {
        "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {name: size for name, size in YARN_ROPE.items() if not name.startswith("mscale")},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "glm": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}},
    "glm4": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}},
    "exaone4": {
        "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2, "rope_parameters": _ROPE,
    },
    "ernie4_5": {"rope_parameters": _ROPE, "head_dim": 16},
    "olmo2": {"rope_parameters": _ROPE},
    "olmoe": {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "rope_parameters": _ROPE},
    "dots1": {
        "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "num_experts_per_tok": 2,
        "moe_intermediate_size": 40, "routed_scaling_factor": 1.5, "norm_topk_prob": True, "first_k_dense_replace": 1,
        "sliding_window": None, "rope_parameters": _ROPE,
    },
    # 5.17 of Transformers turns all channels unless it is told so here.
    "minimax_m2": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
    },
    # The best expert of a group decides about it.
    "deepseek_v2": {
        **_LATENT, "topk_method": "group_limited_greedy", "head_dim": 8, "rope_parameters": YARN_ROPE,
        "routed_scaling_factor": 1.5,
    },
    "glm4_moe": {
        **FAMILY_SIZES["qwen3_moe"], "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 2,
        "routed_scaling_factor": 1.5, "attention_bias": True, "use_qk_norm": True,
        "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
    },
    "glm4_moe_lite": {**_LATENT, **_SPARSE_TYPES, "head_dim": 8, "rope_parameters": _ROPE},
    "hy_v3": {
        **_SPARSE_TYPES, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
        "rope_parameters": _ROPE,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 40, "rope_parameters": _ROPE,
        "moe_layer_interval": 2,
    },
    "gpt_oss": {
        "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 6,
        "rope_parameters": {
            **{name: size for name, size in YARN_ROPE.items() if "mscale" not in name}, "truncate": False,
        },
    },
}  # fmt: skip
# Heads of layers without a window are wider, and one shares all keys, which are values, too.
FAMILY_SIZES["gemma4_text"] = {
    "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 32,
    "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0, "bos_token_id": None, "eos_token_id": None,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}  # fmt: skip
FAMILY_SIZES["gemma4_text_moe"] = {
    "model_type": "gemma4_text", **FAMILY_SIZES["gemma4_text"], "enable_moe_block": True, "num_experts": 8,
    "top_k_experts": 2, "moe_intermediate_size": 40,
}  # fmt: skip
for _family in ("glm4_moe",):
    for _name in ("num_experts", "norm_topk_prob", "decoder_sparse_step"):
        FAMILY_SIZES[_family].pop(_name)

# Two value heads for each key head; rows longer than a chunk are in tests of the layer itself.
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    # The first tokens' outputs nearly cancel, and the norm behind them would make much of their rounding: with 1e-6
    # Transformers' own gradients in fp32 are 7e-5 off those in fp64.
    "rms_norm_eps": 1e-3,
    # Both kinds of layers in every half of the decoder.
    "full_attention_interval": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
FAMILY_SIZES |= {
    "qwen3_next": {
        **_DELTA,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
        "mlp_only_layers": [2],
    },
}

# Encoders of vision-language families, whose decoders are above. Small patches, and windows of 2 x 2 tokens.
_ENCODER: dict[str, Any] = {"depth": 4, "num_heads": 2, "patch_size": 4, "initializer_range": 0.2}
VISION_SIZES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {**_ENCODER, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 3},
    "qwen2_5_vl": {
        **_ENCODER,
        "hidden_size": 32,
        "intermediate_size": 44,
        "out_hidden_size": 64,
        "window_size": 16,
        "fullatt_block_indexes": [1, 3],
        "tokens_per_second": 2,
    },
    "qwen3_vl": {
        **_ENCODER,
        "hidden_size": 32,
        "intermediate_size": 44,
        "out_hidden_size": 64,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 2],
    },
}
VISION_SIZES["mistral3"] = {
    "num_hidden_layers": 4, "num_attention_heads": 2, "patch_size": 4, "initializer_range": 0.2, "hidden_size": 40,
    "intermediate_size": 44,
}  # fmt: skip
# Images of 6 x 6 patches, of which 2 x 2 are a token.
VISION_SIZES["gemma3"] = {
    "num_hidden_layers": 4, "num_attention_heads": 2, "patch_size": 4, "hidden_size": 32, "intermediate_size": 44,
    "image_size": 24, "vision_use_head": False,
}  # fmt: skip
VISION_SIZES["internvl"] = {
    "num_hidden_layers": 4, "num_attention_heads": 2, "patch_size": 4, "hidden_size": 32, "intermediate_size": 44,
    "image_size": 24, "attention_bias": True, "initializer_range": 0.2, "layer_scale_init_value": 0.7,
}  # fmt: skip
# Of 3 x 3 patches a token; half a head's channels turn by the column.
VISION_SIZES["gemma4"] = {
    "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4,
    "hidden_size": 32, "intermediate_size": 44, "position_embedding_size": 64, "initializer_range": 0.2,
    "standardize": True,
}  # fmt: skip
VISION_SIZES["qwen3_vl_moe"] = VISION_SIZES["qwen3_vl"]
VISION_SIZES["qwen3_5"] = {
    name: size for name, size in VISION_SIZES["qwen3_vl"].items() if name != "deepstack_visual_indexes"
}
VISION_SIZES["qwen3_5_moe"] = VISION_SIZES["qwen3_5"]
PICTURE_TOKENS = {
    "image_token_id": 297, "video_token_id": 298, "vision_start_token_id": 299, "vision_end_token_id": 300
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 10000.0}
_PARTIAL_MROPE = {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 2, 2], "mrope_interleaved": True}
FAMILY_SIZES |= {
    # As wide as hidden_size / num_attention_heads: these have no other head dimension.
    "qwen2_vl": {"head_dim": 16, "rope_parameters": {**_MROPE, "mrope_section": [2, 3, 3]}},
    "qwen2_5_vl": {"head_dim": 16, "rope_parameters": {**_MROPE, "mrope_section": [2, 3, 3]}},
    "qwen3_vl": {"rope_parameters": {**_MROPE, "mrope_section": [6, 3, 3], "mrope_interleaved": True}},
    "qwen3_5": _DELTA | {"rope_parameters": _PARTIAL_MROPE},
    "qwen3_5_moe": {
        **{name: size for name, size in FAMILY_SIZES["qwen3_next"].items() if name != "mlp_only_layers"},
        "initializer_range": 0.1,
        "rope_parameters": _PARTIAL_MROPE,
    },
    "qwen3_vl_moe": {
        **FAMILY_SIZES["qwen3_moe"],
        "rope_parameters": {**_MROPE, "mrope_section": [6, 3, 3], "mrope_interleaved": True},
    },
}
# Its decoder is of either family.
FAMILY_SIZES["mistral3"] = {"model_type": "ministral3", **FAMILY_SIZES["ministral3"]}
FAMILY_SIZES["internvl"] = {"model_type": "qwen3", "rope_parameters": _ROPE}
FAMILY_SIZES["gemma3"] = {
    "model_type": "gemma3_text", **FAMILY_SIZES["gemma3_text"], "layer_types": None, "sliding_window_pattern": 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}  # fmt: skip
FAMILY_SIZES |= {f"{family}_text": FAMILY_SIZES[family] for family in ("qwen3_5", "qwen3_5_moe")}


# Pictures' tokens see each other where there is a window, which is narrower than a picture.
FAMILY_SIZES["gemma4"] = {**FAMILY_SIZES["gemma4_text"], "use_bidirectional_attention": "vision"}


def tiny_config(model_type: str, **sizes: Any) -> Any:
    """Return Transformers' configuration of a tiny model.

    Args:
        sizes: of the decoder, in place of the usual ones; `vision_config` has those of the encoder.
    """
    from transformers import AutoConfig

    register_types()
    text = {**SIZES, **FAMILY_SIZES.get(model_type, {}), **sizes}
    if kinds := text.get("layer_types"):  # of as many layers, kinds taking turns
        text["layer_types"] = (kinds * text["num_hidden_layers"])[: text["num_hidden_layers"]]
    if model_type not in VISION_SIZES:
        return AutoConfig.for_model(text.pop("model_type", model_type), **text)
    vision, tied = {**VISION_SIZES[model_type], **text.pop("vision_config", {})}, text.get("tie_word_embeddings", False)
    text |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")) | {"tie_word_embeddings": tied}
    parts = {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied}
    if model_type == "mistral3":
        return AutoConfig.for_model(model_type, **parts, image_token_index=297)
    if model_type == "gemma3":
        tokens = {"image_token_index": 297, "boi_token_index": 299, "eoi_token_index": 300}
        return AutoConfig.for_model(model_type, **parts, **tokens, mm_tokens_per_image=9)
    if model_type == "gemma4":
        # Transformers cannot do without one there, and gives its embedding no gradient.
        text["pad_token_id"] = 296
        tokens = {"image_token_id": 297, "boi_token_id": 299, "eoi_token_id": 300}
        return AutoConfig.for_model(model_type, **parts, **tokens)
    if model_type == "internvl":
        return AutoConfig.for_model(model_type, **parts, image_token_id=297, image_seq_length=9)
    return AutoConfig.for_model(model_type, **parts, **PICTURE_TOKENS)


def model_class(model_type: str) -> Any:
    """Return Transformers' class that makes models of the family."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if model_type in VISION_SIZES else AutoModelForCausalLM
