"""Patches of images: rows of numbers, in the order in which the vision encoder merges them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image

_PATCHES_AT_ONCE = 64  # normalized together, so that they stay in the CPU's cache


def cut_patches(frames: Sequence[Image.Image], patch_size: int, merge_size: int, depth: int) -> np.ndarray:
    """Cut frames into patches; the last frame is repeated until patches are full.

    Args:
        frames: in RGB, of one size: a multiple of patch_size · merge_size.
        depth: frames of a patch.

    Returns:
        uint8 [patches, 3, depth, patch_size²]: those that merge_size² of a token side by side, token by token, row by
        row, and frames in their order.
    """
    p, m = patch_size, merge_size
    t, w, h = -(-len(frames) // depth), *(side // p for side in frames[0].size)
    patches = np.empty((t, h // m, w // m, m, m, 3, depth, p, p), dtype=np.uint8)
    for number in range(t * depth):
        frame = frames[min(number, len(frames) - 1)]
        for channel, band in enumerate(frame.split()):
            pixels = np.asarray(band).reshape(h // m, m, p, w // m, m, p)
            patches[number // depth, ..., channel, number % depth, :, :] = pixels.transpose(0, 3, 1, 4, 2, 5)
    return patches.reshape(t * h * w, 3, depth, p * p)


def normalize(patches: np.ndarray, mean: Sequence[float], std: Sequence[float], depth: int) -> np.ndarray:
    """Return (patches / 255 - mean) / std by channel, bit for bit as Transformers computes it.

    Args:
        patches: uint8 [patches, 3, frames, pixels].
        depth: frames of a patch in the result; those of an image's patches are all the same one.

    Returns:
        fp32 [patches, 3 · depth · pixels].
    """
    num_patches, channels, _, pixels = patches.shape
    values = np.empty((num_patches, channels, depth, pixels), dtype=np.float32)
    shift, scale = (np.array(each, dtype=np.float32)[:, None, None] for each in (mean, std))
    for begin in range(0, num_patches, _PATCHES_AT_ONCE):
        part = slice(begin, begin + _PATCHES_AT_ONCE)
        # In fp32, a byte divided by 255 is what Transformers' product in fp64 is rounded to.
        numbers = patches[part] / np.float32(255)
        numbers -= shift
        numbers /= scale
        values[part] = numbers
    return values.reshape(num_patches, -1)
