"""Videos: frame sampling and decoding with PyAV (pip install 'megatune[video]').

Frames are turned upright by the file's rotation, as images are by EXIF.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from megatune.data.bad_rows import RowError
from megatune.data.media import MediaSource
from megatune.data.media.images import check_end, check_pixels, decode_error, open_file
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from av import VideoFrame, VideoStream
    from av.container import InputContainer
    from av.video.reformatter import VideoReformatter

# Without playlists (HLS, DASH, concat), which make FFmpeg open other files and addresses.
FORMATS = "mov,matroska,avi,mpegts,mpeg,mpegvideo,flv,asf,ogg,gif,apng"
MAX_DECODED_PIXELS = 2**38  # more than an hour of 1920 x 1080 pixels at 30 frames per second
MAX_SECONDS = 24 * 60 * 60  # more is a wrong time in the file
_BUFFER = 2**20
_TURNS = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}


@dataclass(frozen=True, slots=True)
class VideoHeader:
    """The properties of a video according to its container.

    Attributes:
        num_frames, seconds: computed from the packets if the header lacks them.
        rate: average frames per second.
        size: width and height of the upright frames.
    """

    num_frames: int
    seconds: float
    rate: float
    size: tuple[int, int]


def sample_frames(header: VideoHeader, fps: float, maxlen: int) -> tuple[int, ...]:
    """Return the indices of LLaMA-Factory's frames: `fps` per second, at most `maxlen`, evenly from first to last."""
    count = min(header.num_frames, maxlen, max(1, math.floor(header.seconds * fps)))
    return tuple(int(number) for number in np.linspace(0, header.num_frames - 1, count))


def read_header(source: MediaSource) -> VideoHeader:
    """Read the header of a video, and decode its first frame, which alone states its rotation.

    Raises:
        RowError: it cannot be read, is not a video, has no frames, or would take too long to decode.
        MegatuneError: PyAV is not installed (exit code 66).
    """
    with _open(source) as (container, stream):
        num_frames, rate = stream.frames, float(stream.average_rate or stream.guessed_rate or 0)
        seconds = float(stream.duration * stream.time_base) if stream.duration and stream.time_base else 0.0
        first = next(_frames(container, stream, source), None)
        if first is None:
            raise RowError("no-frames", "video: no frames", source.name)
        turned = first.rotation % 180 == 90
        width, height = (first.height, first.width) if turned else (first.width, first.height)
    if num_frames <= 0:
        num_frames, seconds = _count_packets(source)
    if seconds <= 0:
        seconds = num_frames / (rate or 1.0)
    if num_frames * width * height > MAX_DECODED_PIXELS or seconds > MAX_SECONDS:
        detail = f"{source.name}: {num_frames} frames of {width} x {height}, {seconds:.0f} s"
        raise RowError("long-video", "video: too long", detail)
    return VideoHeader(num_frames, seconds, rate or num_frames / seconds, (width, height))


def decode_frames(source: MediaSource, numbers: Sequence[int]) -> Iterator[Image.Image]:
    """Yield the frames with these ascending indices, upright, in RGB.

    Some containers count one frame too many, so the last decoded frame replaces a missing last one.

    Raises:
        RowError: the video cannot be decoded, or has too few frames.
    """
    from av.video.reformatter import VideoReformatter

    reformatter, wanted = VideoReformatter(), iter(numbers)
    remaining, number = len(numbers), next(wanted, None)
    frame = None
    with _open(source) as (container, stream):
        for at, frame in enumerate(_frames(container, stream, source)):
            if at == number:
                yield _image(frame, reformatter, source)
                remaining, number = remaining - 1, next(wanted, None)
            if not remaining:
                return
        if frame is None or remaining > 1 or len(numbers) == 1:
            detail = f"{source.name}: {remaining} of {len(numbers)} frames are missing"
            raise RowError("missing-frames", "video: fewer frames than its header states", detail)
        yield _image(frame, reformatter, source)


def _image(frame: VideoFrame, reformatter: VideoReformatter, source: MediaSource) -> Image.Image:
    try:
        image: Image.Image = reformatter.reformat(frame, format="rgb24").to_image()
    except Exception as error:
        raise decode_error(source, error) from None
    turn = _TURNS.get(frame.rotation % 360)
    return image if turn is None else image.transpose(turn)


@contextmanager
def _open(source: MediaSource) -> Iterator[tuple[InputContainer, VideoStream]]:
    try:
        import av
    except ImportError as error:
        what, fix = "videos are decoded by PyAV, which is not installed", "pip install 'megatune[video]'"
        raise MegatuneError(Finding(what, source.name, fix=fix), ExitCode.INPUT) from error
    with open_file(source) as file:
        check_end(file, source)
        try:
            container = av.open(
                file, container_options={"format_whitelist": FORMATS}, metadata_errors="replace", buffer_size=_BUFFER
            )
        except Exception as error:
            raise _not_a_video(source, getattr(error, "strerror", None) or str(error)) from None
        with container:
            stream = next(iter(container.streams.video), None)
            if stream is None or stream.codec_context is None:
                raise _not_a_video(source, "no video stream" if stream is None else "an unknown codec")
            stream.codec_context.thread_count = 1  # the data workers share the cores
            yield container, stream


def _frames(container: InputContainer, stream: VideoStream, source: MediaSource) -> Iterator[VideoFrame]:
    try:
        for frame in container.decode(stream):
            check_pixels(frame.width, frame.height, source)
            if frame.is_corrupt:  # later frames depend on it
                raise decode_error(source, ValueError("FFmpeg marks a frame as corrupt"))
            yield frame
    except RowError:
        raise
    except Exception as error:  # FFmpeg raises many kinds of errors
        raise decode_error(source, error) from None


def _count_packets(source: MediaSource) -> tuple[int, float]:
    """Return the number of packets and the seconds that they span, without decoding; 0 seconds if they lack times."""
    count, times = 0, set()
    with _open(source) as (container, stream):
        try:
            for packet in container.demux(stream):
                if packet.size:
                    count += 1
                    times.add(packet.pts)
        except Exception as error:
            raise decode_error(source, error) from None
        times.discard(None)
        if len(times) < 2 or stream.time_base is None:
            return max(count, 1), 0.0
        return count, float((max(times) - min(times)) * stream.time_base) * count / (count - 1)


def _not_a_video(source: MediaSource, why: str) -> RowError:
    return RowError("not-a-video", "video: not in a supported format", f"{source.name}: {why}")
