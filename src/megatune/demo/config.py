"""What a demo model's configuration says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatune.demo.family import DemoFamily
from megatune.demo.sizes import ATTENTION_BIAS, ModelSizes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROPE_STRETCH = 8.0  # how much longer the model reads than it was "pretrained" to, as in Llama 3.1


def config_arguments(family: DemoFamily, sizes: ModelSizes, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Arguments of Transformers' configuration class."""
    arguments = {
        "num_hidden_layers": sizes.num_layers,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.ffn_hidden_size,
        "num_attention_heads": sizes.num_attention_heads,
        "num_key_value_heads": sizes.num_query_groups,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": sizes.max_position_embeddings,
        "tie_word_embeddings": sizes.tie_word_embeddings,
        "rope_parameters": _rope_parameters(family, sizes),
        "rms_norm_eps": family.norm_epsilon,
        # Wide enough that attention is far from uniform: a wrong rotary embedding must show in the logits.
        "initializer_range": sizes.hidden_size**-0.5,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": sizes.dtype,
    }
    if family.model_type in ATTENTION_BIAS:
        arguments["attention_bias"] = sizes.attention_bias
    if family.model_type == "llama":
        arguments["mlp_bias"] = sizes.mlp_bias
    if family.has_latent_attention:
        arguments |= _latent_attention(sizes)
    if family.has_experts:
        arguments |= _experts(family.model_type, sizes)
    return arguments


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
    return parameters


def _latent_attention(sizes: ModelSizes) -> dict[str, Any]:
    # Latents that are no wider than they must be to differ from everything else.
    return {
        "q_lora_rank": sizes.hidden_size // 2 + 4,
        "kv_lora_rank": sizes.hidden_size // 2,
        "qk_nope_head_dim": sizes.head_dim,
        "qk_rope_head_dim": sizes.head_dim,
        "v_head_dim": sizes.head_dim,
    }


def _experts(model_type: str, sizes: ModelSizes) -> dict[str, Any]:
    num_experts, topk, ffn = sizes.num_experts, sizes.router_topk, sizes.moe_ffn_hidden_size
    assert num_experts is not None, "families with experts have defaults"
    assert topk is not None
    assert ffn is not None
    match model_type:
        case "qwen2_moe":
            own = {"num_experts": num_experts, "shared_expert_intermediate_size": 2 * ffn}
        case "qwen3_moe":
            own = {"num_experts": num_experts, "norm_topk_prob": True}
        case "mixtral":
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
    return {"num_experts_per_tok": topk, "moe_intermediate_size": ffn, **own}
