"""Processors as a model's files say, in Transformers' order of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from media_kit import CLIP, FILES, HALF, SETTINGS, processor, vision
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from megatune.config.groups.data import DataSettings
from megatune.data.media.load import load_processor
from megatune.data.media.processor import MediaProcessor
from megatune.errors import ExitCode, MegatuneError


def load(folder: Path, family: str = "qwen2_vl", **files: dict[str, Any]) -> MediaProcessor:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return load_processor(folder, vision(family), DataSettings(**SETTINGS))


@pytest.mark.parametrize("family", FILES)
def test_published_files(tmp_path: Path, family: str) -> None:
    made = processor(tmp_path, family)
    theirs = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    assert (made.image.min_pixels, made.image.max_pixels) == (theirs.size["shortest_edge"], theirs.size["longest_edge"])
    assert (list(made.image.mean), list(made.image.std)) == (list(theirs.image_mean), list(theirs.image_std))
    assert (made.patch_size, made.merge_size, made.image.resample) == (
        theirs.patch_size,
        theirs.merge_size,
        theirs.resample,
    )
    # Videos without a file of their own take the images', as Transformers' AutoVideoProcessor does.
    expected = {"qwen3_vl": (4096, 25165824)}.get(family, (3136, 12845056))
    assert (made.video.min_pixels, made.video.max_pixels) == expected


def test_defaults_of_what_files_leave_out(tmp_path: Path) -> None:
    made = load(tmp_path, preprocessor_config={}, video_preprocessor_config={"image_mean": None})
    assert (made.image.min_pixels, made.image.max_pixels) == (56 * 56, 1280 * 28 * 28)
    assert list(made.image.mean) == list(made.video.mean) == CLIP["image_mean"]
    assert (made.video.min_pixels, made.video.max_pixels) == (128 * 28 * 28, 768 * 28 * 28)
    made = load(tmp_path, "qwen3_vl", preprocessor_config=FILES["qwen3_vl"][0], video_preprocessor_config={"fps": 2})
    assert (made.video.min_pixels, made.video.max_pixels) == (128 * 32 * 32, 768 * 32 * 32)
    assert list(made.video.mean) == HALF["image_mean"]


def test_a_joint_file_counts_first(tmp_path: Path) -> None:
    """As Transformers 5 saves it."""
    size = {"shortest_edge": 5000, "longest_edge": 6000}
    joint = {"image_processor": {"size": size}, "video_processor": {"size": size, "min_pixels": 4000}}
    made = load(tmp_path, processor_config=joint, preprocessor_config={"min_pixels": 1, "max_pixels": 2})
    assert (made.image.min_pixels, made.image.max_pixels) == (5000, 6000)
    assert (made.video.min_pixels, made.video.max_pixels) == (4000, 6000)
    made = load(tmp_path, processor_config={"processor_class": "Qwen2VLProcessor"})
    assert (made.image.min_pixels, made.image.max_pixels) == (1, 2)


def test_what_is_not_built_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(MegatuneError) as caught:
        load(
            tmp_path,
            preprocessor_config={"patch_size": 16, "do_resize": False, "rescale_factor": 1.0, "image_std": [0, 1, 1]},
            video_preprocessor_config={"cap_pixels_per_frame": True, "max_pixels": 5, "resample": 17},
        )
    assert caught.value.exit_code == ExitCode.INPUT
    found = "\n".join(finding.what for finding in caught.value.findings)
    assert found == (
        "the processor of images has patch_size = 16, but the model has 14\n"
        "the processor of images has do_resize = False; only True is supported\n"
        f"the processor of images has rescale_factor = 1.0; only {1 / 255} is supported\n"
        "the processor of images: image_std are not valid\n"
        "the processor of videos: its minimum and maximum pixels are not valid\n"
        "the processor of videos has cap_pixels_per_frame = True; only False is supported\n"
        "the processor of videos: resample are not valid"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no preprocessor_config.json"),
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[]", "is not a JSON object"),
        ('{"image_mean": [NaN, 0, 0]}', "image_mean are not valid"),
        ('{"min_pixels": true}', "its minimum and maximum pixels are not valid"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "preprocessor_config.json").write_text(content)
    with pytest.raises(MegatuneError, match=message) as caught:
        load(tmp_path)
    assert caught.value.exit_code == ExitCode.INPUT


def test_a_joint_file_holds_objects(tmp_path: Path) -> None:
    with pytest.raises(MegatuneError, match=r"its processor is \[1\], not an object"):
        load(tmp_path, processor_config={"image_processor": [1]}, preprocessor_config={})
