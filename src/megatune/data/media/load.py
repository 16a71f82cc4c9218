"""Load the image and video processor from a model's files and a run's settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from PIL import Image

from megatune.config.groups.data import TILES, DataSettings
from megatune.data.media.processor import Bounds, MediaProcessor
from megatune.encoders import Vision
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.references import write

IMAGE_FILE, VIDEO_FILE, JOINT_FILE = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
_CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
# Transformers' defaults for values that a file does not set.
_COMMON = {
    "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "resample": 3, "rescale_factor": 1 / 255,
    "do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True,
}  # fmt: skip
_IMAGE = {**_COMMON, **_CLIP, "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}}
_VIDEO = {**_COMMON, **_CLIP, "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}}
_EDGE = {**_COMMON, **_CLIP, "patch_size": 16, "size": {"longest_edge": 1024}}
_SQUARE = {**_COMMON, **_HALF, "resample": 2, "size": {}}
_FILLED = {
    **_COMMON, "patch_size": 16, "pooling_kernel_size": 3, "max_soft_tokens": 280, "do_normalize": False,
    "image_mean": [0.0] * 3, "image_std": [1.0] * 3,
}  # fmt: skip
_QWEN3_VIDEO = {
    **_COMMON, **_HALF, "patch_size": 16, "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
}  # fmt: skip


def load_processor(model_dir: str | Path, vision: Vision, data: DataSettings) -> MediaProcessor:
    """Read how a model's images and videos are converted to patches.

    Files are read in Transformers' order: processor_config.json if it has an image_processor and a video_processor,
    else preprocessor_config.json and video_preprocessor_config.json; videos without a file use that of images.

    Raises:
        MegatuneError: a file is missing, cannot be read, or needs steps that are not supported (exit code 66).
    """
    folder, where = Path(model_dir), str(model_dir)
    joint, images = _read(folder / JOINT_FILE) or {}, _read(folder / IMAGE_FILE)
    image = joint.get("image_processor") or images
    video = joint.get("video_processor") or _read(folder / VIDEO_FILE) or images or {}
    if wrong := [each for each in (image, video) if not isinstance(each, Mapping | NoneType)]:
        what = f"its processor is {wrong[0]!r:.60}, not an object"
        raise MegatuneError(Finding(what, str(folder / JOINT_FILE)), ExitCode.INPUT)
    if image is None:
        why, fix = "it defines how images are split into patches", f"copy {IMAGE_FILE} from the published model"
        raise MegatuneError(Finding(f"there is no {IMAGE_FILE}", where, why, fix), ExitCode.INPUT)
    by_area = False
    if vision.square is not None:
        image = {**_SQUARE, **_without_nulls(image)}
        findings, sizes = _square_sizes(image, vision, data, where)
    elif vision.tokens_of_image is not None:
        # Pixels are not normalized, i.e. with a mean of 0 and a standard deviation of 1.
        normalization = {key: _FILLED[key] for key in ("image_mean", "image_std")}
        image = {**_FILLED, **_without_nulls(image), **normalization}
        findings, sizes = _filled_sizes(image, vision, where)
    elif vision.text.row_end:
        image = {**_EDGE, **_without_nulls(image)}
        findings, sizes = _edge_sizes(image, joint, vision, where)
    else:
        by_area, image = True, {**_IMAGE, **_without_nulls(image)}
        video = {**(_QWEN3_VIDEO if vision.timestamps else _VIDEO), **_without_nulls(video)}
        findings = [*_check(image, "images", vision, where), *_check(video, "videos", vision, where)]
        sizes = _areas(image)
    if findings:
        raise MegatuneError(findings, ExitCode.INPUT)
    first: tuple[int, int] | None = data.image_min_pixels, data.image_max_pixels
    scale_to = None if by_area else data.image_scale_pixels
    if data.swift_version:
        first, scale_to = None, data.image_scale_pixels
        sizes |= {"min_pixels": data.image_min_pixels, "max_pixels": data.image_max_pixels} if by_area else {}
    of_images = of_videos = Bounds(first=first, scale_to=scale_to, **sizes, **_normalization(image))
    if by_area:
        first = data.video_min_pixels, data.video_max_pixels
        of_videos = Bounds(first=first, **_areas(video), **_normalization(video))
    return MediaProcessor(
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        merge_size=vision.spatial_merge_size,
        image=of_images,
        video=of_videos,
        video_fps=data.video_fps,
        video_maxlen=data.video_maxlen,
        timestamps=vision.timestamps,
        text=vision.text,
    )


# For a processor's file with defaults: findings for what is not supported, and the image bounds of `Bounds`.
_Sizes = tuple[list[Finding], dict[str, Any]]


def _square_sizes(config: Mapping[str, Any], vision: Vision, data: DataSettings, where: str) -> _Sizes:
    """Read the bounds of a model with one size for all images (SigLIP, InternViT)."""
    findings, size = _check_steps(config, "images", where), config["size"]
    sides = [size.get("height"), size.get("width")] if isinstance(size, Mapping) else []
    if sides != [vision.square] * 2:
        what = f"the processor of images has size = {size!r}, but the model needs sides of {vision.square} pixels"
        findings.append(Finding(what, where))
    if config.get("do_pan_and_scan"):
        findings.append(Finding("the processor of images has do_pan_and_scan = True; crops are not supported", where))
    if config.get("crop_to_patches") and not data.crop_to_patches:
        what, fix = "the processor of images has crop_to_patches = True", write("crop_to_patches", True)
        findings.append(Finding(what, where, "the setting is needed to plan the number of tokens", fix))
    for key, value in zip(("min_patches", "max_patches"), TILES, strict=True):
        if data.crop_to_patches and config.get(key, value) != value:
            findings.append(
                Finding(f"the processor of images has {key} = {config[key]!r}; only {value} is supported", where)
            )
    return findings, {"square": vision.square, "tiles": TILES if data.crop_to_patches else None}


def _filled_sizes(config: Mapping[str, Any], vision: Vision, where: str) -> _Sizes:
    """Read the bounds of a model whose images use as many tokens as fit (Gemma 4)."""
    wanted = {"patch_size": vision.patch_size, "pooling_kernel_size": vision.spatial_merge_size, "do_normalize": False}
    findings, tokens = _check_steps({**config, "do_normalize": True}, "images", where), config["max_soft_tokens"]
    findings += _differing(config, wanted, "the processor of images", where)
    if type(tokens) is not int or tokens < 1:
        findings.append(Finding(f"the processor of images: max_soft_tokens = {tokens!r} is not valid", where))
    return findings, {"tokens": tokens}


def _edge_sizes(config: Mapping[str, Any], joint: Mapping[str, Any], vision: Vision, where: str) -> _Sizes:
    """Read the bounds of a model whose images have a longest side (Pixtral).

    Args:
        config: for images; its patch size is ignored, as Transformers' joint processor sets it.
        joint: of the joint processor.
    """
    size = config["size"]
    edge = size.get("longest_edge") if isinstance(size, Mapping) else size
    wanted = {"patch_size": vision.patch_size, "spatial_merge_size": vision.spatial_merge_size}
    findings = [*_check_steps(config, "images", where), *_differing(joint, wanted, "the processor", where)]
    if type(edge) is not int or edge < 1:
        what = f"the processor of images: size = {size!r} is not valid"
        findings.append(Finding(what, where, "expected the longest edge in pixels"))
    return findings, {"longest_edge": edge}


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise MegatuneError(Finding(f"cannot be read: {error}", str(path)), ExitCode.INPUT) from None
    if not isinstance(content, dict):
        raise MegatuneError(Finding("is not a JSON object", str(path)), ExitCode.INPUT)
    return content


def _without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}


def _normalization(config: Mapping[str, Any]) -> dict[str, Any]:
    mean, std = (tuple(map(float, config[key])) for key in ("image_mean", "image_std"))
    return {"mean": mean, "std": std, "resample": config["resample"]}


def _areas(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the minimum and maximum pixels; the keys of older files take precedence over size."""
    size = config["size"] if isinstance(config["size"], Mapping) else {}
    least, most = size.get("shortest_edge"), size.get("longest_edge")
    return {"min_pixels": config.get("min_pixels", least), "max_pixels": config.get("max_pixels", most)}


