"""Hostile and damaged files of videos, beside the images of hostile_media.py.

`python hostile_videos.py FOLDER` writes them.
"""

from __future__ import annotations

import random
import struct
import sys
import wave
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from hostile_media import GOOD, Case, encoded, flips, picture

# container options, codec, pixel format
CONTAINERS: dict[str, tuple[dict[str, str], str, str]] = {
    "plain.mp4": ({}, "libx264", "yuv420p"),
    "front.mp4": ({"movflags": "faststart"}, "libx264", "yuv420p"),
    "pieces.mp4": ({"movflags": "frag_keyframe+empty_moov"}, "libx264", "yuv420p"),
    "plain.mkv": ({}, "libx264", "yuv420p"),
    "plain.webm": ({}, "libvpx-vp9", "yuv420p"),
    "plain.avi": ({}, "mpeg4", "yuv420p"),
    "plain.mov": ({}, "mjpeg", "yuvj420p"),
    "plain.ts": ({}, "libx264", "yuv420p"),
    "plain.flv": ({}, "flv1", "yuv420p"),
    "plain.gif": ({}, "gif", "rgb8"),
}
# Containers that tell how long they are, so that no cut is taken for a whole video.
CHECKED = {"plain.mp4", "front.mp4", "plain.mkv", "plain.webm", "plain.avi", "plain.mov"}


def write_video(
    path: Path,
    *,
    frames: int = 20,
    size: tuple[int, int] = (64, 48),
    codec: str = "libx264",
    pixel_format: str = "yuv420p",
    rate: int = 10,
    times: list[int] | None = None,
    rotation: int | None = None,
    options: dict[str, str] | None = None,
) -> bytes:
    """Write a video of a picture that grows lighter; its frames are at `times`, in 1/1000 s, or `rate` a second."""
    pixels = np.asarray(picture(*size)).astype(np.int64) // 2
    with av.open(str(path), "w", container_options=options or {}) as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt = pixel_format
        stream.codec_context.thread_count = 1
        if times:
            stream.codec_context.time_base = Fraction(1, 1000)
        if rotation is not None:
            stream.set_display_rotation(rotation)
        for number in range(frames):
            light = (pixels + 120 * number // max(frames - 1, 1)).astype(np.uint8)
            frame = av.VideoFrame.from_ndarray(light, format="rgb24")
            if times:
                frame.pts, frame.time_base = times[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path.read_bytes()


def videos(folder: Path) -> list[Case]:
    """Write all files of videos."""
    cases: list[Case] = []

    def write(name: str, content: bytes, expected: str | None = None) -> None:
        (folder / name).write_bytes(content)
        cases.append(Case(str(folder / name), expected))

    for name, (options, codec, pixel_format) in CONTAINERS.items():
        content = write_video(folder / name, codec=codec, pixel_format=pixel_format, options=options)
        cases.append(Case(str(folder / name), GOOD))
        size = len(content)
        for place in (1, 20, size // 10, size // 3, size // 2, size * 9 // 10, size - 50, size - 1):
            whole = name in CHECKED and place > 100
            write(f"cut-{place}-{name}", content[:place], "picture-truncated" if whole else None)
        for number, changed in enumerate(flips(content, 4)):
            write(f"flip-{number}-{name}", changed)
        write(f"header-{name}", content[:60] + random.Random(1).randbytes(3000))
        write(f"zeros-{name}", content[: size // 2] + bytes(size - size // 2))
    _of_times(folder, cases, write)
    _of_sizes(folder, cases)
    _others(folder, write)
    return cases


def _of_times(folder: Path, cases: list[Case], write: Any) -> None:
    write_video(folder / "one.mp4", frames=1)
    write_video(folder / "slow.mp4", frames=3, rate=1)
    write_video(folder / "fast.mp4", frames=200, rate=240)
    times = [0, 40, 80, 1000, 1010, 1020, 5000, 5001, 9000, 9040]
    write_video(folder / "variable.mp4", frames=10, times=times)
    write_video(folder / "variable.mkv", frames=10, times=times)
    cases += [
        Case(str(folder / name), GOOD) for name in ("one.mp4", "slow.mp4", "fast.mp4", "variable.mp4", "variable.mkv")
    ]
    content = (folder / "plain.mp4").read_bytes()
    duration, count, spans = content.index(b"mdhd") + 20, content.index(b"stsz") + 12, content.index(b"stts") + 12
    for number, value in enumerate((0, 1, 2**31 - 1, 2**32 - 1)):
        write(f"duration-{number}.mp4", _patched(content, duration, value))
        write(f"count-{number}.mp4", _patched(content, count, value))
        write(f"spans-{number}.mp4", _patched(content, spans, value))


def _of_sizes(folder: Path, cases: list[Case]) -> None:
    write_video(folder / "small.mp4", size=(16, 16))
    write_video(folder / "wide.mp4", size=(1000, 4), frames=4)
    write_video(folder / "odd.mp4", size=(65, 49), pixel_format="yuv444p")
    write_video(folder / "deep.mp4", pixel_format="yuv420p10le")
    for rotation in (90, 180, 270):
        write_video(folder / f"turned-{rotation}.mp4", rotation=rotation)
    for name in ("small", "wide", "odd", "deep", "turned-90", "turned-180", "turned-270"):
        cases.append(Case(str(folder / f"{name}.mp4"), GOOD))


def _others(folder: Path, write: Any) -> None:
    for name, content in {
        "page.mp4": b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
        "text.mp4": b"a text " * 100,
        "list.mp4": b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nplain.ts\n#EXTINF:9,\nhttp://127.0.0.1:9/a.ts\n",
        "list.m3u8": b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n" + str(folder / "plain.ts").encode() + b"\n",
        "script.mp4": b"ffconcat version 1.0\nfile 'plain.mp4'\n",
        "session.sdp": b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=a\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 9 RTP/AVP 96\n",
        "manifest.mpd": b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"></MPD>',
        "image.mp4": encoded(picture(), "JPEG"),
        "noise.mp4": random.Random(3).randbytes(50000),
        "zeros.mp4": bytes(50000),
    }.items():
        write(name, content, "not-a-video")
    write("empty.mp4", b"", "picture-empty")
    write("segment.mkv", b"\x1aE\xdf\xa3\0" + b"\xff" * 8 + bytes(100))
    write("box.mp4", b"\0\0\0\x10ftypisom\0\0\2\0")
    with wave.open(str(folder / "sound.wav"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(16000))
    write("sound.mp4", (folder / "sound.wav").read_bytes(), "not-a-video")


def _patched(content: bytes, place: int, value: int) -> bytes:
    return content[:place] + struct.pack(">I", value) + content[place + 4 :]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{len(videos(folder))} files in {folder}")
