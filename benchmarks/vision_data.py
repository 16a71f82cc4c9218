"""How fast images are measured (for the tokens of a row, when data is prepared) and become pixel_values (in the data
workers), on one core, beside Transformers' Qwen2VLImageProcessor with its PIL back end.

Both read the same JPEGs and make the same numbers, which is checked. The ways are measured in turn, several rounds, by
the time that the process computes; the best round counts, since what else runs on a machine only ever adds to it.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from reporting import add_output_flag, finish
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from megatune.data.media import MediaSource
from megatune.data.media.processor import Bounds, MediaProcessor
from megatune.encoders import MediaPlaceholder

SIZES = ((500, 375), (640, 480), (1024, 768), (1920, 1080), (3024, 4032))
OF_EACH = 3
LEAST_SECONDS = 0.02
LEAST, MOST = 3136, 12845056  # of the published Qwen2.5-VL
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
FIRST = {"4096²": (32 * 32, 4096 * 4096), "768²": (32 * 32, 768 * 768)}  # by image_max_pixels; the last is the default
Way = Callable[[Path], Any]


def write_images(folder: Path, width: int, height: int) -> None:
    """JPEGs with slopes and noise."""
    draw = np.random.default_rng(0)
    for number in range(OF_EACH):
        coarse = draw.integers(0, 256, (height // 60, width // 60, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
        noisy = smooth + draw.integers(-12, 13, smooth.shape, dtype=np.int16)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / f"{number}.jpg", quality=88)


def resized(image: Image.Image, first: tuple[int, int]) -> Image.Image:
    """As LLaMA-Factory does it; the images here are not so narrow that it would do more."""
    for wrong, bound in (
        (image.width * image.height > first[1], first[1]),
        (image.width * image.height < first[0], first[0]),
    ):
        if wrong:
            factor = math.sqrt(bound / (image.width * image.height))
            image = image.resize((int(image.width * factor), int(image.height * factor)))
    return image.convert("RGB")


def their_pixels(made: Qwen2VLImageProcessorPil, first: tuple[int, int], path: Path) -> torch.Tensor:
    with Image.open(path) as image:
        return made(resized(ImageOps.exif_transpose(image), first), return_tensors="pt")["pixel_values"]


def their_patches(made: Qwen2VLImageProcessorPil, first: tuple[int, int], path: Path) -> int:
    """From the header, by the method that vLLM asks."""
    with Image.open(path) as image:
        width, height = image.size
    factor = math.sqrt(min(first[1] / (width * height), 1.0))
    return made.get_number_of_image_patches(int(height * factor), int(width * factor))


def our_pixels(made: MediaProcessor, path: Path) -> torch.Tensor:
    source = MediaSource("image", str(path))
    return torch.from_numpy(made.pixels(source, made.measure(source)))


def our_patches(made: MediaProcessor, path: Path) -> int:
    return made.measure(MediaSource("image", str(path))).num_patches


def ways(first: tuple[int, int]) -> tuple[Way, Way, Way, Way]:
    """Pixels and patches, theirs and ours."""
    theirs = Qwen2VLImageProcessorPil(min_pixels=LEAST, max_pixels=MOST)
    bounds = Bounds(first=first, min_pixels=LEAST, max_pixels=MOST, mean=MEAN, std=STD, resample=3)
    ours = MediaProcessor(
        patch_size=14, temporal_patch_size=2, merge_size=2, image=bounds, video=bounds, video_fps=2.0,
        video_maxlen=128, timestamps=False, text=MediaPlaceholder(),
    )  # fmt: skip
    return (
        partial(their_pixels, theirs, first),
        partial(our_pixels, ours),
        partial(their_patches, theirs, first),
        partial(our_patches, ours),
    )


def seconds(way: Way, paths: Sequence[Path]) -> float:
    """Seconds of computing for an image; what is quick is done again and again."""
    began, done, spent = time.process_time(), 0, 0.0
    while spent < LEAST_SECONDS:
        for path in paths:
            way(path)
        done += len(paths)
        spent = time.process_time() - began
    return spent / done


def measure(paths: Sequence[Path], rounds: int) -> dict[str, list[float]]:
    """Seconds for an image of one size, Transformers' way and ours, by what is made of it."""
    lines: dict[str, tuple[Way, Way]] = {}
    for name, first in FIRST.items():
        theirs, ours, their_count, our_count = ways(first)
        for path in paths:
            assert torch.equal(theirs(path), ours(path)), path
            assert their_count(path) == our_count(path), path
        lines[f"pixel_values, image_max_pixels {name}"] = theirs, ours
        lines["tokens, as LLaMA-Factory counts them"] = theirs, our_count
        lines["tokens, from the header alone"] = their_count, our_count
    best: dict[str, list[float]] = {title: [math.inf] * 2 for title in lines}
    for _ in range(rounds):
        for title, (theirs, ours) in lines.items():
            found = [seconds(way, paths) for way in (theirs, ours)]
            best[title] = [min(pair) for pair in zip(best[title], found, strict=True)]
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="times that each is measured (7)")
    add_output_flag(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for width, height in SIZES:
        with tempfile.TemporaryDirectory() as name:
            write_images(Path(name), width, height)
            best = measure(sorted(Path(name).iterdir()), arguments.rounds)
        rows += [
            [f"{width} x {height}, {title}", f"{1 / theirs:,.1f}", f"{1 / ours:,.1f}", f"{theirs / ours:.2f}"]
            for title, (theirs, ours) in sorted(best.items())
        ]
    note = f"""{OF_EACH} JPEGs of each size, one thread, by seconds of computing; best of {arguments.rounds} rounds, in
turn. All numbers are equal, bit for bit.

- pixel_values: open, decode, resize to image_max_pixels, resize to whole tokens, normalize, cut into patches; decoding
  and resizing are PIL's in both
- tokens, as LLaMA-Factory counts them: it makes the pixel_values; ours reads the header and looks at the file's end
- tokens, from the header alone: get_number_of_image_patches of the size that PIL reads, which looks at no end and turns
  nothing"""
    header = ["image, and what is made of it", "Transformers, images/s", "megatune, images/s", "times Transformers"]
    finish("vision-data", "Images to tokens and pixels", header, rows, note, arguments.output)


if __name__ == "__main__":
    main()
