"""Vision encoders of demo families: vision_config, and the files of image and video processors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatune.demo.sizes import ModelSizes


_QWEN_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoVision:
    """The vision encoder of a demo family.

    Attributes:
        processor: keys of preprocessor_config.json, as published.
        video_processor: keys of video_preprocessor_config.json; empty if none is published, and Transformers uses that
            of images for videos.
        joint: keys of processor_config.json; empty if none is published.
        mrope_section: frequencies of height, and of width, out of 64; the others are for time. 0 without multimodal
            positions.
        mrope_interleaved: frequencies of time, height and width alternate.
        windows: attention is within windows, except in some layers.
        deepstack: features of encoder layers are added to the decoder's first layers.
        table: it has a table of position embeddings.
        decoder: model_type of the decoder, for encoders with other keys than Qwen's.
        own_head_dim: vision_config has the head dimension.
        encoder: further keys of that encoder's vision_config.
        root: further keys of config.json.
        tokens: keys of config.json -> the tokens whose ids they are.
        named_tokens: extra_special_tokens of tokenizer_config.json, with which Transformers' processor finds its
            tokens; empty if it knows them.
    """

    processor: Mapping[str, Any]
    video_processor: Mapping[str, Any] = field(default_factory=dict)
    joint: Mapping[str, Any] = field(default_factory=dict)
    mrope_section: int = 0
    mrope_interleaved: bool = False
    windows: bool = False
    deepstack: bool = False
    table: bool = False
    decoder: str = ""
    own_head_dim: bool = False
    encoder: Mapping[str, Any] = field(default_factory=dict)
    root: Mapping[str, Any] = field(default_factory=dict)
    tokens: Mapping[str, str] = field(default_factory=lambda: _QWEN_TOKENS)
    named_tokens: Mapping[str, str] = field(default_factory=dict)


_CLIP = {
    "min_pixels": 3136,
    "max_pixels": 12_845_056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
}
_HALF = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
}

QWEN2_VL = DemoVision(processor={**_CLIP, "processor_class": "Qwen2VLProcessor"}, mrope_section=24)
QWEN2_5_VL = DemoVision(processor={**_CLIP, "processor_class": "Qwen2_5_VLProcessor"}, mrope_section=24, windows=True)
QWEN3_VL = DemoVision(
    processor={
        "size": {"longest_edge": 16_777_216, "shortest_edge": 65_536},
        **_HALF,
        "image_processor_type": "Qwen2VLImageProcessorFast",
    },
    video_processor={
        "size": {"longest_edge": 25_165_824, "shortest_edge": 4096},
        **_HALF,
        "video_processor_type": "Qwen3VLVideoProcessor",
    },
    mrope_section=20,
    mrope_interleaved=True,
    deepstack=True,
    table=True,
)
PIXTRAL = DemoVision(
    processor={
        "size": {"longest_edge": 1540},
        "patch_size": 14,
        "image_mean": _CLIP["image_mean"],
        "image_std": _CLIP["image_std"],
        "image_processor_type": "PixtralImageProcessor",
        "processor_class": "PixtralProcessor",
    },
    joint={
        "image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]", "patch_size": 14,
        "spatial_merge_size": 2, "processor_class": "PixtralProcessor",
    },
    decoder="ministral3",
    encoder={"patch_size": 14, "image_size": 1540, "hidden_act": "silu"},
    tokens={"image_token_index": "[IMG]"},
)  # fmt: skip
# Smaller images than the published ones of 896 pixels and 256 tokens.
SIGLIP = DemoVision(
    processor={
        "size": {"height": 224, "width": 224}, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
        "resample": 2, "do_pan_and_scan": None, "image_processor_type": "Gemma3ImageProcessor",
        "processor_class": "Gemma3Processor",
    },
    joint={"image_seq_length": 16, "processor_class": "Gemma3Processor"},
    decoder="gemma3_text",
    encoder={"patch_size": 14, "image_size": 224, "vision_use_head": False},
    root={"mm_tokens_per_image": 16},
    tokens={
        "image_token_index": "<image_soft_token>", "boi_token_index": "<start_of_image>",
        "eoi_token_index": "<end_of_image>",
    },
    named_tokens={
        "image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
    },
)  # fmt: skip

# Fewer tokens per image than the published 280.
GEMMA4 = DemoVision(
    processor={
        "patch_size": 16, "pooling_kernel_size": 3, "max_soft_tokens": 70, "image_mean": [0.0, 0.0, 0.0],
        "image_std": [1.0, 1.0, 1.0], "resample": 3, "do_normalize": False,
        "image_processor_type": "Gemma4ImageProcessor",
    },
    decoder="gemma4_text",
    own_head_dim=True,
    encoder={"patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 256, "standardize": True},
    root={"vision_soft_tokens_per_image": 70, "audio_config": None},
    tokens={"image_token_id": "<|image|>", "boi_token_id": "<|image>", "eoi_token_id": "<image|>"},
    named_tokens={
        "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>",
        "boa_token": "<|audio>", "eoa_token": "<audio|>", "video_token": "<|video|>",
    },
)  # fmt: skip

# Smaller tiles than the published ones of 448 pixels and 256 tokens.
INTERN_VIT = DemoVision(
    processor={
        "size": {"height": 112, "width": 112}, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
        "resample": 3, "crop_to_patches": False, "image_processor_type": "GotOcr2ImageProcessor",
        "processor_class": "InternVLProcessor",
    },
    joint={"image_seq_length": 16, "processor_class": "InternVLProcessor"},
    decoder="qwen3",
    encoder={"patch_size": 14, "image_size": 112, "attention_bias": True},
    root={"image_seq_length": 16},
    tokens={"image_token_id": "<IMG_CONTEXT>"},
    named_tokens={
        "context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>",
        "video_token": "<video>",
    },
)  # fmt: skip


def vision_config(vision: DemoVision, sizes: ModelSizes) -> dict[str, Any]:
    """Return the vision_config of resolved sizes."""
    depth, hidden = sizes.vision_num_layers or 0, sizes.vision_hidden_size or 0
    if vision.decoder:
        heads = sizes.vision_num_heads or 1
        own = {"num_key_value_heads": heads, "head_dim": hidden // heads} if vision.own_head_dim else {}
        return {
            "num_hidden_layers": depth,
            "num_attention_heads": sizes.vision_num_heads,
            "hidden_size": hidden,
            "intermediate_size": hidden * 5 // 2,
            "initializer_range": hidden**-0.5,
            **own,
            **vision.encoder,
        }
    arguments = {
        "depth": depth,
        "num_heads": sizes.vision_num_heads,
        "patch_size": vision.processor["patch_size"],
        # As in the decoder, so that attention is far from uniform.
        "initializer_range": hidden**-0.5,
    }
    if not (vision.windows or vision.table):
        return {**arguments, "embed_dim": hidden, "hidden_size": sizes.hidden_size}
    # Widths that no other matrix has.
    arguments |= {"hidden_size": hidden, "out_hidden_size": sizes.hidden_size, "intermediate_size": hidden * 5 // 2}
    if vision.windows:
        every = max(2, depth // 4)
        return arguments | {"fullatt_block_indexes": list(range(every - 1, depth, every)), "tokens_per_second": 2}
    arguments["num_position_embeddings"] = 16 * 16
    if not vision.deepstack:
        return arguments
    every = max(1, depth // 4)
    fed = min(3, depth, sizes.num_layers)
    indexes = [every * number - 1 for number in range(1, fed + 1)]
    return arguments | {"deepstack_visual_indexes": indexes}


def mrope_parameters(vision: DemoVision, head_dim: int) -> dict[str, Any]:
    """Return the keys of rope_parameters that assign a head's frequencies to time, height and width."""
    frequencies = head_dim // 2
    section = frequencies * vision.mrope_section // 64
    parameters: dict[str, Any] = {"mrope_section": [frequencies - 2 * section, section, section]}
    return parameters | ({"mrope_interleaved": True} if vision.mrope_interleaved else {})


def write_processors(vision: DemoVision, folder: Path) -> None:
    """Write the configuration files of image and video processors.

    Raises:
        OSError: the folder cannot be written to.
    """
    files = {
        "preprocessor_config.json": vision.processor,
        "video_preprocessor_config.json": vision.video_processor,
        "processor_config.json": vision.joint,
    }
    for name, settings in files.items():
        if settings:
            (folder / name).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
