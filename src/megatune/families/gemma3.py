"""Gemma 3 with images, 4B and larger: Gemma 3's decoder, in which image tokens see each other, and SigLIP's encoder."""

from dataclasses import replace
from math import isqrt
from typing import Any

from megatune.encoders import MediaPlaceholder, VisionLayers
from megatune.families import gemma3_text
from megatune.families.family import Config
from megatune.families.values import side
from megatune.families.vision import (
    FORMS,
    PATCH_SHAPE,
    WITH_VISION_MODEL,
    H,
    V,
    VisionDeclaration,
    as_decoder,
    layers,
    projector,
    tower,
    with_bias,
)

ENCODER = (
    *with_bias(tower, "patch_embed", "embeddings.patch_embedding", *PATCH_SHAPE),
    tower("positions", "embeddings.position_embedding.weight", "vision.layers.num_positions", V, linear=False),
    *layers("encoder.layers.{layer}", {
        "norm1": "layer_norm1", "norm2": "layer_norm2",
        **{f"attention.{each}_proj": f"self_attn.{each}_proj" for each in "qkv"},
        "attention.o_proj": "self_attn.out_proj",
        "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2",
    }, bias=True),
    *with_bias(tower, "final_norm", "post_layernorm", V),
    projector("norm", "mm_soft_emb_norm.weight", V),
    projector("projection", "mm_input_projection_weight", V, H, linear=False),
)  # fmt: skip
# Defaults of files published with Transformers 4.50, which omit these keys.
_DECODER = replace(
    gemma3_text.FAMILY,
    defaults={
        **gemma3_text.FAMILY.defaults, "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4,
        "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    },
)  # fmt: skip


def _vision(config: Config) -> dict[str, Any]:
    """Read the vision settings outside vision_config, with the defaults of Transformers' Gemma3Config."""
    vision, tokens = config["vision_config"], config.get("mm_tokens_per_image") or 256
    square, patch = side(vision.get("image_size") or 224), side(vision.get("patch_size") or 16)
    patches = square // patch
    epsilon = vision.get("layer_norm_eps") or 1e-6
    return {
        "out_hidden_size": VISION.text_config(config)["hidden_size"],
        "spatial_merge_size": max(1, patches // isqrt(tokens)),
        "square": square,
        "patch_size": patch,
        "image_token_id": config.get("image_token_index") or config.get("image_token_id") or 262144,
        "vision_start_token_id": config.get("boi_token_index") or 255999,
        "vision_end_token_id": config.get("eoi_token_index") or 256000,
        "layers": VisionLayers(
            norm_epsilon=epsilon, num_positions=patches**2, layer_norm=True, bias=True, final_norm=True,
            projector="average", projector_norm_epsilon=epsilon,
        ),
    }  # fmt: skip


VISION = VisionDeclaration(
    keys={"depth": "num_hidden_layers", "num_heads": "num_attention_heads", "in_channels": "num_channels"},
    required={
        "vision_config.model_type": "siglip_vision_model", "vision_config.attention_dropout": 0,
        "vision_config.vision_use_head": False,
    },
    decoders={"gemma3_text": _DECODER},
    defaults={"depth": 12, "num_heads": 12, "hidden_size": 768, "intermediate_size": 3072, "patch_size": 16},
    constants={
        "temporal_patch_size": 1, "video_token_id": -1, "whole": True,
        "text": MediaPlaceholder(
            image="<image_soft_token>", video="", start="<start_of_image>", end="<end_of_image>", around="\n\n"
        ),
    },
    read=_vision,
)  # fmt: skip
FAMILY = replace(
    gemma3_text.FAMILY,
    model_type="gemma3",
    weights=(*as_decoder(gemma3_text.FAMILY.weights), *ENCODER),
    vision=VISION,
    forms=(WITH_VISION_MODEL, *FORMS),
)
