"""Qwen2.5-VL: Qwen2's decoder, and an encoder with RMSNorm, SwiGLU and attention within windows."""

from dataclasses import replace

from megatune.families import qwen2, qwen2_vl
from megatune.families.vision import ATTENTION, LAYER, MERGER, PATCHES, SIZES, as_decoder, part, part_with_bias
from megatune.families.weights import Stack

FAMILY = replace(
    qwen2_vl.FAMILY,
    model_type="qwen2_5_vl",
    weights=(
        *as_decoder(qwen2.FAMILY.weights),
        PATCHES,
        part(Stack.VISION, f"{LAYER}.norm1.weight", "hidden_size"),
        part(Stack.VISION, f"{LAYER}.norm2.weight", "hidden_size"),
        *ATTENTION,
        *part_with_bias(Stack.VISION, f"{LAYER}.mlp.gate_proj", "intermediate_size", "hidden_size"),
        *part_with_bias(Stack.VISION, f"{LAYER}.mlp.up_proj", "intermediate_size", "hidden_size"),
        *part_with_bias(Stack.VISION, f"{LAYER}.mlp.down_proj", "hidden_size", "intermediate_size"),
        part(Stack.PROJECTOR, "merger.ln_q.weight", "hidden_size"),
        *MERGER,
    ),
    vision=replace(
        qwen2_vl.VISION,
        encoder="transformers.models.qwen2_5_vl.modeling_qwen2_5_vl:Qwen2_5_VisionTransformerPretrainedModel",
        keys={},
        dimensions=(*SIZES, "hidden_size", "intermediate_size", "out_hidden_size"),
        read=None,
        defaults={
            "hidden_act": "silu",
            "window_size": 112,
            "fullatt_block_indexes": (7, 15, 23, 31),
            "tokens_per_second": 4,
        },
        constants={"gated": True},
    ),
)