def _check(config: Mapping[str, Any], what: str, vision: Vision, where: str) -> list[Finding]:
    """Return findings for everything in a processor's file that is not supported."""
    wanted = {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
    }
    least, most = _areas(config).values()
    is_valid = type(least) is int and type(most) is int and 0 < least <= most
    findings = _differing(config, wanted, f"the processor of {what}", where)
    if not is_valid:
        findings.append(Finding(f"the processor of {what}: its minimum and maximum pixels are not valid", where))
    return findings + _check_steps(config, what, where)


def _differing(config: Mapping[str, Any], wanted: Mapping[str, Any], processor: str, where: str) -> list[Finding]:
    """Return findings for the values of a processor's file that differ from the model's."""
    return [
        Finding(f"{processor} has {key} = {config[key]!r}, but the model has {value}", where)
        for key, value in wanted.items()
        if config.get(key, value) != value
    ]


def _check_steps(config: Mapping[str, Any], what: str, where: str) -> list[Finding]:
    """Return findings for processing steps other than resizing that are not supported."""
    built = {**{key: True for key in _COMMON if key.startswith("do_")}, "rescale_factor": 1 / 255}
    findings = [
        Finding(f"the processor of {what} has {key} = {config[key]!r}; only {value} is supported", where)
        for key, value in {**built, "cap_pixels_per_frame": False, "do_center_crop": False}.items()
        if config.get(key, value) != value
    ]
    sane = {
        "image_mean": _is_by_channel(config["image_mean"]),
        "image_std": _is_by_channel(config["image_std"]) and all(config["image_std"]),
        "resample": config["resample"] in list(Image.Resampling),
    }
    return findings + [
        Finding(f"the processor of {what}: {key} are not valid", where) for key, is_ok in sane.items() if not is_ok
    ]


def _is_by_channel(value: object) -> bool:
    """Return whether a value is a list of three finite numbers, one per channel, in a plausible range."""
    if not isinstance(value, list) or len(value) != 3:
        return False
    return all(isinstance(each, int | float) and abs(each) < 1e6 for each in value)
