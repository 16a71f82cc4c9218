"""Positions of tokens in time, height and width, for multimodal rotary embedding (arXiv:2409.12191, arXiv:2502.13923).

What follows a picture is at the largest position in it plus 1, and seconds between frames are kept as they are until a
position is made of them. Transformers 5.17 differs in both for videos of Qwen2-VL and Qwen2.5-VL: text goes on behind
the longer side of a frame, on positions that later frames have, too, and seconds are cut to whole ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megatune.encoders import Vision

Grid = tuple[int, int, int]


def rotary_position_ids(
    input_ids: np.ndarray, pictures: Sequence[tuple[Grid, float | None]], vision: Vision
) -> np.ndarray:
    """Return the positions of one document's tokens: int64 [3, tokens], of time, height and width, from 0.

    Args:
        input_ids: int [tokens].
        pictures: of the document, in the order of their tokens: grid in patches, and seconds from one temporal patch
            to the next (of videos; None counts frames).

    Raises:
        ValueError: the tokens of images and videos are not those of `pictures`.
    """
    input_ids = np.asarray(input_ids)
    if vision.one_position:
        tokens = sum(t * h * w for (t, h, w), _ in pictures) // vision.spatial_merge_size**2
        if (found := int((input_ids == vision.image_token_id).sum())) != tokens:
            raise ValueError(f"{found} tokens of pictures, and their grids have {tokens}")
        return np.broadcast_to(np.arange(len(input_ids)), (3, len(input_ids))).copy()
    positions = np.empty((3, len(input_ids)), dtype=np.int64)
    places = np.flatnonzero((input_ids == vision.image_token_id) | (input_ids == vision.video_token_id))
    written, position, used = 0, 0, 0
    for times, h, w in _blocks(pictures, places, input_ids, vision):
        begin, size = int(places[used]), len(times) * h * w
        if places[used : used + size][-1] - begin + 1 != size:
            raise ValueError(f"the {size} tokens of a picture at token {begin} are not in one piece")
        position += _write_text(positions[:, written:begin], position)
        block = positions[:, begin : begin + size].reshape(3, len(times), h, w)
        block[0] = times[:, None, None]
        block[1], block[2] = np.arange(h)[:, None], np.arange(w)
        block += position
        position = int(block.max()) + 1
        written, used = begin + size, used + size
    _write_text(positions[:, written:], position)
    return positions


def _blocks(
    pictures: Sequence[tuple[Grid, float | None]], places: np.ndarray, input_ids: np.ndarray, vision: Vision
) -> Iterator[tuple[np.ndarray, int, int]]:
    """Yield the blocks of tokens that the pictures are: positions in time, int64 [t], and merged height and width."""
    merge, used = vision.spatial_merge_size, 0
    for (t, h, w), seconds in pictures:
        h, w = h // merge, w // merge
        if used + t * h * w > len(places):
            raise ValueError(f"{len(places)} tokens of pictures, and their grids have more")
        is_video = input_ids[places[used]] == vision.video_token_id
        used += t * h * w
        if is_video and vision.timestamps:
            yield from [(np.zeros(1, dtype=np.int64), h, w)] * t
        elif is_video and vision.tokens_per_second is not None and seconds is not None:
            yield (np.arange(t) * vision.tokens_per_second * seconds).astype(np.int64), h, w
        else:
            yield np.arange(t), h, w
    if used != len(places):
        raise ValueError(f"{len(places)} tokens of pictures, and their grids have {used}")


def _write_text(positions: np.ndarray, begin: int) -> int:
    """Number tokens of text, int64 [3, tokens], from `begin` on; return their number."""
    positions[:] = np.arange(begin, begin + positions.shape[1])
    return positions.shape[1]
