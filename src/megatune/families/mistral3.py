"""Mistral Small 3.1 and later, Ministral 3: Mistral's or Ministral 3's decoder, and Pixtral's encoder."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatune.architecture import Architecture
from megatune.encoders import MediaPlaceholder, VisionLayers
from megatune.families import ministral3, mistral
from megatune.families.family import Config
from megatune.families.vision import FORMS, PATCH_SHAPE, H, V, VisionDeclaration, as_decoder, layers, projector, tower


def _has_bias(architecture: Architecture) -> bool:
    vision = architecture.vision
    return vision is not None and vision.layers is not None and vision.layers.projector_bias


ENCODER = (
    tower("patch_embed.weight", "patch_conv.weight", *PATCH_SHAPE),
    tower("pre_norm.weight", "ln_pre.weight", V),
    *layers("transformer.layers.{layer}", {
        "norm1": "attention_norm", "norm2": "ffn_norm",
        **{f"attention.{each}_proj": f"attention.{each}_proj" for each in "qkvo"},
        **{f"mlp.{each}_proj": f"feed_forward.{each}_proj" for each in ("gate", "up", "down")},
    }),
    projector("norm.weight", "norm.weight", V),
    projector("merging_layer.weight", "patch_merger.merging_layer.weight", V, "vision.merged_size"),
    projector("linear_1.weight", "linear_1.weight", H, V),
    projector("linear_1.bias", "linear_1.bias", H, exists=_has_bias),
    projector("linear_2.weight", "linear_2.weight", H, H),
    projector("linear_2.bias", "linear_2.bias", H, exists=_has_bias),
)  # fmt: skip


def _vision(config: Config) -> dict[str, Any]:
    """Read the vision settings outside vision_config, with the defaults of Transformers' Mistral3Config."""
    vision, text = config["vision_config"], VISION.text_config(config)
    rope = vision.get("rope_parameters") or vision
    return {
        "out_hidden_size": text["hidden_size"],
        "spatial_merge_size": config.get("spatial_merge_size") or 2,
        "image_token_id": config.get("image_token_index") or config.get("image_token_id") or 10,
        "layers": VisionLayers(
            norm_epsilon=1e-5,
            rotary_base=float(rope.get("rope_theta") or 10000.0),
            pre_norm=True,
            projector_norm_epsilon=text.get("rms_norm_eps") or 1e-6,
            projector_bias=bool(config.get("multimodal_projector_bias")),
        ),
    }


def _numbers(text: Config) -> dict[str, Any]:
    return ministral3.query_scaling(text) if text.get("model_type") == "ministral3" else {}


def _problems(text: Config) -> Iterator[tuple[str, str]]:
    if text.get("model_type") == "ministral3":
        yield from ministral3.query_scaling_problems(text)


VISION = VisionDeclaration(
    keys={"depth": "num_hidden_layers", "num_heads": "num_attention_heads", "in_channels": "num_channels"},
    required={
        "vision_feature_layer": -1, "projector_hidden_act": "gelu",
        "vision_config.model_type": "pixtral", "vision_config.attention_dropout": 0,
    },
    decoders={family.model_type: family for family in (mistral.FAMILY, ministral3.FAMILY)},
    defaults={
        "depth": 24, "num_heads": 16, "hidden_size": 1024, "intermediate_size": 4096, "patch_size": 16,
        "hidden_act": "gelu",
    },
    constants={
        "gated": True, "temporal_patch_size": 1, "video_token_id": -1, "vision_start_token_id": -1,
        "vision_end_token_id": -1,
        "text": MediaPlaceholder(image="[IMG]", video="", start="", end="[IMG_END]", row_end="[IMG_BREAK]"),
    },
    read=_vision,
)  # fmt: skip
FAMILY = replace(
    mistral.FAMILY,
    model_type="mistral3",
    weights=(*as_decoder(mistral.FAMILY.weights), *ENCODER),
    defaults={},
    derive=_numbers,
    problems=_problems,
    vision=VISION,
    forms=FORMS,
)
