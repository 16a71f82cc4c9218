"""Qwen3-VL-MoE: Qwen3-VL with Qwen3-MoE's decoder."""

from dataclasses import replace

from megatune.families import qwen3_moe, qwen3_vl

FAMILY = replace(
    qwen3_vl.FAMILY,
    model_type="qwen3_vl_moe",
    decoder=qwen3_moe.FAMILY,
    # Transformers normalizes the chosen experts' shares and lets the root say whether embeddings are tied, whatever
    # text_config has.
    text={"norm_topk_prob": True, "tie_word_embeddings": None},
)
