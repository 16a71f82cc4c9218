"""From an image or a video to patches: how many there are, by its header alone, and their pixels.

The same patches as Transformers' processors of images with their PIL back end make, bit for bit, of images that
LLaMA-Factory has resized first. Frames of a video are resized and normalized as images are, where Transformers needs
torchvision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from megatune.data.bad_rows import RowError
from megatune.data.media import PictureSource
from megatune.data.media.images import image_size, load_image
from megatune.data.media.sizes import (
    Size,
    area_steps,
    edge_size,
    filled_size,
    scaled,
    side_steps,
    smart_resize,
    tiling,
    token_size,
)
from megatune.data.media.video import VideoHeader, decode_frames, read_header, sample_frames
from megatune.encoders import PictureText

_PATCHES_AT_ONCE = 64  # normalized together, so that they stay in the CPU's cache


@dataclass(frozen=True, slots=True)
class Measured:
    """An image or a video in numbers, which its header gives.

    Attributes:
        grid: temporal patches, or tiles of an image; patches down, patches across.
        seconds_per_grid: of a video, from one temporal patch to the next.
        timestamps: of a video whose model is told them: seconds from its start, in the middle of each temporal patch.
        frames: of a video, the numbers of those that are taken.
        size: width and height of the upright image, or frames, in the file.
    """

    grid: tuple[int, int, int]
    seconds_per_grid: float | None
    timestamps: tuple[float, ...]
    frames: tuple[int, ...]
    size: Size

    @property
    def num_patches(self) -> int:
        """Rows of pixel_values."""
        return self.grid[0] * self.grid[1] * self.grid[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What images, or frames of videos, are resized to and normalized by.

    Attributes:
        first: of LLaMA-Factory's resizing, the fewest and the most pixels; None resizes as ms-swift does.
        scale_to: with ms-swift's resizing, the most pixels of an image before it is brought to whole tokens.
        min_pixels, max_pixels: of the model's processor, or of ms-swift's resizing.
        longest_edge: in their place, the longest side of an image (Pixtral); None where they count.
        square: in their place, the pixels of both sides of every image; None where they count.
        tiles: with it, the fewest and the most squares that an image is cut into; more than one have the whole image
            behind them. None cuts nothing.
        tokens: in their place, the most tokens of an image, which fills them.
        resample: the filter of its resizing, as PIL numbers them.
    """

    first: tuple[int, int] | None
    scale_to: int | None = None
    min_pixels: int = 0
    max_pixels: int = 0
    longest_edge: int | None = None
    square: int | None = None
    # Keys of rows name these by themselves: rows of other models keep theirs.
    tiles: tuple[int, int] | None = field(default=None, repr=False)
    tokens: int | None = field(default=None, repr=False)
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureProcessor:
    """Measures images and videos, and makes their patches; `load_processor` reads one from a model's files.

    Attributes:
        video_fps, video_maxlen: how many frames of a video are taken.
        timestamps: each temporal patch of a video is a block of its own, behind its time, and the processor's bounds
            hold for all frames together (Qwen3-VL).
        text: what stands for pictures.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    image: Bounds
    video: Bounds
    video_fps: float
    video_maxlen: int
    timestamps: bool
    text: PictureText

    def measure(self, source: PictureSource) -> Measured:
        """Return grid and times of an image or a video; nothing is decoded but a video's first frame.

        Raises:
            RowError: it cannot be read, or not be used; damage within a file shows only in `pixels`.
            MegatuneError: PyAV, which a video needs, is not installed (exit code 66).
        """
        if source.kind == "video" and not self.text.video:
            raise RowError("no-videos", "video: the model reads images only", source.name)
        if source.kind == "image":
            size = image_size(source)
            return Measured(self._grid(size, (), self.image, source), None, (), (), size)
        if source.frames is None:
            header = read_header(source)
            numbers = sample_frames(header, self.video_fps, self.video_maxlen)
            fps = len(numbers) / header.seconds
        else:
            header, fps = self._header(source), self.video_fps
            numbers = tuple(range(header.num_frames))
        T = self.temporal_patch_size
        # The times of frames as LLaMA-Factory hands them to Transformers: in frames of video_fps a second.
        times = [number / header.rate * self.video_fps / self.video_fps for number in numbers]
        times += times[-1:] * (-len(times) % T)
        middles = [(times[i] + times[i + T - 1]) / 2 for i in range(0, len(times), T)]
        return Measured(
            self._grid(header.size, numbers, self.video, source),
            T / fps,
            tuple(middles) if self.timestamps else (),
            numbers,
            header.size,
        )

    def pixels(self, source: PictureSource, measured: Measured) -> np.ndarray:
        """Decode an image or a video that was measured: its patches, normalized.

        Returns:
            pixel_values, fp32 [t·h·w, channels · temporal_patch_size · patch_size²], the patches of a merged token side
            by side.

        Raises:
            RowError: it is damaged, or another than was measured.
        """
        if source.kind == "image":
            bounds, depth = self.image, 1
            decoded: Iterable[Image.Image] = [load_image(source)]
        else:
            bounds, depth = self.video, self.temporal_patch_size
            decoded = (
                map(load_image, source.frames) if source.frames is not None else decode_frames(source, measured.frames)
            )
        frames = [frame for image in decoded for frame in self._resized(image, bounds, source, measured)]
        cut = cut_patches(frames, self.patch_size, self.merge_size, depth)
        return normalize(cut, bounds.mean, bounds.std, self.temporal_patch_size)

    def placeholder(self, measured: Measured) -> str:
        """Return the text that stands for an image or a video: as many pad tokens as it has merged patches."""
        return self._written(measured, self.runs(measured))

    def short_placeholder(self, measured: Measured) -> str:
        """Return the same with one pad token for each of its `runs`."""
        return self._written(measured, (1,) * len(self.runs(measured)))

    def runs(self, measured: Measured) -> tuple[int, ...]:
        """Return how many pad tokens lie side by side, for each place where some do."""
        t, h, w = measured.grid
        tokens = measured.num_patches // self.merge_size**2
        if self.text.row_end:
            return (w // self.merge_size,) * (h // self.merge_size)
        return (tokens // t,) * t if measured.timestamps else (tokens,)

    def _written(self, measured: Measured, runs: Sequence[int]) -> str:
        text = self.text
        pads = [(text.video if measured.frames else text.image) * run for run in runs]
        if not measured.timestamps:
            return f"{text.start}{text.row_end.join(pads)}{text.end}"
        blocks = zip(measured.timestamps, pads, strict=True)
        return "".join(f"<{seconds:.1f} seconds>{text.start}{pad}{text.end}" for seconds, pad in blocks)

    def _header(self, source: PictureSource) -> VideoHeader:
        """Return the header of a list of frames, which are video_fps a second."""
        assert source.frames is not None
        if not source.frames:
            raise RowError("no-frames", "video: no frames", "the list is empty")
        sizes = sorted({image_size(frame) for frame in source.frames})
        if len(sizes) > 1:
            (a, b), (c, d) = sizes[:2]
            raise RowError(
                "different-frames", "video: frames of different sizes", f"{source.name}: {a} x {b}, {c} x {d}"
            )
        count = len(source.frames)
        return VideoHeader(count, count / self.video_fps, self.video_fps, sizes[0])

    def _grid(self, size: Size, frames: Sequence[int], bounds: Bounds, source: PictureSource) -> tuple[int, int, int]:
        factor, t = self.patch_size * self.merge_size, 1
        size = [size, *self._steps(size, bounds, source)][-1]
        if bounds.square is not None:
            t = math.prod(tiling(size, bounds.square, *bounds.tiles)) if bounds.tiles is not None else 1
            t, size = t + (t > 1), (bounds.square, bounds.square)
        elif bounds.tokens is not None:
            size = filled_size(size, factor, bounds.tokens, source.name)
        elif bounds.longest_edge is not None:
            size = edge_size(size, factor, bounds.longest_edge, source.name)
        elif bounds.first is None:
            size = token_size(size, factor, bounds.min_pixels, bounds.max_pixels, source.name)
        else:
            size = [size, *side_steps(size)][-1]
            t = -(-max(len(frames), 1) // self.temporal_patch_size)
            together = t * self.temporal_patch_size if frames and self.timestamps else 1
            size = smart_resize(size, factor, bounds.min_pixels, bounds.max_pixels, together)
        return t, size[1] // self.patch_size, size[0] // self.patch_size

    def _steps(self, size: Size, bounds: Bounds, source: PictureSource) -> list[Size]:
        """Return the sizes that an image has, one after the other, before the model's processor resizes it."""
        if bounds.first is not None:
            return area_steps(size, *bounds.first, source.name)
        changed = scaled(size, bounds.scale_to, source.name)
        return [] if changed == size else [changed]

    def _resized(
        self, image: Image.Image, bounds: Bounds, source: PictureSource, measured: Measured
    ) -> list[Image.Image]:
        """Return what is cut into patches of an image: itself in its size, or its tiles."""
        if image.size != measured.size:
            (a, b), (c, d) = image.size, measured.size
            detail = f"{source.name}: {a} x {b} pixels, and {c} x {d} when it was measured"
            raise RowError("changed-picture", f"{source.kind}: its size has changed since it was measured", detail)
        whole = measured.grid[2] * self.patch_size, measured.grid[1] * self.patch_size
        by_area = bounds.longest_edge is None and bounds.square is None and bounds.tokens is None
        steps = self._steps(image.size, bounds, source)
        if by_area and bounds.first is None:
            image = _in_rgb(image)
            for step in steps:
                image = image.resize(step, Image.Resampling.BILINEAR)
            return [image.resize(whole)]
        # In the mode of the file, in which a palette has no colours between: as LLaMA-Factory does it.
        for step in steps:
            image = image.resize(step)
        image = _in_rgb(image)
        for step in side_steps(image.size) if by_area else ():
            image = image.resize(step)
        return [*_tiles(image, bounds), image.resize(whole, Image.Resampling(bounds.resample))]


def _in_rgb(image: Image.Image) -> Image.Image:
    return image if image.mode == "RGB" else image.convert("RGB")


def _tiles(image: Image.Image, bounds: Bounds) -> list[Image.Image]:
    """Cut an image into squares, row by row; none where one is all of it."""
    if bounds.tiles is None or bounds.square is None:
        return []
    side, (columns, rows) = bounds.square, tiling(image.size, bounds.square, *bounds.tiles)
    if columns * rows == 1:
        return []
    image = image.resize((columns * side, rows * side), Image.Resampling(bounds.resample))
    corners = ((side * column, side * row) for row in range(rows) for column in range(columns))
    return [image.crop((left, top, left + side, top + side)) for left, top in corners]


def spaced(text: str, pictures: PictureText) -> str:
    """Put what is around pictures into a conversation that a template has written: some would trim it."""
    if not pictures.around or pictures.start not in text:
        return text
    before, behind = pictures.around + pictures.start, pictures.end + pictures.around
    return text.replace(pictures.start, before).replace(pictures.end, behind)


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
