"""The config.json of a demo model: arguments of Transformers' configuration classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatune.demo.family import DemoFamily
from megatune.demo.sizes import ATTENTION_BIAS, DELTA_NORM_EPSILON, ModelSizes
from megatune.demo.vision import mrope_parameters, vision_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROPE_STRETCH = 8.0  # how much longer the model reads than it was "pretrained" to, as in Llama 3.1


def config_arguments(family: DemoFamily, sizes: ModelSizes, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return arguments of Transformers' configuration class, for resolved sizes."""
    text = _text_arguments(family, sizes, tokenizer)
    if family.vision is None:
        return text
    vision = family.vision
    if vision.decoder:
        text["model_type"] = vision.decoder
    return {
        "text_config": text,
        "vision_config": vision_config(vision, sizes),
        **{key: tokenizer.convert_tokens_to_ids(token) for key, token in vision.tokens.items()},
        **vision.root,
        "tie_word_embeddings": sizes.tie_word_embeddings,
        "dtype": text["dtype"],
    }


def _text_arguments(family: DemoFamily, sizes: ModelSizes, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    arguments = {
        "num_hidden_layers": sizes.num_layers,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.ffn_hidden_size,
        "num_attention_heads": sizes.num_attention_heads,
        "num_key_value_heads": sizes.num_query_groups,
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": sizes.max_position_embeddings,
        "tie_word_embeddings": sizes.tie_word_embeddings,
        "rope_parameters": _rope_parameters(family, sizes),
        "rms_norm_eps": DELTA_NORM_EPSILON if family.has_delta_nets else family.norm_epsilon,
        # Wide enough that attention is far from uniform: a wrong rotary embedding must show in the logits.
        "initializer_range": sizes.hidden_size**-0.5,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": sizes.dtype,
    }
    if family.vision is None or not family.vision.mrope_section or family.wide_heads:
        arguments["head_dim"] = sizes.head_dim
    if family.model_type in ATTENTION_BIAS:
        arguments["attention_bias"] = sizes.attention_bias
    if family.model_type == "llama":
        arguments["mlp_bias"] = sizes.mlp_bias
    if family.has_latent_attention:
        # Latents that are no wider than they must be to differ from everything else.
        arguments |= {"q_lora_rank": sizes.hidden_size // 2 + 4, "kv_lora_rank": sizes.hidden_size // 2}
        arguments |= dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), sizes.head_dim)
    if family.has_delta_nets:
        arguments |= {"linear_num_key_heads": sizes.num_attention_heads, "full_attention_interval": 2}
        arguments |= {"linear_num_value_heads": 2 * sizes.num_attention_heads}
        arguments |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), sizes.head_dim)
    if family.model_type in ("gemma4_text", "gemma4"):
        arguments["global_head_dim"] = 2 * (sizes.head_dim or 0)
    if family.has_experts:
        arguments |= _experts(family.model_type, sizes)
    return arguments | dict(family.own)


def _rope_parameters(family: DemoFamily, sizes: ModelSizes) -> dict[str, Any]:
    stretch = {
        "factor": ROPE_STRETCH,
        "original_max_position_embeddings": int(sizes.max_position_embeddings / ROPE_STRETCH),
    }
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": family.rope_theta}
    if family.llama3_rope_scaling:
        parameters |= {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **stretch}
    if family.has_latent_attention:
        parameters |= {"rope_type": "yarn", "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
        parameters |= stretch
    if family.model_type == "gpt_oss":
        parameters |= {"rope_type": "yarn", "beta_fast": 32, "beta_slow": 1, "truncate": False, **stretch}
    if family.model_type in ("ministral3", "mistral3"):
        parameters |= {
            "rope_type": "yarn",
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
            **stretch,
        }
    if family.model_type in ("gemma4_text", "gemma4"):
        parameters |= {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    if family.model_type in ("gemma3_text", "gemma3", "gemma4_text", "gemma4", "olmo3"):
        local = {"rope_type": "default", "rope_theta": 10_000.0}
        return {"full_attention": parameters, "sliding_attention": local}
    head_dim = sizes.head_dim or 0
    if family.has_delta_nets:
        head_dim //= 2
        parameters["partial_rotary_factor"] = 0.5
    if family.vision and family.vision.mrope_section:
        parameters |= mrope_parameters(family.vision, head_dim)
    return parameters


def _experts(model_type: str, sizes: ModelSizes) -> dict[str, Any]:
    # Families with experts have defaults.
    own: dict[str, Any]
    num_experts, topk, ffn = sizes.num_experts or 0, sizes.router_topk or 0, sizes.moe_ffn_hidden_size or 0
    match model_type:
        case "qwen2_moe" | "qwen3_next" | "qwen3_5_moe" | "qwen3_5_moe_text":
            own = {"num_experts": num_experts, "shared_expert_intermediate_size": 2 * ffn}
        case "qwen3_moe" | "qwen3_vl_moe":
            own = {"num_experts": num_experts, "norm_topk_prob": True}
        case "gemma4_text":
            moe = {"enable_moe_block": True, "num_experts": num_experts, "top_k_experts": topk}
            return {**moe, "moe_intermediate_size": ffn}
        case "hy_v3":
            own = {"num_experts": num_experts}
        case "ernie4_5_moe":
            return {"moe_num_experts": num_experts, "moe_k": topk, "moe_intermediate_size": ffn}
        case "mixtral" | "minimax_m2" | "gpt_oss":
            return {"num_local_experts": num_experts, "num_experts_per_tok": topk, "intermediate_size": ffn}
        case _:
            # Four groups of two experts or more, of which two are chosen, where that leaves enough to choose from.
            grouped = num_experts % 4 == 0 and num_experts >= max(8, 2 * topk)
            own = {
                "n_routed_experts": num_experts,
                "n_shared_experts": 1,
                "n_group": 4 if grouped else 1,
                "topk_group": 2 if grouped else 1,
                "first_k_dense_replace": 1,
                "num_nextn_predict_layers": 0,
            }
            if model_type == "deepseek_v2":
                own["topk_method"] = "group_limited_greedy"
    return {"num_experts_per_tok": topk, "moe_intermediate_size": ffn, **own}
