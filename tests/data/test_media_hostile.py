"""Hundreds of hostile and damaged files: each is read as PIL and Transformers read it, or refused with a code."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hostile_media import GOOD, Case, images
from hostile_videos import videos
from media_kit import HALF, frames_reference, in_llamafactory, in_transformers, upright
from media_runner import BOUNDS
from PIL import Image

LIMIT = 300.0  # seconds for all files; a few are taken
CONFIG: dict[str, Any] = {"min_pixels": BOUNDS.min_pixels, "max_pixels": BOUNDS.max_pixels, **HALF}
PAGE = (Path(__file__).parents[2] / "docs" / "data-formats.md").read_text(encoding="utf-8")

Outcomes = list[tuple[Case, dict[str, Any]]]


def read(kind: str, cases: list[Case]) -> Outcomes:
    """Have another process read the files, which may neither say a word nor end."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("media_runner.py"))],
        input=json.dumps([(kind, case.path) for case in cases]),
        capture_output=True, text=True, timeout=LIMIT, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return list(zip(cases, json.loads(done.stdout), strict=True))


@pytest.fixture(scope="module")
def image_outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return read("image", images(tmp_path_factory.mktemp("images")))


@pytest.fixture(scope="module")
def video_outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return read("video", videos(tmp_path_factory.mktemp("videos")))


def check(outcomes: Outcomes) -> None:
    """Everything is as its case says, and every refusal has a code of the page and names the file."""
    codes = set(re.findall(r"^\| `([a-z0-9-]+)` \|", PAGE, re.MULTILINE))
    wrong = [
        (Path(case.path).name, case.expected, found)
        for case, found in outcomes
        if found["code"] != (case.expected or found["code"])
        or (found["code"] != GOOD and not (found["code"] in codes and found["named"]))
    ]
    assert not wrong, wrong


def test_there_are_enough(image_outcomes: Outcomes, video_outcomes: Outcomes) -> None:
    refused = [found for _, found in image_outcomes + video_outcomes if found["code"] != GOOD]
    assert len(image_outcomes) > 400
    assert len(video_outcomes) > 180
    assert len(refused) > 350
    # Most of what is refused is refused before a run begins.
    assert sum(found["when"] == "measured" for found in refused) > 4 * len(refused) // 5


def test_images_are_refused_or_sound(image_outcomes: Outcomes) -> None:
    check(image_outcomes)


def test_videos_are_refused_or_sound(video_outcomes: Outcomes) -> None:
    check(video_outcomes)


@pytest.mark.filterwarnings("ignore")
def test_images_that_are_read_are_read_as_transformers_reads_them(image_outcomes: Outcomes) -> None:
    wrong = []
    for case, found in image_outcomes:
        if found["code"] == GOOD:
            with warnings.catch_warnings(action="ignore"), Image.open(case.path) as image:
                image = in_llamafactory(upright(image), *BOUNDS.first)
            pixels, grid = in_transformers(image, **CONFIG)
            if (found["digest"], tuple(found["grid"])) != (digest(pixels), grid):
                wrong.append(Path(case.path).name)
    assert not wrong


def test_videos_that_are_read_have_the_frames_that_pyav_decodes(video_outcomes: Outcomes) -> None:
    wrong = []
    for case, found in video_outcomes:
        if found["code"] == GOOD:
            with av.open(case.path) as container:
                stream = container.streams.video[0]
                wanted = set(found["frames"])
                images = [frame.to_image() for at, frame in enumerate(container.decode(stream)) if at in wanted]
            images = [image.rotate(turned(case.path), expand=True) for image in images]
            pixels = frames_reference(images, found["grid"], CONFIG, *BOUNDS.first)
            wrong += [Path(case.path).name] if digest(pixels) != found["digest"] else []
    assert not wrong


def turned(path: str) -> int:
    """The rotation that hostile_videos.py wrote into a file, counter-clockwise."""
    found = re.search(r"turned-(\d+)", path)
    return int(found[1]) if found else 0


def digest(pixels: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(pixels).tobytes()).hexdigest()
