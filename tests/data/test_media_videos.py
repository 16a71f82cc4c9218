"""Videos: the frames that LLaMA-Factory takes, their times, sizes and patches."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pytest
from hostile_media import encoded, picture
from hostile_videos import CONTAINERS, write_video
from hypothesis import given, settings
from hypothesis import strategies as st
from media_kit import FILES, SETTINGS, in_llamafactory, processor, video_reference
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as qwen2_resize
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from megatune.data.bad_rows import RowError
from megatune.data.media import MediaSource
from megatune.data.media.sizes import smart_resize
from megatune.data.media.video import VideoHeader, decode_frames, read_header, sample_frames
from megatune.errors import ExitCode, MegatuneError


def in_llamafactory_taken(
    path: Path, fps: float = 2.0, maxlen: int = 128
) -> tuple[list[int], list[Image.Image], float]:
    """Numbers, frames and frames a second, as its Qwen2VLPlugin takes them."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        seconds = float(stream.duration * stream.time_base)
        count = min(stream.frames, maxlen, max(1, math.floor(seconds * fps)))
        numbers = np.linspace(0, stream.frames - 1, count).astype(np.int32).tolist()
        frames = [frame.to_image() for number, frame in enumerate(container.decode(stream)) if number in numbers]
    return numbers, frames, len(numbers) / seconds


@pytest.mark.parametrize("family", FILES)
@pytest.mark.parametrize(("frames", "size"), [(20, (64, 48)), (45, (322, 118)), (1, (64, 48)), (64, (48, 200))])
def test_frames_and_patches(tmp_path: Path, family: str, frames: int, size: tuple[int, int]) -> None:
    path = tmp_path / "a.mp4"
    write_video(path, frames=frames, size=size)
    made, source = processor(tmp_path, family), MediaSource("video", str(path))
    measured = made.measure(source)
    numbers, images, fps = in_llamafactory_taken(path)
    assert (list(measured.frames), measured.size) == (numbers, size)
    assert measured.seconds_per_grid == 2 / fps
    pixels = made.pixels(source, measured)
    assert pixels.dtype == np.float32
    assert np.array_equal(pixels, video_reference(images, measured, family))


