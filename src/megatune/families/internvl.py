"""InternVL 3 and 3.5 in Transformers' format: a dense Qwen2.5 or Qwen3 with the encoder InternViT."""

from dataclasses import replace
from typing import Any

from megatune.encoders import MediaPlaceholder, VisionLayers
from megatune.families import qwen2, qwen3
from megatune.families.dense import DECODER, QK_NORMS, QKV_BIAS
from megatune.families.family import Config
from megatune.families.values import side
from megatune.families.vision import (
    FORMS,
    PATCH_SHAPE,
    H,
    V,
    VisionDeclaration,
    as_decoder,
    layers,
    projector,
    tower,
    with_bias,
)

_LAYER = "encoder.layer.{layer}"
ENCODER = (
    *with_bias(tower, "patch_embed", "embeddings.patch_embeddings.projection", *PATCH_SHAPE),
    tower("positions", "embeddings.position_embeddings", 1, "vision.layers.num_positions", V),
    tower("class_token", "embeddings.cls_token", 1, 1, V),
    *layers(_LAYER, {
        "norm1": "layernorm_before", "norm2": "layernorm_after",
        **{f"attention.{each}_proj": f"attention.{each}_proj" for each in "qkv"},
        "attention.o_proj": "attention.projection_layer", "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2",
    }, bias=True),
    *(tower(f"layers.{{layer}}.scale{each}", f"{_LAYER}.lambda_{each}", V) for each in "12"),
    *with_bias(projector, "norm", "layer_norm", "vision.merged_size"),
    *with_bias(projector, "linear_1", "linear_1", H, "vision.merged_size"),
    *with_bias(projector, "linear_2", "linear_2", H, H),
)  # fmt: skip


def _vision(config: Config) -> dict[str, Any]:
    vision = config["vision_config"]
    square, patch = side(vision.get("image_size") or 448), side(vision.get("patch_size") or 14)
    return {
        "out_hidden_size": VISION.text_config(config)["hidden_size"],
        "spatial_merge_size": round(1 / (config.get("downsample_ratio") or 0.5)),
        "square": square,
        "patch_size": patch,
        "image_token_id": config.get("image_token_id") or 151667,
        "layers": VisionLayers(
            norm_epsilon=vision.get("layer_norm_eps") or 1e-6, num_positions=(square // patch) ** 2 + 1,
            layer_norm=True, bias=True, class_token=True, layer_scale=True, projector="side_by_side",
        ),
    }  # fmt: skip


VISION = VisionDeclaration(
    keys={"depth": "num_hidden_layers", "num_heads": "num_attention_heads", "in_channels": "num_channels"},
    required={
        "vision_feature_layer": -1, "vision_feature_select_strategy": "default", "projector_hidden_act": "gelu",
        "vision_config.attention_bias": True, "vision_config.use_qk_norm": False,
        "vision_config.norm_type": "layer_norm", "vision_config.use_absolute_position_embeddings": True,
        "vision_config.use_mean_pooling": True, "vision_config.use_mask_token": False,
        **{f"vision_config.{each}": 0 for each in ("hidden_dropout_prob", "attention_dropout", "projection_dropout")},
    },
    decoders={family.model_type: family for family in (qwen2.FAMILY, qwen3.FAMILY)},
    defaults={
        "depth": 24, "num_heads": 16, "hidden_size": 1024, "intermediate_size": 4096, "hidden_act": "gelu",
    },
    constants={
        "temporal_patch_size": 1, "video_token_id": -1, "vision_start_token_id": -1, "vision_end_token_id": -1,
        "tiles": True,
        "text": MediaPlaceholder(image="<IMG_CONTEXT>", video="", start="<img>", end="</img>"),
    },
    read=_vision,
)  # fmt: skip
FAMILY = replace(
    qwen3.FAMILY,
    model_type="internvl",
    weights=(*as_decoder((*DECODER, QKV_BIAS, *QK_NORMS)), *ENCODER),
    constants={},
    derive=lambda text: {
        name: kind == text.get("model_type", "qwen2")
        for kind, name in (("qwen2", "add_qkv_bias"), ("qwen3", "qk_layernorm"))
    },
    head_dim_default=None,
    vision=VISION,
    forms=FORMS,
)
