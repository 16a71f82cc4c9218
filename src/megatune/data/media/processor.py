"""Convert images and videos to patches: the number of patches, from the header alone, and their pixels.

The patches equal those of Transformers' image processors with the PIL back end, bit for bit, for images that
LLaMA-Factory has resized first. Frames of a video are resized and normalized like images; Transformers needs
torchvision for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from megatune.data.bad_rows import RowError
from megatune.data.media import MediaSource
from megatune.data.media.images import image_size, load_image
from megatune.data.media.sizes import (
    Size,
    area_steps,
    edge_size,
    filled_size,
    scale_down,
    side_steps,
    smart_resize,
    tiling,
    token_size,
)
from megatune.data.media.video import VideoHeader, decode_frames, read_header, sample_frames
from megatune.encoders import MediaPlaceholder

_PATCHES_AT_ONCE = 64  # normalized together, so that they stay in the CPU cache


@dataclass(frozen=True, slots=True)
class MediaShape:
    """The shape and timing of an image or a video, according to its header.

    Attributes:
        grid: temporal patches, or tiles of an image; patches down, patches across.
        seconds_per_grid: for a video, from one temporal patch to the next.
        timestamps: for a video of a model that reads them: seconds from its start to the middle of each temporal patch.
        frames: for a video, the indices of the sampled frames.
        size: width and height of the upright image or frames in the file.
    """

    grid: tuple[int, int, int]
    seconds_per_grid: float | None
    timestamps: tuple[float, ...]
    frames: tuple[int, ...]
    size: Size

    @property
    def num_patches(self) -> int:
        """The number of rows of pixel_values."""
        return self.grid[0] * self.grid[1] * self.grid[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Resizing and normalization of images or of video frames.

    Attributes:
        first: minimum and maximum pixels of LLaMA-Factory's resizing; None resizes as ms-swift does.
        scale_to: with ms-swift's resizing, the maximum pixels of an image before it is rounded to whole tokens.
        min_pixels, max_pixels: of the model's processor, or of ms-swift's resizing.
        longest_edge: the longest side of an image (Pixtral), instead of min_pixels and max_pixels.
        square: the side in pixels to which every image is resized, instead of min_pixels and max_pixels.
        tiles: with `square`, the minimum and maximum number of tiles of an image; several tiles are followed by the
            whole image. None cuts no tiles.
        tokens: the maximum tokens of an image, which uses as many as fit, instead of min_pixels and max_pixels.
        resample: the filter of the processor's resizing, as PIL numbers them.
    """

    first: tuple[int, int] | None
    scale_to: int | None = None
    min_pixels: int = 0
    max_pixels: int = 0
    longest_edge: int | None = None
    square: int | None = None
    # Keys of rows add these separately, so that the keys of other models' rows do not change.
    tiles: tuple[int, int] | None = field(default=None, repr=False)
    tokens: int | None = field(default=None, repr=False)
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaProcessor:
    """Measures images and videos and computes their patches; `load_processor` reads one from a model's files.

    Attributes:
        video_fps, video_maxlen: the frame rate and the maximum number of frames to sample from a video.
        timestamps: each temporal patch of a video is a separate block after its timestamp, and the processor's bounds
            apply to all frames together (Qwen3-VL).
        text: the placeholder tokens of images and videos.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    image: Bounds
    video: Bounds
    video_fps: float
    video_maxlen: int
    timestamps: bool
    text: MediaPlaceholder

    def measure(self, source: MediaSource) -> MediaShape:
        """Return grid and timestamps of an image or a video; only a video's first frame is decoded.

        Raises:
            RowError: it cannot be read or used; damage within a file is detected only in `pixels`.
            MegatuneError: PyAV, which videos need, is not installed (exit code 66).
        """
        if source.kind == "video" and not self.text.video:
            raise RowError("no-videos", "video: the model reads images only", source.name)
        if source.kind == "image":
            size = image_size(source)
            return MediaShape(self._grid(size, (), self.image, source), None, (), (), size)
        if source.frames is None:
            header = read_header(source)
            numbers = sample_frames(header, self.video_fps, self.video_maxlen)
            fps = len(numbers) / header.seconds
        else:
            header, fps = self._header(source), self.video_fps
            numbers = tuple(range(header.num_frames))
        T = self.temporal_patch_size
        # The frame times that LLaMA-Factory passes to Transformers: in frames of video_fps per second.
        times = [number / header.rate * self.video_fps / self.video_fps for number in numbers]
        times += times[-1:] * (-len(times) % T)
        middles = [(times[i] + times[i + T - 1]) / 2 for i in range(0, len(times), T)]
        return MediaShape(
            self._grid(header.size, numbers, self.video, source),
            T / fps,
            tuple(middles) if self.timestamps else (),
            numbers,
            header.size,
        )

    def pixels(self, source: MediaSource, measured: MediaShape) -> np.ndarray:
        """Decode a measured image or video to normalized patches.

        Returns:
            pixel_values, fp32 [t·h·w, channels · temporal_patch_size · patch_size²]; the patches of a merged token are
            adjacent.

        Raises:
            RowError: it is damaged, or has changed since it was measured.
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

    def runs(self, measured: MediaShape) -> tuple[int, ...]:
        """Return the lengths of the runs of adjacent pad tokens."""
        t, h, w = measured.grid
        tokens = measured.num_patches // self.merge_size**2
        if self.text.row_end:
            return (w // self.merge_size,) * (h // self.merge_size)
        return (tokens // t,) * t if measured.timestamps else (tokens,)

    def placeholder(self, measured: MediaShape, *, short: bool = False) -> str:
        """Return the placeholder text of an image or a video, with one pad token per merged patch.

        Args:
            short: write one pad token for each of its `runs`.
        """
        text, runs = self.text, self.runs(measured)
        pads = [(text.video if measured.frames else text.image) * (1 if short else run) for run in runs]
        if not measured.timestamps:
            return f"{text.start}{text.row_end.join(pads)}{text.end}"
        blocks = zip(measured.timestamps, pads, strict=True)
        return "".join(f"<{seconds:.1f} seconds>{text.start}{pad}{text.end}" for seconds, pad in blocks)

    def _header(self, source: MediaSource) -> VideoHeader:
        """Return the header of a list of frames, which have video_fps frames per second."""
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

    def _grid(self, size: Size, frames: Sequence[int], bounds: Bounds, source: MediaSource) -> tuple[int, int, int]:
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

    def _steps(self, size: Size, bounds: Bounds, source: MediaSource) -> list[Size]:
        """Return the sizes to which an image is resized, in order, before the model's processor resizes it."""
        if bounds.first is not None:
            return area_steps(size, *bounds.first, source.name)
        changed = scale_down(size, bounds.scale_to, source.name)
        return [] if changed == size else [changed]

    def _resized(
        self, image: Image.Image, bounds: Bounds, source: MediaSource, measured: MediaShape
    ) -> list[Image.Image]:
        """Return the images to cut into patches: the resized image, or its tiles and the resized image."""
        if image.size != measured.size:
            (a, b), (c, d) = image.size, measured.size
            detail = f"{source.name}: {a} x {b} pixels, but {c} x {d} when it was measured"
            raise RowError("changed-picture", f"{source.kind}: its size has changed since it was measured", detail)
        whole = measured.grid[2] * self.patch_size, measured.grid[1] * self.patch_size
        by_area = bounds.longest_edge is None and bounds.square is None and bounds.tokens is None
        steps = self._steps(image.size, bounds, source)
        if by_area and bounds.first is None:
            image = _in_rgb(image)
            for step in steps:
                image = image.resize(step, Image.Resampling.BILINEAR)
            return [image.resize(whole)]
        # In the mode of the file, where a palette has no colors in between, as in LLaMA-Factory.
        for step in steps:
            image = image.resize(step)
        image = _in_rgb(image)
        for step in side_steps(image.size) if by_area else ():
            image = image.resize(step)
        return [*_tiles(image, bounds), image.resize(whole, Image.Resampling(bounds.resample))]


def _in_rgb(image: Image.Image) -> Image.Image:
    return image if image.mode == "RGB" else image.convert("RGB")


def _tiles(image: Image.Image, bounds: Bounds) -> list[Image.Image]:
    """Cut an image into square tiles, row by row; return none if one tile is the whole image."""
    if bounds.tiles is None or bounds.square is None:
        return []
    side, (columns, rows) = bounds.square, tiling(image.size, bounds.square, *bounds.tiles)
    if columns * rows == 1:
        return []
    image = image.resize((columns * side, rows * side), Image.Resampling(bounds.resample))
    corners = ((side * column, side * row) for row in range(rows) for column in range(columns))
    return [image.crop((left, top, left + side, top + side)) for left, top in corners]


def pad_media(text: str, media: MediaPlaceholder) -> str:
    """Insert the text around images and videos into a rendered conversation: some templates would trim it."""
    if not media.around or media.start not in text:
        return text
    before, after = media.around + media.start, media.end + media.around
    return text.replace(media.start, before).replace(media.end, after)


def cut_patches(frames: Sequence[Image.Image], patch_size: int, merge_size: int, depth: int) -> np.ndarray:
    """Cut frames into patches; the last frame is repeated until the patches are full.

    Args:
        frames: in RGB, all of one size: a multiple of patch_size · merge_size.
        depth: frames per patch.

    Returns:
        uint8 [patches, 3, depth, patch_size²]: the merge_size² patches of a token are adjacent, token by token, row by
        row, and frames in order.
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
    """Return (patches / 255 - mean) / std per channel, bit for bit as Transformers computes it.

    Args:
        patches: uint8 [patches, 3, frames, pixels].
        depth: frames per patch in the result; those of an image's patches are all the same.

    Returns:
        fp32 [patches, 3 · depth · pixels].
    """
    num_patches, channels, _, pixels = patches.shape
    values = np.empty((num_patches, channels, depth, pixels), dtype=np.float32)
    shift, scale = (np.array(each, dtype=np.float32)[:, None, None] for each in (mean, std))
    for begin in range(0, num_patches, _PATCHES_AT_ONCE):
        part = slice(begin, begin + _PATCHES_AT_ONCE)
        # In fp32, a byte divided by 255 equals Transformers' product in fp64 after rounding.
        numbers = patches[part] / np.float32(255)
        numbers -= shift
        numbers /= scale
        values[part] = numbers
    return values.reshape(num_patches, -1)