@pytest.mark.parametrize("family", FILES)
def test_grids(tmp_path: Path, family: str) -> None:
    """Qwen2's bounds hold for a frame, Qwen3's for all frames together."""
    path = tmp_path / "a.mp4"
    write_video(path, frames=30, size=(500, 300), rate=5)
    measured = processor(tmp_path, family).measure(MediaSource("video", str(path)))
    width, height = in_llamafactory(Image.new("RGB", (500, 300)), 256, 256 * 256).size
    if family == "qwen3_vl":
        expected = qwen3_resize(12, height, width, 2, 32, 4096, 25165824)
        assert measured.grid == (6, expected[0] // 16, expected[1] // 16)
    else:
        expected = qwen2_resize(height, width, 28, 3136, 12845056)
        assert measured.grid == (6, expected[0] // 14, expected[1] // 14)


def qwen3_resize(
    frames: int, height: int, width: int, depth: int, factor: int, least: int, most: int
) -> tuple[int, int]:
    """smart_resize of Transformers' video_processing_qwen3_vl.py, which cannot be imported without torchvision."""
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    h_bar, w_bar = round(height / factor) * factor, round(width / factor) * factor
    t_bar = round(frames / depth) * depth
    if t_bar * h_bar * w_bar > most:
        beta = math.sqrt((frames * height * width) / most)
        h_bar = max(factor, math.floor(height / beta / factor) * factor)
        w_bar = max(factor, math.floor(width / beta / factor) * factor)
    elif t_bar * h_bar * w_bar < least:
        beta = math.sqrt(least / (frames * height * width))
        h_bar = math.ceil(height * beta / factor) * factor
        w_bar = math.ceil(width * beta / factor) * factor
    return h_bar, w_bar


@given(
    st.tuples(st.integers(28, 700), st.integers(28, 700)),
    st.integers(1, 64).map(lambda pairs: 2 * pairs),
    st.sampled_from([(4096, 25165824), (128 * 32 * 32, 768 * 32 * 32), (10**6, 10**7)]),
)
@settings(max_examples=300)
def test_sizes_of_qwen3_vl(size: tuple[int, int], frames: int, bounds: tuple[int, int]) -> None:
    expected = qwen3_resize(frames, size[1], size[0], 2, 32, *bounds)[::-1]
    assert smart_resize(size, 32, *bounds, frames) == expected


@pytest.mark.parametrize("fps", [0.5, 2.0, 3.7, 30.0])
def test_times_of_qwen3_vl(tmp_path: Path, fps: float) -> None:
    """The text before each temporal patch, as LLaMA-Factory has Transformers' processor write it."""
    path = tmp_path / "a.mp4"
    write_video(path, frames=47, rate=12)
    made = processor(tmp_path, "qwen3_vl", video_fps=fps, video_maxlen=21)
    measured = made.measure(MediaSource("video", str(path)))
    numbers, _, _ = in_llamafactory_taken(path, fps, 21)
    this = SimpleNamespace()
    times = Qwen3VLProcessor._calculate_timestamps(this, [number / 12 * fps for number in numbers], fps, 2)
    assert measured.timestamps == tuple(times)
    block = "<|vision_start|>" + "<|video_pad|>" * (measured.grid[1] * measured.grid[2] // 4) + "<|vision_end|>"
    assert made.placeholder(measured) == "".join(f"<{time:.1f} seconds>{block}" for time in times)


def test_placeholders_of_qwen2_vl(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    write_video(path, frames=47, rate=12)
    made = processor(tmp_path, "qwen2_vl")
    measured = made.measure(MediaSource("video", str(path)))
    assert measured.timestamps == ()
    pads = "<|video_pad|>" * (measured.num_patches // 4)
    assert made.placeholder(measured) == f"<|vision_start|>{pads}<|vision_end|>"


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_that_do_not_count_are_counted(tmp_path: Path, name: str) -> None:
    """20 frames, 10 a second. LLaMA-Factory takes the first video_maxlen frames of what has no count."""
    options, codec, pixel_format = CONTAINERS[name]
    write_video(tmp_path / name, codec=codec, pixel_format=pixel_format, options=options)
    header = read_header(MediaSource("video", str(tmp_path / name)))
    assert header == VideoHeader(20, pytest.approx(2.0), 10.0, (64, 48))
    assert sample_frames(header, 2.0, 128) == (0, 6, 12, 19)
    assert sample_frames(header, 2.0, 3) == (0, 9, 19)
    assert sample_frames(header, 99.0, 128) == tuple(range(20))
    assert sample_frames(header, 0.01, 128) == (0,)


@pytest.mark.parametrize(("rotation", "corner"), [(None, (0, 0)), (90, (7, 0)), (180, (7, 7)), (270, (0, 7))])
def test_frames_are_upright(tmp_path: Path, rotation: int | None, corner: tuple[int, int]) -> None:
    """A rotation is counter-clockwise; the upper left corner of the file's frames is the darkest."""
    write_video(tmp_path / "a.mp4", rotation=rotation)
    source = MediaSource("video", str(tmp_path / "a.mp4"))
    (frame,) = decode_frames(source, [0])
    assert frame.size == ((48, 64) if rotation in (90, 270) else (64, 48)) == read_header(source).size
    grey = np.asarray(frame.convert("L").resize((8, 8), Image.Resampling.BOX))
    assert np.abs(np.subtract(np.unravel_index(grey.argmin(), grey.shape), corner)).max() <= 1


def test_a_list_of_frames(tmp_path: Path) -> None:
    """Each is a frame, video_fps a second; the last one is there twice."""
    images = [picture(90, 60).rotate(20 * number) for number in range(5)]
    frames = tuple(MediaSource("image", data=encoded(image, "PNG")) for image in images)
    source = MediaSource("video", frames=frames)
    made = processor(tmp_path, "qwen3_vl", video_fps=4.0)
    measured = made.measure(source)
    assert (measured.grid[0], measured.frames, measured.seconds_per_grid) == (3, (0, 1, 2, 3, 4), 0.5)
    assert measured.timestamps == (0.125, 0.625, 1.0)
    assert np.array_equal(made.pixels(source, measured), video_reference(images, measured, "qwen3_vl"))


@pytest.mark.parametrize(
    ("sizes", "code"),
    [([], "no-frames"), ([(90, 60), (90, 61)], "different-frames"), ([(90, 60), (0, 0)], "picture-empty")],
)
def test_lists_of_frames_that_are_no_video(tmp_path: Path, sizes: list[tuple[int, int]], code: str) -> None:
    frames = tuple(MediaSource("image", data=encoded(picture(*size), "PNG") if min(size) else b"") for size in sizes)
    with pytest.raises(RowError) as caught:
        processor(tmp_path, "qwen2_vl").measure(MediaSource("video", frames=frames))
    assert caught.value.code == code


def test_a_container_that_counts_one_frame_too_many(tmp_path: Path) -> None:
    """The last decoded frame stands in for the last one asked for; nothing stands in for more."""
    write_video(tmp_path / "a.mp4", frames=20)
    source = MediaSource("video", str(tmp_path / "a.mp4"))
    frames = list(decode_frames(source, [0, 10, 20]))
    assert len(frames) == 3
    assert frames[2].tobytes() == next(decode_frames(source, [19])).tobytes()
    for numbers in ([0, 20, 21], [20]):
        with pytest.raises(RowError) as caught:
            list(decode_frames(source, numbers))
        assert caught.value.code == "missing-frames"


def test_without_pyav(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.mp4"
    write_video(path)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MegatuneError) as caught:
        processor(tmp_path, "qwen2_vl").measure(MediaSource("video", str(path)))
    assert (caught.value.exit_code, caught.value.findings[0].fix) == (ExitCode.INPUT, "pip install 'megatune[video]'")


def test_settings_are_those_of_llamafactory(tmp_path: Path) -> None:
    made = processor(tmp_path, "qwen2_vl")
    assert (made.video.first, made.image.first) == ((256, 65536), (1024, 589824))
    assert (made.video_fps, made.video_maxlen) == (SETTINGS["video_fps"], SETTINGS["video_maxlen"])
