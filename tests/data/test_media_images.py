"""Patches of images: bit for bit those of LLaMA-Factory's resizing and Transformers' processor."""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path

import numpy as np
import PIL
import pytest
from hostile_media import encoded, picture
from hypothesis import given, settings
from hypothesis import strategies as st
from media_kit import image_reference, processor
from packaging.version import Version
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as qwen2_resize

from megatune.data.bad_rows import RowError
from megatune.data.media import MediaSource
from megatune.data.media.images import image_size, open_image
from megatune.data.media.processor import MediaShape
from megatune.data.media.sizes import smart_resize

MODES = {
    "RGB": "PNG", "L": "PNG", "1": "PNG", "P": "PNG", "LA": "PNG", "RGBA": "PNG", "CMYK": "JPEG",
    # Pillow cannot read the YCbCr TIFF that it has written itself, before 13.
    **({"YCbCr": "TIFF"} if Version(PIL.__version__) >= Version("13") else {}),
}  # fmt: skip


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
@pytest.mark.parametrize("size", [(97, 61), (28, 28), (1, 1), (1031, 877), (5000, 3), (1, 3000)])
def test_pixels_are_those_of_transformers(tmp_path: Path, family: str, size: tuple[int, int]) -> None:
    made = processor(tmp_path, family)
    content = encoded(picture(*size), "PNG")
    source = MediaSource("image", data=content)
    measured = made.measure(source)
    pixels, grid = image_reference(Image.open(io.BytesIO(content)), family)
    assert measured == MediaShape(grid, None, (), (), size)
    ours = made.pixels(source, measured)
    assert (ours.dtype, ours.shape) == (np.float32, (measured.num_patches, pixels.shape[1]))
    assert np.array_equal(ours, pixels)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("max_pixels", [2000, 10**7])  # smaller first, in the mode of the file; or not
def test_modes(tmp_path: Path, mode: str, max_pixels: int) -> None:
    made = processor(tmp_path, "qwen3_vl", image_max_pixels=max_pixels)
    content = encoded(picture(mode=mode), MODES[mode])
    source = MediaSource("image", data=content)
    pixels, _ = image_reference(Image.open(io.BytesIO(content)), "qwen3_vl", image_max_pixels=max_pixels)
    assert np.array_equal(made.pixels(source, made.measure(source)), pixels)


@pytest.mark.parametrize("bounds", [(1, 10**9), (200_000, 300_000), (100, 3_000)])
def test_bounds_of_the_settings(tmp_path: Path, bounds: tuple[int, int]) -> None:
    changes = {"image_min_pixels": bounds[0], "image_max_pixels": bounds[1]}
    made = processor(tmp_path, "qwen2_vl", **changes)
    source = MediaSource("image", data=encoded(picture(), "PNG"))
    measured = made.measure(source)
    pixels, grid = image_reference(picture(), "qwen2_vl", **changes)
    assert measured.grid == grid
    assert np.array_equal(made.pixels(source, measured), pixels)


@given(
    st.tuples(st.integers(1, 3000), st.integers(1, 3000)),
    st.sampled_from([28, 32]),
    st.sampled_from([(3136, 1003520), (65536, 16777216), (4 * 28 * 28, 5000)]),
)
@settings(max_examples=300)
def test_sizes_are_those_of_transformers(size: tuple[int, int], factor: int, bounds: tuple[int, int]) -> None:
    width, height = size
    if max(size) / min(size) > 200:
        return
    assert smart_resize(size, factor, *bounds) == qwen2_resize(height, width, factor, *bounds)[::-1]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_images_are_upright(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(picture(40, 20), kind, exif=exif.tobytes(), **({"quality": 95} if kind == "JPEG" else {}))
    source = MediaSource("image", data=content)
    assert image_size(source) == ((40, 20) if orientation < 5 else (20, 40)) == open_image(source).size
    # The darkest corner of the file, its first one, ends where the orientation says.
    corners = np.asarray(open_image(source).convert("L")).astype(int)[:: 19 if orientation < 5 else 39][
        :, :: 39 if orientation < 5 else 19
    ]
    assert (
        np.unravel_index(corners.argmin(), (2, 2))
        == [(0, 0), (0, 1), (1, 1), (1, 0), (0, 0), (0, 1), (1, 1), (1, 0)][orientation - 1]
    )


def test_the_first_frame_of_an_animation() -> None:
    frames = [Image.new("RGB", (30, 20), (50 * number, 0, 0)) for number in range(4)]
    for kind in ("GIF", "WEBP", "PNG"):
        content = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
        assert open_image(MediaSource("image", data=content)).getextrema() == ((0, 0), (0, 0), (0, 0))


def test_measuring_decodes_nothing(tmp_path: Path) -> None:
    """Pixels that are wrong throughout do not show in the header."""
    content = bytearray(encoded(picture(300, 200), "PNG"))
    content[60:-20] = bytes(len(content) - 80)
    source = MediaSource("image", data=bytes(content))
    made = processor(tmp_path, "qwen2_vl")
    measured = made.measure(source)
    assert measured.size == (300, 200)
    with pytest.raises(RowError) as caught:
        made.pixels(source, measured)
    assert caught.value.code == "damaged-picture"


def test_another_image_than_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encoded(picture(64, 64), "PNG"))
    made, source = processor(tmp_path, "qwen2_vl"), MediaSource("image", str(path))
    measured = made.measure(source)
    path.write_bytes(encoded(picture(64, 65), "PNG"))
    with pytest.raises(RowError) as caught:
        made.pixels(source, measured)
    assert (caught.value.code, str(path) in caught.value.detail) == ("changed-picture", True)


def test_processors_are_kept_as_pickles(tmp_path: Path) -> None:
    made = processor(tmp_path, "qwen3_vl")
    assert pickle.loads(pickle.dumps(made)) == made
    assert made.placeholder(MediaShape((1, 4, 6), None, (), (), (1, 1))) == (
        "<|vision_start|>" + "<|image_pad|>" * 6 + "<|vision_end|>"
    )


def test_areas_are_what_the_settings_say(tmp_path: Path) -> None:
    """An image of 2 megapixels becomes image_max_pixels, then whole tokens."""
    made = processor(tmp_path, "qwen2_vl", image_max_pixels=451584)
    grid = made.measure(MediaSource("image", data=encoded(picture(2000, 1000), "PNG"))).grid
    assert grid == (1, 34, 68)
    assert math.isclose(34 * 14 * 68 * 14, 451584, rel_tol=0.02)
