"""Pictures as arguments of Transformers' models: patches with their grids, or whole images with their sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megatune.data.media.positions import Grid, rotary_position_ids
from megatune.encoders import Vision

# Of an image or a video: its kind, grid, seconds from one temporal patch to the next, and patches.
GivenPicture = tuple[str, Grid, float | None, np.ndarray]


def picture_arguments(
    input_ids: np.ndarray, pictures: Sequence[GivenPicture], vision: Vision
) -> dict[str, torch.Tensor]:
    """Return what Transformers' model takes of pictures beside `input_ids` [tokens], of one row.

    Where tokens have three positions those are among it, since Transformers 5.17 computes others for videos of Qwen2-VL
    and Qwen2.5-VL; its generate continues from the last one.

    Raises:
        ValueError: the tokens of images and videos are not those of `pictures`.
    """
    rows = rotary_position_ids(input_ids, [(grid, seconds) for _, grid, seconds, _ in pictures], vision)
    if vision.square is not None:
        arguments = {"pixel_values": _squares(pictures, vision)}
        return arguments | ({"token_type_ids": _types(input_ids, vision)} if vision.whole else {})
    if vision.tokens_of_image is not None:
        arguments = _padded_patches(pictures, vision)
        return arguments | ({"mm_token_type_ids": _types(input_ids, vision)} if vision.whole else {})
    if vision.one_position:
        return _whole_images(pictures, vision)
    # The first row is for masks; three are of time, height and width.
    arguments = {"position_ids": torch.from_numpy(np.concatenate([np.arange(rows.shape[1])[None], rows]))[:, None]}
    for kind, suffix in (("image", ""), ("video", "_videos")):
        if of_kind := [(grid, pixels) for each, grid, _, pixels in pictures if each == kind]:
            arguments["pixel_values" + suffix] = torch.from_numpy(np.concatenate([pixels for _, pixels in of_kind]))
            arguments[f"{kind}_grid_thw"] = torch.tensor([grid for grid, _ in of_kind])
    return arguments


def _whole_images(pictures: Sequence[GivenPicture], vision: Vision) -> dict[str, torch.Tensor]:
    """Return pixel_values [images, channels, height, width], each in the upper left corner, and image_sizes."""
    images = [_image(pixels, grid, vision) for _, grid, _, pixels in pictures]
    sizes = torch.tensor([image.shape[1:] for image in images])
    values = torch.zeros(len(images), vision.in_channels, *sizes.amax(0).tolist())
    for number, image in enumerate(images):
        values[number, :, : image.shape[1], : image.shape[2]] = torch.from_numpy(image)
    return {"pixel_values": values, "image_sizes": sizes}


def _padded_patches(pictures: Sequence[GivenPicture], vision: Vision) -> dict[str, torch.Tensor]:
    """Return pixel_values [images, patches, numbers of a patch], row by row, the channels of a pixel side by side, and
    column and row of each patch, [images, patches, 2]; behind an image's own patches they are -1."""
    p, most = vision.patch_size, max(h * w for _, (_, h, w), _, _ in pictures)
    values = torch.zeros(len(pictures), most, vision.patch_channels)
    places = torch.full((len(pictures), most, 2), -1)
    for number, (_, (t, h, w), _, pixels) in enumerate(pictures):
        image = _image(pixels, (t, h, w), vision).reshape(-1, h, p, w, p).transpose(1, 3, 2, 4, 0)
        values[number, : h * w] = torch.from_numpy(image.reshape(h * w, -1))
        places[number, : h * w] = torch.cartesian_prod(torch.arange(h), torch.arange(w)).flip(1)
    return {"pixel_values": values, "image_position_ids": places}


def _squares(pictures: Sequence[GivenPicture], vision: Vision) -> torch.Tensor:
    """Return images, or the tiles of each, [tiles, channels, side, side]."""
    tiles = [_image(tile, (1, h, w), vision) for _, (t, h, w), _, pixels in pictures for tile in np.split(pixels, t)]
    return torch.from_numpy(np.stack(tiles))


def _types(input_ids: np.ndarray, vision: Vision) -> torch.Tensor:
    """Return which tokens are of pictures, int64 [1, tokens]."""
    return torch.from_numpy((np.asarray(input_ids) == vision.image_token_id).astype(np.int64))[None]


def _image(patches: np.ndarray, grid: Grid, vision: Vision) -> np.ndarray:
    """Put patches [h · w, channels · p²] of an image, token by token, together again: [channels, height, width]."""
    (_, h, w), m, p = grid, vision.spatial_merge_size, vision.patch_size
    cut = patches.reshape(h // m, w // m, m, m, vision.in_channels, p, p)
    return cut.transpose(4, 0, 2, 5, 1, 3, 6).reshape(vision.in_channels, h * p, w * p)
