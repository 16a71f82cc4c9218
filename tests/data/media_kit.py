"""What images and frames become in LLaMA-Factory and Transformers, for tests to compare with; and processors."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from megatune.config.groups.data import DataSettings
from megatune.data.media.load import load_processor
from megatune.data.media.processor import MediaProcessor, MediaShape
from megatune.encoders import Vision

CLIP: dict[str, list[float]] = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
HALF: dict[str, list[float]] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
# preprocessor_config.json and video_preprocessor_config.json as published; Qwen2's have no file for videos.
FILES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "qwen2_vl": ({"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2, **CLIP}, None),
    "qwen2_5_vl": ({"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2, **CLIP}, None),
    "qwen3_vl": (
        {"size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "merge_size": 2, **HALF},
        {"size": {"longest_edge": 25165824, "shortest_edge": 4096}, "patch_size": 16, "merge_size": 2, **HALF},
    ),
}
SETTINGS: dict[str, Any] = {
    "image_max_pixels": 768 * 768,
    "image_min_pixels": 32 * 32,
    "video_max_pixels": 256 * 256,
    "video_min_pixels": 16 * 16,
    "video_fps": 2.0,
    "video_maxlen": 128,
}


def vision(family: str, **changes: Any) -> Vision:
    """A tiny encoder's numbers."""
    numbers: dict[str, Any] = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
        "patch_size": 16 if family == "qwen3_vl" else 14, "spatial_merge_size": 2,
        "tokens_per_second": 2 if family == "qwen2_5_vl" else None, "timestamps": family == "qwen3_vl",
    }  # fmt: skip
    return Vision(**{**numbers, **changes})


def processor(folder: Path, family: str, **settings: Any) -> MediaProcessor:
    """The processor of a family, as its published files and these settings say."""
    for name, content in zip(
        ("preprocessor_config.json", "video_preprocessor_config.json"), FILES[family], strict=True
    ):
        if content is not None:
            (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return load_processor(folder, vision(family), DataSettings(**{**SETTINGS, **settings}))


def in_llamafactory(image: Image.Image, least: int, most: int) -> Image.Image:
    """The image as LLaMA-Factory's Qwen2VLPlugin hands it to the processor."""
    if image.width * image.height > most:
        factor = math.sqrt(most / (image.width * image.height))
        image = image.resize((int(image.width * factor), int(image.height * factor)))
    if image.width * image.height < least:
        factor = math.sqrt(least / (image.width * image.height))
        image = image.resize((int(image.width * factor), int(image.height * factor)))
    if image.mode != "RGB":
        image = image.convert("RGB")
    if min(image.width, image.height) < 28:
        image = image.resize((max(image.width, 28), max(image.height, 28)))
    if image.width / image.height > 200:
        image = image.resize((image.height * 180, image.height))
    if image.height / image.width > 200:
        image = image.resize((image.width, image.width * 180))
    return image


def in_transformers(image: Image.Image, **config: Any) -> tuple[np.ndarray, tuple[int, ...]]:
    """pixel_values and grid of the PIL back end; the config must give both bounds, since its defaults are changed by
    whoever gave others before."""
    made = Qwen2VLImageProcessorPil(**config)(image, return_tensors="np")
    return made["pixel_values"], tuple(made["image_grid_thw"][0].tolist())


def upright(image: Image.Image) -> Image.Image:
    """As Transformers' load_image turns it; metadata that it chokes on turns nothing."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:
        return image


def image_reference(image: Image.Image, family: str, **changes: Any) -> tuple[np.ndarray, tuple[int, ...]]:
    """pixel_values and grid of an image by LLaMA-Factory and Transformers."""
    settings = {**SETTINGS, **changes}
    image = in_llamafactory(upright(image), settings["image_min_pixels"], settings["image_max_pixels"])
    return in_transformers(image, **FILES[family][0])


def video_reference(frames: list[Image.Image], measured: MediaShape, family: str) -> np.ndarray:
    """pixel_values of the frames of a video by LLaMA-Factory and Transformers."""
    return frames_reference(
        frames, measured.grid, FILES[family][0], SETTINGS["video_min_pixels"], SETTINGS["video_max_pixels"]
    )


def frames_reference(
    frames: list[Image.Image], grid: Sequence[int], config: dict[str, Any], least: int, most: int
) -> np.ndarray:
    """pixel_values of frames: each resized to the grid and normalized as an image, the last one repeated."""
    (t, h, w), patch = grid, config.get("patch_size", 14)
    exact = {**config, "min_pixels": 1, "max_pixels": 2**40}
    by_frame = []
    for frame in frames:
        image = in_llamafactory(frame, least, most).resize((w * patch, h * patch), Image.Resampling.BICUBIC)
        by_frame.append(in_transformers(image, **exact)[0].reshape(h * w, 3, 2, -1)[:, :, 0])
    by_frame += by_frame[-1:] * (2 * t - len(by_frame))
    pairs = zip(by_frame[::2], by_frame[1::2], strict=True)
    return np.concatenate([np.stack(pair, axis=2) for pair in pairs]).reshape(t * h * w, -1)
