"""Videos: which of their frames are taken, and decoding these with PyAV (pip install 'megatune[video]').

Frames are turned upright as the file says, as images are by EXIF.
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
from megatune.data.media import PictureSource
from megatune.data.media.images import check_end, check_pixels, damaged, open_file
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from av import VideoFrame, VideoStream
    from av.container import InputContainer
    from av.video.reformatter import VideoReformatter

# Without lists of segments (HLS, DASH, concat), which make FFmpeg open other files and addresses.
FORMATS = "mov,matroska,avi,mpegts,mpeg,mpegvideo,flv,asf,ogg,gif,apng"
MOST_DECODED_PIXELS = 2**38  # over an hour of 1920 x 1080 pixels, 30 times a second
MOST_SECONDS = 24 * 60 * 60  # more is a wrong time in the file
_BUFFER = 2**20
_TURNS = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}


@dataclass(frozen=True, slots=True)
class VideoHeader:
    """What a container says of its video.

    Attributes:
        num_frames, seconds: found in its packets where the header does not say.
        rate: frames a second, on average.
        size: width and height of the upright frames.
    """

    num_frames: int
    seconds: float
    rate: float
    size: tuple[int, int]


def sample_frames(header: VideoHeader, fps: float, maxlen: int) -> tuple[int, ...]:
    """Return the numbers of the frames that LLaMA-Factory takes: `fps` of each second, at most `maxlen`, evenly spread
    from the first frame to the last."""
    count = min(header.num_frames, maxlen, max(1, math.floor(header.seconds * fps)))
    return tuple(int(number) for number in np.linspace(0, header.num_frames - 1, count))


def read_header(source: PictureSource) -> VideoHeader:
    """Read the header of a video, and its first frame, which alone says how it is turned.

    Raises:
        RowError: it cannot be read, is no video, has no frames, or would take too long to decode.
        MegatuneError: PyAV is not installed (exit code 66).
    """
    with _opened(source) as (container, stream):
        num_frames, rate = stream.frames, float(stream.average_rate or stream.guessed_rate or 0)
        seconds = float(stream.duration * stream.time_base) if stream.duration and stream.time_base else 0.0
        first = next(_frames(container, stream, source), None)
        if first is None:
            raise RowError("no-frames", "video: no frames", source.name)
        turned = first.rotation % 180 == 90
        width, height = (first.height, first.width) if turned else (first.width, first.height)
    if num_frames <= 0:
        num_frames, seconds = _counted(source)
    if seconds <= 0:
        seconds = num_frames / (rate or 1.0)
    if num_frames * width * height > MOST_DECODED_PIXELS or seconds > MOST_SECONDS:
        detail = f"{source.name}: {num_frames} frames of {width} x {height}, {seconds:.0f} s"
        raise RowError("long-video", "video: too long", detail)
    return VideoHeader(num_frames, seconds, rate or num_frames / seconds, (width, height))


def decode_frames(source: PictureSource, numbers: Sequence[int]) -> Iterator[Image.Image]:
    """Yield the frames of these ascending numbers, upright, in RGB.

    Containers count a frame too many now and then, so the last decoded frame stands in for the last one asked for.

    Raises:
        RowError: the video cannot be decoded, or has fewer frames than that.
    """
    from av.video.reformatter import VideoReformatter

    reformatter, wanted = VideoReformatter(), iter(numbers)
    left, number = len(numbers), next(wanted, None)
    frame = None
    with _opened(source) as (container, stream):
        for at, frame in enumerate(_frames(container, stream, source)):
            if at == number:
                yield _image(frame, reformatter, source)
                left, number = left - 1, next(wanted, None)
            if not left:
                return
        if frame is None or left > 1 or len(numbers) == 1:
            detail = f"{source.name}: {left} of {len(numbers)} frames are missing"
            raise RowError("missing-frames", "video: fewer frames than its header says", detail)
        yield _image(frame, reformatter, source)


def _image(frame: VideoFrame, reformatter: VideoReformatter, source: PictureSource) -> Image.Image:
    try:
        image: Image.Image = reformatter.reformat(frame, format="rgb24").to_image()
    except Exception as error:
        raise damaged(source, error) from None
    turn = _TURNS.get(frame.rotation % 360)
    return image if turn is None else image.transpose(turn)


@contextmanager
def _opened(source: PictureSource) -> Iterator[tuple[InputContainer, VideoStream]]:
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
            raise _no_video(source, getattr(error, "strerror", None) or str(error)) from None
        with container:
            stream = next(iter(container.streams.video), None)
            if stream is None or stream.codec_context is None:
                raise _no_video(source, "no video stream" if stream is None else "an unknown codec")
            stream.codec_context.thread_count = 1  # the data workers share the cores
            yield container, stream


def _frames(container: InputContainer, stream: VideoStream, source: PictureSource) -> Iterator[VideoFrame]:
    try:
        for frame in container.decode(stream):
            check_pixels(frame.width, frame.height, source)
            if frame.is_corrupt:  # later ones are made from it
                raise damaged(source, ValueError("FFmpeg marks a frame as corrupt"))
            yield frame
    except RowError:
        raise
    except Exception as error:  # FFmpeg's errors are those of many kinds
        raise damaged(source, error) from None


def _counted(source: PictureSource) -> tuple[int, float]:
    """Return the number of packets, and the seconds that they span, without decoding; 0 seconds if none is said."""
    count, times = 0, set()
    with _opened(source) as (container, stream):
        try:
            for packet in container.demux(stream):
                if packet.size:
                    count += 1
                    times.add(packet.pts)
        except Exception as error:
            raise damaged(source, error) from None
        times.discard(None)
        if len(times) < 2 or stream.time_base is None:
            return max(count, 1), 0.0
        return count, float((max(times) - min(times)) * stream.time_base) * count / (count - 1)


def _no_video(source: PictureSource, why: str) -> RowError:
    return RowError("not-a-video", "video: not in a supported format", f"{source.name}: {why}")
