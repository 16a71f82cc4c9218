"""Qwen2-VL: Qwen2's decoder, and an encoder with LayerNorm and without gated feed-forwards."""

from dataclasses import replace

from megatune.families import qwen2
from megatune.families.forms import AS_MAPPED
from megatune.families.vision import (
    ATTENTION,
    BEFORE_MODULES,
    LAYER,
    LAYER_NORMS,
    MERGER,
    PATCHES,
    SIZES,
    VisionDeclaration,
    as_decoder,
    part_with_bias,
)
from megatune.families.weights import Stack
from megatune.rope_scaling import MultimodalRope

VISION = VisionDeclaration(
    encoder="transformers.models.qwen2_vl.modeling_qwen2_vl:Qwen2VisionTransformerPretrainedModel",
    # hidden_size is called out_hidden_size in later families.
    keys={"hidden_size": "embed_dim", "out_hidden_size": "hidden_size"},
    dimensions=(*SIZES, "embed_dim", "hidden_size", "mlp_ratio"),
    defaults={"hidden_act": "quick_gelu"},
    read=lambda config: {
        "intermediate_size": config["vision_config"]["embed_dim"] * config["vision_config"]["mlp_ratio"]
    },
    text_ties=True,
    mrope=MultimodalRope(section=(16, 24, 24), interleaved=False),
)
FAMILY = replace(
    qwen2.FAMILY,
    model_type="qwen2_vl",
    weights=(
        *as_decoder(qwen2.FAMILY.weights),
        PATCHES,
        *LAYER_NORMS,
        *ATTENTION,
        *part_with_bias(Stack.VISION, f"{LAYER}.mlp.fc1", "intermediate_size", "hidden_size"),
        *part_with_bias(Stack.VISION, f"{LAYER}.mlp.fc2", "hidden_size", "intermediate_size"),
        *part_with_bias(Stack.PROJECTOR, "merger.ln_q", "hidden_size"),
        *MERGER,
    ),
    vision=VISION,
    forms=(BEFORE_MODULES, AS_MAPPED),
)
