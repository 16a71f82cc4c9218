"""Qwen3-VL-MoE: Qwen3-VL with Qwen3-MoE's decoder."""

from dataclasses import replace

from megatune.families import qwen3_moe, qwen3_vl
from megatune.families.forms import AS_MAPPED
from megatune.families.sparse import fused_experts
from megatune.families.vision import as_decoder

_EXPERTS = "model.language_model.layers.{layer}.mlp.experts"

FAMILY = replace(
    qwen3_moe.FAMILY,
    model_type="qwen3_vl_moe",
    weights=(*as_decoder(qwen3_moe.FAMILY.weights), *qwen3_vl.ENCODER),
    vision=replace(
        qwen3_vl.VISION,
        encoder="transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe:Qwen3VLMoeVisionModel",
        # Transformers normalizes the scores of chosen experts, and only reads the root's tie_word_embeddings,
        # regardless of text_config.
        text={"norm_topk_prob": True, "tie_word_embeddings": None},
    ),
    # Published checkpoints have transposed experts' matrices; Transformers 5 saves them as in its modules.
    forms=(fused_experts(_EXPERTS, transposed=True), fused_experts(_EXPERTS), AS_MAPPED),
)
