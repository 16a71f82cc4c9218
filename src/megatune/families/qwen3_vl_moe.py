"""Qwen3-VL-MoE: Qwen3-VL with Qwen3-MoE's decoder."""

from dataclasses import replace

from megatune.families import qwen3_moe, qwen3_vl
from megatune.families.forms import AS_MAPPED, CheckpointForm
from megatune.families.vision import as_decoder

_FUSED = (
    ("decoder.layers.{layer}.mlp.experts.weight1", "model.language_model.layers.{layer}.mlp.experts.gate_up_proj"),
    ("decoder.layers.{layer}.mlp.experts.weight2", "model.language_model.layers.{layer}.mlp.experts.down_proj"),
)

FAMILY = replace(
    qwen3_moe.FAMILY,
    model_type="qwen3_vl_moe",
    weights=(*as_decoder(qwen3_moe.FAMILY.weights), *qwen3_vl.ENCODER),
    vision=replace(
        qwen3_vl.VISION,
        encoder="transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe:Qwen3VLMoeVisionModel",
        # Transformers normalizes the chosen experts' shares and lets the root say whether embeddings are tied, whatever
        # text_config has.
        text={"norm_topk_prob": True, "tie_word_embeddings": None},
    ),
    # Published checkpoints have experts' matrices transposed; Transformers 5 saves them as its modules hold them.
    forms=(CheckpointForm(fused=_FUSED, transposed=True), CheckpointForm(fused=_FUSED), AS_MAPPED),
)
