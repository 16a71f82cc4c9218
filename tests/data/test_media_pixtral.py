"""Images of Pixtral: the patches of Transformers' processor in the order of tokens, its text, and what is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_media import encoded, picture
from media_kit import CLIP, SETTINGS, vision
from PIL import Image
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from megatune.config.groups.data import DataSettings
from megatune.data.bad_rows import RowError
from megatune.data.media import MediaSource
from megatune.data.media.arguments import media_arguments
from megatune.data.media.load import load_processor
from megatune.data.media.processor import MediaProcessor
from megatune.encoders import MediaPlaceholder, Vision
from megatune.errors import ExitCode, MegatuneError

TEXT = MediaPlaceholder(image="[IMG]", video="", start="", end="[IMG_END]", row_end="[IMG_BREAK]")
FILE: dict[str, Any] = {
    "size": {"longest_edge": 140},
    "patch_size": 14,
    "image_processor_type": "PixtralImageProcessor",
    **CLIP,
}


def pixtral() -> Vision:
    return vision("mistral3", temporal_patch_size=1, text=TEXT, image_token_id=10, video_token_id=-1, one_position=True)


def processor(folder: Path, joint: dict[str, Any] | None = None, **changes: Any) -> MediaProcessor:
    """The file of images and the joint one, as published, and settings."""
    settings = {key: changes.pop(key) for key in list(changes) if key in DataSettings.model_fields}
    (folder / "preprocessor_config.json").write_text(json.dumps(FILE | changes))
    (folder / "processor_config.json").write_text(json.dumps(joint or {"patch_size": 14, "spatial_merge_size": 2}))
    return load_processor(folder, pixtral(), DataSettings(**{**SETTINGS, **settings}))


# Larger than the longest edge, smaller, just as large, and thin.
@pytest.mark.parametrize("size", [(97, 61), (140, 140), (300, 200), (61, 500), (28, 29), (1, 90)])
def test_an_image_is_that_of_transformers(tmp_path: Path, size: tuple[int, int]) -> None:
    made = processor(tmp_path, image_min_pixels=1)
    content = encoded(picture(*size), "PNG")
    source = MediaSource("image", data=content)
    measured = made.measure(source)
    patches = made.pixels(source, measured)
    # Its joint processor asks for images of whole tokens.
    asked = PixtralImageProcessorPil(**FILE | {"patch_size": 28})
    expected = asked(Image.open(io.BytesIO(content)).convert("RGB"), return_tensors="np")
    pads = [10] * (measured.num_patches // 4)
    found = media_arguments(np.array(pads), [("image", measured.grid, None, patches)], pixtral())
    assert found["image_sizes"].tolist() == [list(each) for each in expected["image_sizes"]]
    assert np.array_equal(found["pixel_values"].numpy(), expected["pixel_values"])


def test_images_of_a_row_lie_in_the_corners_of_one_size(tmp_path: Path) -> None:
    made = processor(tmp_path)
    sources = [MediaSource("image", data=encoded(picture(*size), "PNG")) for size in ((97, 61), (40, 120))]
    images = [Image.open(io.BytesIO(each.data or b"")) for each in sources]
    given = [("image", (one := made.measure(each)).grid, None, made.pixels(each, one)) for each in sources]
    pads = [10] * sum(grid[1] * grid[2] // 4 for _, grid, _, _ in given)
    found = media_arguments(np.array(pads), given, pixtral())
    asked = PixtralImageProcessorPil(**FILE | {"patch_size": 28})
    assert np.array_equal(found["pixel_values"].numpy(), asked(images, return_tensors="np")["pixel_values"])
    with pytest.raises(ValueError, match=r"\d+ image tokens"):
        media_arguments(np.array(pads[1:]), given, pixtral())


def test_bounds_of_the_settings_come_first(tmp_path: Path) -> None:
    source = MediaSource("image", data=encoded(picture(300, 200), "PNG"))
    assert processor(tmp_path).measure(source).grid == (1, 8, 10)
    assert processor(tmp_path, image_max_pixels=56 * 56).measure(source).grid == (1, 4, 6)


def test_rows_of_tokens_end_with_a_token(tmp_path: Path) -> None:
    made = processor(tmp_path)
    measured = made.measure(MediaSource("image", data=encoded(picture(84, 50), "PNG")))
    assert made.runs(measured) == (3, 3)
    row = "[IMG]" * 3
    assert made.placeholder(measured) == f"{row}[IMG_BREAK]{row}[IMG_END]"
    assert made.placeholder(measured, short=True) == "[IMG][IMG_BREAK][IMG][IMG_END]"


def test_videos_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RowError, match="the model reads images only") as caught:
        processor(tmp_path).measure(MediaSource("video", path=str(tmp_path / "a.mp4")))
    assert caught.value.code == "no-videos"


@pytest.mark.parametrize(
    ("joint", "changes", "what"),
    [
        ({"patch_size": 16}, {}, "the processor has patch_size = 16, but the model has 14"),
        ({"spatial_merge_size": 1}, {}, "the processor has spatial_merge_size = 1, but the model has 2"),
        (None, {"size": {"height": 5, "width": 5}}, "the processor of images: size = "),
        (None, {"do_center_crop": True}, "do_center_crop = True; only False is supported"),
        (None, {"image_std": [0, 1, 1]}, "image_std are not valid"),
    ],
)
def test_what_is_not_built_is_refused(
    tmp_path: Path, joint: dict[str, Any] | None, changes: dict[str, Any], what: str
) -> None:
    with pytest.raises(MegatuneError, match=what) as caught:
        processor(tmp_path, joint, **changes)
    assert caught.value.exit_code == ExitCode.INPUT
