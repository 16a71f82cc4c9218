"""Target sizes of images and frames: LLaMA-Factory's bounds, followed by those of the model's processor; or ms-swift's
bounds alone.

All sizes are (width, height).
"""

from __future__ import annotations

import math
from itertools import product

from megatune.data.bad_rows import RowError

Size = tuple[int, int]

MIN_SIDE = 28
MAX_ASPECT, CUT_ASPECT = 200, 180


def area_steps(size: Size, min_pixels: int, max_pixels: int, name: str) -> list[Size]:
    """Return the sizes to which LLaMA-Factory resizes an image, in order, to bring its area within bounds.

    Raises:
        RowError: the image, with this name, is so thin that a side would become 0.
    """
    steps = []
    for bound, wrong in ((max_pixels, int.__gt__), (min_pixels, int.__lt__)):
        width, height = size
        if wrong(width * height, bound):
            factor = math.sqrt(bound / (width * height))
            size = int(width * factor), int(height * factor)
            if not min(size):
                raise _too_thin((width, height), name)
            steps.append(size)
    return steps


def side_steps(size: Size) -> list[Size]:
    """Return the sizes to which LLaMA-Factory then resizes an RGB image, so that the processor accepts it."""
    steps = []
    if min(size) < MIN_SIDE:
        size = max(size[0], MIN_SIDE), max(size[1], MIN_SIDE)
        steps.append(size)
    width, height = size
    if width / height > MAX_ASPECT:
        steps.append((height * CUT_ASPECT, height))
    elif height / width > MAX_ASPECT:
        steps.append((width, width * CUT_ASPECT))
    return steps


def scale_down(size: Size, most_pixels: int | None, name: str) -> Size:
    """Return the size to which ms-swift's --max_pixels scales an image down; None scales nothing.

    Raises:
        RowError: the image, with this name, is so thin that a side would become 0.
    """
    width, height = size
    if most_pixels is None or width * height <= most_pixels:
        return size
    ratio = width / height
    side = math.sqrt(most_pixels / ratio)
    size = int(side * ratio), int(side)
    if not min(size):
        raise _too_thin((width, height), name)
    return size


def token_size(size: Size, factor: int, min_pixels: int, max_pixels: int, name: str) -> Size:
    """Return ms-swift's size of an image, in multiples of `factor` (qwen_vl_utils' smart_resize).

    Raises:
        RowError: the image, with this name, is too thin.
    """
    width, height = size
    rounded = tuple(max(factor, round(side / factor) * factor) for side in size)
    if rounded[0] * rounded[1] > max_pixels:
        beta = math.sqrt(height * width / max_pixels)
        rounded = tuple(math.floor(side / beta / factor) * factor for side in size)
    elif rounded[0] * rounded[1] < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        rounded = tuple(math.ceil(side * beta / factor) * factor for side in size)
    if max(size) > MAX_ASPECT * min(size) or not min(rounded):
        raise _too_thin((width, height), name)
    return rounded[0], rounded[1]


def edge_size(size: Size, factor: int, longest_edge: int, name: str) -> Size:
    """Return the size in multiples of `factor`, rounded up, of Transformers' PixtralImageProcessor, which keeps the
    ratio of the sides and shrinks images with a side above `longest_edge`.

    Raises:
        RowError: the image, with this name, is so thin that a side would become 0.
    """
    ratio = max(side / longest_edge for side in size)
    width, height = (math.floor(side / ratio) for side in size) if ratio > 1 else size
    if not min(width, height):
        raise _too_thin(size, name)
    return -(-width // factor) * factor, -(-height // factor) * factor


def tiling(size: Size, square: int, fewest: int, most: int) -> Size:
    """Return columns and rows of the square tiles into which Transformers' GotOcr2ImageProcessor cuts an image.

    The nearest aspect ratio is used. Of several tilings with it, in order of their number of tiles, the last one
    whose tiles have less than twice the image's area is used.
    """
    width, height = size
    sides = range(1, most + 1)
    found = [each for each in product(sides, sides) if fewest <= math.prod(each) <= most]
    best, nearest = (1, 1), math.inf
    for columns, rows in sorted(found, key=math.prod):
        distance = abs(width / height - columns / rows)
        if distance < nearest or (distance == nearest and width * height > 0.5 * square**2 * columns * rows):
            best, nearest = (columns, rows), distance
    return best


def filled_size(size: Size, factor: int, tokens: int, name: str) -> Size:
    """Return the largest size in multiples of `factor`, rounded down, with an image's aspect ratio and at most this
    many tokens, as in Transformers' Gemma4ImageProcessor.

    Raises:
        RowError: the image, with this name, is too thin.
    """
    width, height = size
    scale = math.sqrt(tokens * factor**2 / (width * height))
    columns, rows = (math.floor(scale * side / factor) for side in size)
    if not columns and not rows:
        raise _too_thin((width, height), name)
    if not rows:
        columns, rows = min(width // height, tokens), 1
    elif not columns:
        columns, rows = 1, min(height // width, tokens)
    return columns * factor, rows * factor


def smart_resize(size: Size, factor: int, min_pixels: int, max_pixels: int, frames: int = 1) -> Size:
    """Return the nearest size in multiples of `factor` whose area, times `frames`, is within bounds.

    As Transformers' smart_resize: Qwen2-VL's for images and frames, and Qwen3-VL's for all frames of a video, whose
    number must fill its temporal patches.
    """
    if frames > 1 and min(size) < factor:
        scale = factor / min(size)
        size = int(size[0] * scale), int(size[1] * scale)
    width, height = size
    rounded = round(width / factor) * factor, round(height / factor) * factor
    area = frames * rounded[0] * rounded[1]
    if area > max_pixels:
        beta = math.sqrt(frames * height * width / max_pixels)
        return tuple(max(factor, math.floor(side / beta / factor) * factor) for side in size)  # type: ignore[return-value]
    if area < min_pixels:
        beta = math.sqrt(min_pixels / (frames * height * width))
        return tuple(math.ceil(side * beta / factor) * factor for side in size)  # type: ignore[return-value]
    return rounded


def _too_thin(size: Size, name: str) -> RowError:
    return RowError("thin-picture", "too thin to be resized", f"{name}: {size[0]} x {size[1]}")
