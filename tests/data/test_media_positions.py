"""Positions of tokens with images and videos, beside Transformers' own and the papers' rule."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from media_kit import vision
from packaging.version import Version
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from megatune.data.media.arguments import rotary_position_ids

MODELS: dict[str, Any] = {"qwen2_vl": Qwen2VLModel, "qwen2_5_vl": Qwen2_5_VLModel, "qwen3_vl": Qwen3VLModel}
IMAGE, VIDEO, START, END = 151655, 151656, 151652, 151653
Grid = tuple[int, int, int]


def document(
    family: str, parts: list[int | tuple[str, Grid, float]]
) -> tuple[np.ndarray, list[tuple[Grid, float | None]]]:
    """Tokens of texts (their lengths), images and videos, and the pictures."""
    ids: list[int] = []
    media: list[tuple[Grid, float | None]] = []
    for part in parts:
        if isinstance(part, int):
            ids += [7] * part
            continue
        kind, (t, h, w), seconds = part
        pad = IMAGE if kind == "image" else VIDEO
        media.append(((t, h, w), None if kind == "image" else seconds))
        if kind == "video" and family == "qwen3_vl":
            ids += [9, 9, START, *[pad] * (h * w // 4), END] * t
        else:
            ids += [START, *[pad] * (t * h * w // 4), END]
    return np.array(ids), media


def in_transformers(family: str, ids: np.ndarray, media: list[tuple[Grid, float | None]]) -> np.ndarray:
    """get_rope_index of the family's model, which asks its config for three numbers only."""
    model = MODELS[family]
    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=2))
    this = SimpleNamespace(config=config)
    this.get_vision_position_ids = lambda *args, **kwargs: model.get_vision_position_ids(this, *args, **kwargs)
    kinds = np.where(ids == IMAGE, 1, np.where(ids == VIDEO, 2, 0))
    grids = {
        "image_grid_thw": [grid for grid, seconds in media if seconds is None],
        "video_grid_thw": [grid for grid, seconds in media if seconds is not None],
    }
    arguments: dict[str, Any] = {key: torch.tensor(value) if value else None for key, value in grids.items()}
    if family == "qwen2_5_vl":
        arguments["second_per_grid_ts"] = [seconds for _, seconds in media if seconds is not None]
    positions, _ = model.get_rope_index(
        this, torch.from_numpy(ids)[None], mm_token_type_ids=torch.from_numpy(kinds)[None], **arguments
    )
    return positions[:, 0].numpy()


def random_documents(kinds: list[str]) -> list[list[int | tuple[str, Grid, float]]]:
    draw = random.Random(0)
    documents: list[list[int | tuple[str, Grid, float]]] = []
    for _ in range(20):
        parts: list[int | tuple[str, Grid, float]] = []
        for _ in range(draw.randint(1, 4)):
            kind = draw.choice(kinds)
            grid = (1 if kind == "image" else draw.randint(1, 5), 2 * draw.randint(1, 6), 2 * draw.randint(1, 6))
            parts += [draw.randint(0, 5), (kind, grid, draw.choice([0.5, 1.0, 2.5]))]
        documents.append([*parts, draw.randint(0, 5)])
    return documents


@pytest.mark.parametrize("family", MODELS)
def test_images_have_the_positions_of_transformers(family: str) -> None:
    for parts in random_documents(["image"]):
        ids, media = document(family, parts)
        ours = rotary_position_ids(ids, media, vision(family))
        assert ours.dtype == np.int64
        assert np.array_equal(ours, in_transformers(family, ids, media))


def test_videos_of_qwen3_vl_have_the_positions_of_transformers() -> None:
    for parts in random_documents(["image", "video"]):
        ids, media = document("qwen3_vl", parts)
        assert np.array_equal(
            rotary_position_ids(ids, media, vision("qwen3_vl")), in_transformers("qwen3_vl", ids, media)
        )


@pytest.mark.parametrize(("family", "per_second"), [("qwen2_vl", None), ("qwen2_5_vl", 2)])
def test_videos_by_the_rule_of_the_papers(family: str, per_second: int | None) -> None:
    """A patch is at its time, row and column behind the text before it; text goes on behind the largest of them."""
    for parts in random_documents(["image", "video"]):
        ids, media = document(family, parts)
        left, position, expected = iter(media), 0, []
        for is_picture, group in itertools.groupby(ids.tolist(), lambda token: token in (IMAGE, VIDEO)):
            if not is_picture:
                for _ in group:
                    expected.append([position] * 3)
                    position += 1
                continue
            (t, h, w), seconds = next(left)
            step = per_second * seconds if per_second and seconds is not None else 1
            block = [
                [position + int(i * step), position + j, position + k]
                for i in range(t) for j in range(h // 2) for k in range(w // 2)
            ]  # fmt: skip
            expected += block
            position = max(map(max, block)) + 1
        assert rotary_position_ids(ids, media, vision(family)).T.tolist() == expected


def test_where_transformers_differs_for_videos_of_qwen2_5_vl() -> None:
    """Transformers lets text and frames overlap; before 5.18 it also cuts seconds to whole ones, then multiplies."""
    ids, media = document("qwen2_5_vl", [1, ("video", (6, 4, 4), 1.0), 2])
    ours = rotary_position_ids(ids, media, vision("qwen2_5_vl"))
    theirs = in_transformers("qwen2_5_vl", ids, media)
    assert np.array_equal(ours[:, :-3], theirs[:, :-3])
    assert ours[0, -4] == theirs[0, -4] == 2 + 5 * 2  # the last frame
    assert ours[:, -3:].tolist() == [[13, 14, 15]] * 3  # behind it
    assert theirs[:, -3:].tolist() == [[4, 5, 6]] * 3  # behind the two rows of a frame, on times of later frames
    ids, media = document("qwen2_5_vl", [1, ("video", (3, 2, 2), 0.75), 1])
    assert rotary_position_ids(ids, media, vision("qwen2_5_vl"))[0].tolist() == [0, 1, 2, 3, 5, 6, 7]
    frames = [2, 2, 2] if Version(transformers.__version__) < Version("5.18") else [2, 3, 5]
    assert in_transformers("qwen2_5_vl", ids, media)[0].tolist() == [0, 1, *frames, 3, 4]


def test_text_alone_counts() -> None:
    assert rotary_position_ids(np.array([5, 6, 7]), [], vision("qwen3_vl")).tolist() == [[0, 1, 2]] * 3
    assert rotary_position_ids(np.array([], dtype=np.int64), [], vision("qwen3_vl")).shape == (3, 0)


@pytest.mark.parametrize("change", ["fewer", "more", "apart"])
def test_tokens_that_do_not_fit_the_pictures(change: str) -> None:
    ids, media = document("qwen2_vl", [1, ("image", (1, 4, 4), 0.0), 1])
    changed = {
        "fewer": ids[ids != IMAGE],
        "more": np.append(ids, IMAGE),
        "apart": np.concatenate((ids[:4], [7], ids[4:])),
    }[change]
    with pytest.raises(ValueError, match="tokens"):
        rotary_position_ids(changed, media, vision("qwen2_vl"))
