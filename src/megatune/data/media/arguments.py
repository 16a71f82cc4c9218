"""The media inputs of models in addition to pixels: token positions in time, height and width, for multimodal rotary
embedding (arXiv:2409.12191, arXiv:2502.13923); and the arguments of Transformers' models.

The token after an image or video is at its largest position plus 1, and seconds between frames are rounded only when
they become positions. Transformers 5.17 differs in both for videos of Qwen2-VL and Qwen2.5-VL: text continues after the
longer side of a frame, at positions that later frames use, too, and seconds are truncated to whole ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from megatune.encoders import Vision

Grid = tuple[int, int, int]
# An image or a video: its kind, grid, seconds from one temporal patch to the next, and patches.
MediaInput = tuple[str, Grid, float | None, np.ndarray]


def rotary_position_ids(
    input_ids: np.ndarray, media: Sequence[tuple[Grid, float | None]], vision: Vision
) -> np.ndarray:
    """Return the positions of one document's tokens: int64 [3, tokens], of time, height and width, from 0.

    Args:
        input_ids: int [tokens].
        media: images and videos of the document in token order: grid in patches, and seconds from one temporal patch
            to the next (for videos; None counts frames).

    Raises:
        ValueError: the tokens of images and videos do not match `media`.
    """
    input_ids = np.asarray(input_ids)
    if vision.one_position:
        tokens = sum(t * h * w for (t, h, w), _ in media) // vision.spatial_merge_size**2
        if (found := int((input_ids == vision.image_token_id).sum())) != tokens:
            raise ValueError(f"{found} image tokens, but the grids have {tokens}")
        return np.broadcast_to(np.arange(len(input_ids)), (3, len(input_ids))).copy()
    positions = np.empty((3, len(input_ids)), dtype=np.int64)
    places = np.flatnonzero((input_ids == vision.image_token_id) | (input_ids == vision.video_token_id))
    written, position, used = 0, 0, 0
    for times, h, w in _blocks(media, places, input_ids, vision):
        begin, size = int(places[used]), len(times) * h * w
        if places[used : used + size][-1] - begin + 1 != size:
            raise ValueError(f"the {size} tokens of an image or video at token {begin} are not contiguous")
        positions[:, written:begin] = np.arange(position, position + begin - written)
        position += begin - written
        block = positions[:, begin : begin + size].reshape(3, len(times), h, w)
        block[0] = times[:, None, None]
        block[1], block[2] = np.arange(h)[:, None], np.arange(w)
        block += position
        position = int(block.max()) + 1
        written, used = begin + size, used + size
    positions[:, written:] = np.arange(position, position + len(input_ids) - written)
    return positions


def _blocks(
    media: Sequence[tuple[Grid, float | None]], places: np.ndarray, input_ids: np.ndarray, vision: Vision
) -> Iterator[tuple[np.ndarray, int, int]]:
    """Yield the blocks of media tokens: positions in time, int64 [t], and merged height and width."""
    merge, used = vision.spatial_merge_size, 0
    for (t, h, w), seconds in media:
        h, w = h // merge, w // merge
        if used + t * h * w > len(places):
            raise ValueError(f"{len(places)} media tokens, but their grids have more")
        is_video = input_ids[places[used]] == vision.video_token_id
        used += t * h * w
        if is_video and vision.timestamps:
            yield from [(np.zeros(1, dtype=np.int64), h, w)] * t
        elif is_video and vision.tokens_per_second is not None and seconds is not None:
            yield (np.arange(t) * vision.tokens_per_second * seconds).astype(np.int64), h, w
        else:
            yield np.arange(t), h, w
    if used != len(places):
        raise ValueError(f"{len(places)} media tokens, but their grids have {used}")


def media_arguments(input_ids: np.ndarray, media: Sequence[MediaInput], vision: Vision) -> dict[str, torch.Tensor]:
    """Return the media arguments of Transformers' models for one row with `input_ids` [tokens].

    They include three-dimensional positions if the model has them, since Transformers 5.17 computes others for videos
    of Qwen2-VL and Qwen2.5-VL; its generate continues from the last one.

    Raises:
        ValueError: the tokens of images and videos do not match `media`.
    """
    rows = rotary_position_ids(input_ids, [(grid, seconds) for _, grid, seconds, _ in media], vision)
    if vision.square is not None:
        arguments = {"pixel_values": _squares(media, vision)}
        return arguments | ({"token_type_ids": _types(input_ids, vision)} if vision.whole else {})
    if vision.tokens_of_image is not None:
        arguments = _padded_patches(media, vision)
        return arguments | ({"mm_token_type_ids": _types(input_ids, vision)} if vision.whole else {})
    if vision.one_position:
        return _whole_images(media, vision)
    # The first row is for masks; the other three are time, height and width.
    arguments = {"position_ids": torch.from_numpy(np.concatenate([np.arange(rows.shape[1])[None], rows]))[:, None]}
    for kind, suffix in (("image", ""), ("video", "_videos")):
        if of_kind := [(grid, pixels) for each, grid, _, pixels in media if each == kind]:
            arguments["pixel_values" + suffix] = torch.from_numpy(np.concatenate([pixels for _, pixels in of_kind]))
            arguments[f"{kind}_grid_thw"] = torch.tensor([grid for grid, _ in of_kind])
    return arguments


def _whole_images(media: Sequence[MediaInput], vision: Vision) -> dict[str, torch.Tensor]:
    """Return pixel_values [images, channels, height, width], each image in the upper left corner, and image_sizes."""
    images = [_image(pixels, grid, vision) for _, grid, _, pixels in media]
    sizes = torch.tensor([image.shape[1:] for image in images])
    values = torch.zeros(len(images), vision.in_channels, *sizes.amax(0).tolist())
    for number, image in enumerate(images):
        values[number, :, : image.shape[1], : image.shape[2]] = torch.from_numpy(image)
    return {"pixel_values": values, "image_sizes": sizes}


def _padded_patches(media: Sequence[MediaInput], vision: Vision) -> dict[str, torch.Tensor]:
    """Return pixel_values [images, patches, values per patch], row by row with adjacent channels of a pixel, and column
    and row of each patch, [images, patches, 2]; both are padded, positions with -1."""
    p, most = vision.patch_size, max(h * w for _, (_, h, w), _, _ in media)
    values = torch.zeros(len(media), most, vision.patch_channels)
    places = torch.full((len(media), most, 2), -1)
    for number, (_, (t, h, w), _, pixels) in enumerate(media):
        image = _image(pixels, (t, h, w), vision).reshape(-1, h, p, w, p).transpose(1, 3, 2, 4, 0)
        values[number, : h * w] = torch.from_numpy(image.reshape(h * w, -1))
        places[number, : h * w] = torch.cartesian_prod(torch.arange(h), torch.arange(w)).flip(1)
    return {"pixel_values": values, "image_position_ids": places}


def _squares(media: Sequence[MediaInput], vision: Vision) -> torch.Tensor:
    """Return the images, or the tiles of each: [tiles, channels, side, side]."""
    tiles = [_image(tile, (1, h, w), vision) for _, (t, h, w), _, pixels in media for tile in np.split(pixels, t)]
    return torch.from_numpy(np.stack(tiles))


def _types(input_ids: np.ndarray, vision: Vision) -> torch.Tensor:
    """Return which tokens are media tokens, int64 [1, tokens]."""
    return torch.from_numpy((np.asarray(input_ids) == vision.image_token_id).astype(np.int64))[None]


def _image(patches: np.ndarray, grid: Grid, vision: Vision) -> np.ndarray:
    """Reassemble an image from its patches [h · w, channels · p²] in token order: [channels, height, width]."""
    (_, h, w), m, p = grid, vision.spatial_merge_size, vision.patch_size
    cut = patches.reshape(h // m, w // m, m, m, vision.in_channels, p, p)
    return cut.transpose(4, 0, 2, 5, 1, 3, 6).reshape(vision.in_channels, h * p, w * p)
