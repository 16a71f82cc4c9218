"""Gemma 4 with images, 26B and 31B: Gemma 4's decoder, in which image tokens see each other in layers with a window,
and its encoder. The tensors of the audio encoder are written back unchanged."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatune.architecture import Architecture
from megatune.encoders import MediaPlaceholder, VisionLayers
from megatune.families import gemma4_text
from megatune.families.family import Config
from megatune.families.sparse import fused_experts
from megatune.families.values import side
from megatune.families.vision import H, V, VisionDeclaration, as_decoder, layers, projector, tower
from megatune.families.weights import HFTensor, Role

_LAYER = "encoder.layers.{layer}"


def _is_standardized(architecture: Architecture) -> bool:
    vision = architecture.vision
    return vision is not None and vision.layers is not None and vision.layers.standardized


# Matrices are in modules that could clip their inputs, which peft does not adapt.
ENCODER = (
    tower("patch_embed.weight", "patch_embedder.input_proj.weight", V, "vision.patch_channels", linear=False),
    tower("positions", "patch_embedder.position_embedding_table", 2, "vision.layers.num_positions", V, linear=False),
    *(replace(each, linear=False) for each in layers(_LAYER, {
        "norm1": "input_layernorm", "norm2": "pre_feedforward_layernorm",
        **{f"attention.{each}_proj": f"self_attn.{each}_proj.linear" for each in "qkvo"},
        **{f"mlp.{each}_proj": f"mlp.{each}_proj.linear" for each in ("gate", "up", "down")},
    })),
    *(
        tower(f"layers.{{layer}}.post_norm{number}.weight", f"{_LAYER}.post_{name}_layernorm.weight", V)
        for number, name in ((1, "attention"), (2, "feedforward"))
    ),
    *(
        tower(f"layers.{{layer}}.attention.{each}_norm.weight", f"{_LAYER}.self_attn.{each}_norm.weight",
              "vision.head_channels")
        for each in "qk"
    ),
    *(
        tower(f"projector.{each}", each, V, role=Role.BUFFER, exists=_is_standardized)
        for each in ("std_bias", "std_scale")
    ),
    replace(
        projector("projection.weight", "", H, V),
        hf=(HFTensor("model.embed_vision.embedding_projection.weight", (H, V)),), linear=False,
    ),
)  # fmt: skip


def _vision(config: Config) -> dict[str, Any]:
    """Read the vision settings outside vision_config, with the defaults of Transformers' Gemma4Config."""
    vision, epsilon = config["vision_config"], config["vision_config"].get("rms_norm_eps") or 1e-6
    text = VISION.text_config(config)
    return {
        "out_hidden_size": text["hidden_size"],
        "tokens_of_image": config.get("vision_soft_tokens_per_image") or 280,
        "whole": text.get("use_bidirectional_attention") == "vision",
        "vision_start_token_id": config.get("boi_token_id") or 255999,
        "vision_end_token_id": config.get("eoi_token_id") or 258882,
        "image_token_id": config.get("image_token_id") or 258880,
        "layers": VisionLayers(
            norm_epsilon=epsilon, rotary_base=float((vision.get("rope_parameters") or {}).get("rope_theta") or 100.0),
            num_positions=side(vision.get("position_embedding_size") or 10240), axial=True, head_norms=True,
            post_norms=True, unit_pixels=True, standardized=bool(vision.get("standardize")),
            projector="scaled_average", projector_norm_epsilon=epsilon,
        ),
    }  # fmt: skip


def _wrong(config: Config) -> Iterator[tuple[str, str]]:
    written = {key: value for key, value in config["vision_config"].items() if value is not None}
    vision = {"num_attention_heads": 12, "hidden_size": 768, "head_dim": 64, **written}
    heads, channels = vision["num_attention_heads"], vision["head_dim"]
    if heads * channels != vision["hidden_size"] or (vision.get("num_key_value_heads") or heads) != heads:
        what = f"vision_config: {heads} heads of {channels} channels with {vision.get('num_key_value_heads')} key heads"
        yield f"{what} is not supported", f"each head needs keys, and all together are {vision['hidden_size']} wide"


VISION = VisionDeclaration(
    keys={
        "depth": "num_hidden_layers", "num_heads": "num_attention_heads", "hidden_act": "hidden_activation",
        "spatial_merge_size": "pooling_kernel_size",
    },
    required={
        "vision_config.use_clipped_linears": False, "vision_config.attention_bias": False,
        "vision_config.attention_dropout": 0, "vision_config.hidden_activation": "gelu_pytorch_tanh",
    },
    wrong=_wrong,
    defaults={
        "depth": 16, "num_heads": 12, "hidden_size": 768, "intermediate_size": 3072, "patch_size": 16,
        "spatial_merge_size": 3,
    },
    constants={
        "gated": True, "temporal_patch_size": 1, "video_token_id": -1, "whole_in_windows": True,
        "text": MediaPlaceholder(image="<|image|>", video="", start="<|image>", end="<image|>"),
    },
    read=_vision,
)  # fmt: skip
FAMILY = replace(
    gemma4_text.FAMILY,
    model_type="gemma4",
    weights=(*as_decoder(gemma4_text.FAMILY.weights), *ENCODER),
    vision=VISION,
    carried_keys=(r"model\.(audio_tower|embed_audio)\..+",),
    forms=(fused_experts("model.language_model.layers.{layer}.experts"),),
)
