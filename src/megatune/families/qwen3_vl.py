"""Qwen3-VL: Qwen3's decoder, and an encoder with position embeddings, whose layers feed the decoder's first layers."""

from dataclasses import replace

from megatune.families import qwen3
from megatune.families.vision import (
    ATTENTION,
    LAYER,
    LAYER_NORMS,
    PATCHES,
    SIZES,
    VisionDeclaration,
    as_decoder,
    part,
    part_with_bias,
)
from megatune.families.weights import Stack, Weight
from megatune.rope_scaling import MultimodalRope

_DEEPSTACK = "deepstack_merger_list.{layer}"


def _merger(stack: Stack, name: str, normalized: str) -> tuple[Weight, ...]:
    """Declare a merger; `normalized` is the size of its norm."""
    return (
        *part_with_bias(stack, f"{name}.norm", normalized),
        *part_with_bias(stack, f"{name}.linear_fc1", "merged_size", "merged_size"),
        *part_with_bias(stack, f"{name}.linear_fc2", "out_hidden_size", "merged_size"),
    )


ENCODER = (
    PATCHES,
    part(Stack.VISION, "patch_embed.proj.bias", "hidden_size"),
    part(Stack.VISION, "pos_embed.weight", "num_position_embeddings", "hidden_size", linear=False),
    *LAYER_NORMS,
    *ATTENTION,
    *part_with_bias(Stack.VISION, f"{LAYER}.mlp.linear_fc1", "intermediate_size", "hidden_size"),
    *part_with_bias(Stack.VISION, f"{LAYER}.mlp.linear_fc2", "hidden_size", "intermediate_size"),
    # The last layer's merger normalizes single patches, those of earlier layers normalize merged ones.
    *_merger(Stack.PROJECTOR, "merger", "hidden_size"),
    *_merger(Stack.DEEPSTACK, _DEEPSTACK, "merged_size"),
)

VISION = VisionDeclaration(
    encoder="transformers.models.qwen3_vl.modeling_qwen3_vl:Qwen3VLVisionModel",
    dimensions=(*SIZES, "hidden_size", "intermediate_size", "out_hidden_size", "num_position_embeddings"),
    defaults={"deepstack_visual_indexes": (8, 16, 24)},
    constants={"timestamps": True},
    mrope=MultimodalRope(section=(24, 20, 20), interleaved=True),
)
FAMILY = replace(
    qwen3.FAMILY,
    model_type="qwen3_vl",
    weights=(*as_decoder(qwen3.FAMILY.weights), *ENCODER),
    vision=VISION,
)
