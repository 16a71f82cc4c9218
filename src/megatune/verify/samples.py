"""Random token rows for comparisons."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from megatune.data.build import pack
from megatune.data.rows import IGNORE_INDEX
from megatune.encoders import Vision

# The smallest fp16 number is 6e-8, and gradients of a mean loss would underflow. All sides multiply their loss by this
# in fp16; relative errors are the same.
FP16_LOSS_SCALE = 1024.0


@dataclass(frozen=True, slots=True)
class SampleMedia:
    """An image or a video of random pixels.

    Attributes:
        grid: patches (t, h, w).
        seconds_per_grid: seconds between temporal patches of a video.
        seed: seed of the pixels.
    """

    kind: Literal["image", "video"]
    grid: tuple[int, int, int]
    seed: int
    seconds_per_grid: float | None = None

    def pixel_values(self, vision: Vision) -> np.ndarray:
        """Return fp32 [patches, channels of a patch], with the scale of normalized pixels."""
        channels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        generator = np.random.default_rng(self.seed)
        return generator.standard_normal((math.prod(self.grid), channels), dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Sample:
    """One row of tokens. Labels are not shifted, as in Transformers, and -100 for tokens that are not trained. Images
    and videos are in the order of their tokens."""

    input_ids: tuple[int, ...]
    labels: tuple[int, ...]
    media: tuple[SampleMedia, ...] = ()


def random_samples(
    vocab_size: int,
    lengths: Sequence[int],
    seed: int = 0,
    *,
    media: Sequence[Sequence[SampleMedia]] = (),
    vision: Vision | None = None,
) -> list[Sample]:
    """Return rows of random tokens; a random prefix of up to half of each row's text is not trained.

    Args:
        lengths: length of the text of each row.
        media: images and videos of the first rows, with text before, between and after them; their tokens are
            additional to the text.
        vision: for vision-language models, whose special tokens are excluded from the text.
    """
    generator = random.Random(seed)
    tokens_of_text = list(range(vocab_size))
    if vision is not None:
        special = vision.image_token_id, vision.video_token_id, vision.vision_start_token_id, vision.vision_end_token_id
        tokens_of_text = [token for token in tokens_of_text if token not in special]
    samples = []
    for row, length in enumerate(lengths):
        tokens = tuple(generator.choice(tokens_of_text) for _ in range(length))
        untrained = generator.randrange(length // 2 + 1)
        sample = Sample(tokens, (IGNORE_INDEX,) * untrained + tokens[untrained:])
        samples.append(_with_media(sample, media[row], vision) if vision and row < len(media) else sample)
    return samples


def _with_media(text: Sample, media: Sequence[SampleMedia], vision: Vision) -> Sample:
    """Put images and videos between equal parts of a row of text; their tokens are not trained."""
    ends = [number * len(text.input_ids) // (len(media) + 1) for number in range(len(media) + 2)]
    input_ids, labels = [], []
    for number, (start, stop) in enumerate(pairwise(ends)):
        block = _block(media[number - 1], vision, text.input_ids[start:][:2]) if number else ()
        input_ids += [*block, *text.input_ids[start:stop]]
        labels += [*[IGNORE_INDEX] * len(block), *text.labels[start:stop]]
    return Sample(tuple(input_ids), tuple(labels), tuple(media))


def _block(item: SampleMedia, vision: Vision, time: Sequence[int]) -> list[int]:
    """Return the tokens of an image or video, including its start and end tokens.

    Args:
        time: the text before each frame of a video, for models with timestamps.
    """
    apart = item.kind == "video" and vision.timestamps
    frames, size = item.grid[0] if apart else 1, math.prod(item.grid) // vision.spatial_merge_size**2
    token = vision.video_token_id if item.kind == "video" else vision.image_token_id
    frame = [vision.vision_start_token_id, *[token] * (size // frames), vision.vision_end_token_id]
    frame = [each for each in frame if each >= 0]
    return [*(time if apart else ()), *frame] * frames


def random_media(num_samples: int, vision: Vision) -> list[tuple[SampleMedia, ...]]:
    """Return the images and videos of rows, cycling through: an image, none, two images of different size, and a video
    if the model supports videos."""
    m, side = vision.spatial_merge_size, vision.square and vision.square // vision.patch_size
    # The seconds between patches are not a whole number of positions.
    kinds: tuple[tuple[SampleMedia, ...], ...] = (
        (SampleMedia("image", (1, 4 * m, 6 * m), 0),),
        (),
        (SampleMedia("image", (1, 2 * m, 4 * m), 0), SampleMedia("image", (1, 6 * m, 2 * m), 1)),
        (SampleMedia("video", (3, 4 * m, 2 * m), 0, seconds_per_grid=0.97),),
    )
    if not vision.has_videos:
        kinds = kinds[:3]
    if side is not None:
        # The second image of a row has two tiles and the whole image, if the model splits images into tiles.
        kinds = tuple(
            tuple(replace(each, grid=(1 + 2 * vision.tiles * each.seed, side, side)) for each in media)
            for media in kinds
        )
    return [
        tuple(replace(item, seed=2 * row + item.seed) for item in kinds[row % len(kinds)]) for row in range(num_samples)
    ]


def uneven_lengths(num_samples: int, longest: int) -> list[int]:
    """Return lengths from `longest` down to half of it, so that micro-batches have different numbers of trained
    tokens."""
    return [longest - index * (longest // 2) // num_samples for index in range(num_samples)]


def sample_rows(samples: Sequence[Sample], *, packed: bool) -> list[list[int]]:
    """Return the indices of the samples of each row: one, or, packed, as many as fit into twice the longest."""
    if not packed:
        return [[number] for number in range(len(samples))]
    lengths = [len(sample.input_ids) for sample in samples]
    numbers, starts = pack(lengths, 2 * max(lengths), seed=0)
    return [row.tolist() for row in np.split(numbers, starts[1:-1])]
