"""Hostile and damaged files of images, each the same in every run: what people's data folders hold, and worse.

`python hostile_media.py FOLDER` writes them; hostile_videos.py has those of videos.
"""

from __future__ import annotations

import io
import os
import random
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageSequence

GOOD = "good"  # is read, and as PIL reads it


class Case(NamedTuple):
    """A file, and what must come of it: GOOD, a code, or None where either will do."""

    path: str
    expected: str | None = None


ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "baseline.jpg": ("JPEG", {"quality": 85}),
    "progressive.jpg": ("JPEG", {"quality": 85, "progressive": True}),
    "plain.png": ("PNG", {}),
    "lossy.webp": ("WEBP", {}),
    "lossless.webp": ("WEBP", {"lossless": True}),
    "one.gif": ("GIF", {}),
    "plain.bmp": ("BMP", {}),
    "raw.tiff": ("TIFF", {}),
    "lzw.tiff": ("TIFF", {"compression": "tiff_lzw"}),
    "jpeg.tiff": ("TIFF", {"compression": "jpeg"}),
    "plain.ppm": ("PPM", {}),
    "plain.avif": ("AVIF", {}),
    "plain.jp2": ("JPEG2000", {}),
    "plain.ico": ("ICO", {}),
}
# Formats whose end is known without decoding, however little is missing.
CHECKED = {"baseline.jpg", "progressive.jpg", "plain.png", "lossy.webp", "lossless.webp", "one.gif", "plain.avif"}


def picture(width: int = 97, height: int = 61, mode: str = "RGB") -> Image.Image:
    """A picture with something everywhere, and noise."""
    y, x = np.mgrid[:height, :width]
    noise = np.random.default_rng(0).integers(0, 40, (height, width))
    pixels = (
        np.stack([x * 215 // max(width - 1, 1), y * 215 // max(height - 1, 1), (x * y) % 216], -1) + noise[..., None]
    )
    return Image.fromarray(pixels.astype(np.uint8)).convert(mode)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, rows: bytes, *, depth: int = 8, color: int = 2, extra: bytes = b"") -> bytes:
    """A PNG made by hand. `rows` is not compressed; color 2 is RGB, 0 grey, 3 a palette."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + extra + body


def cuts(content: bytes) -> dict[str, bytes]:
    """The file, cut off at many places."""
    size = len(content)
    places = [1, 4, 11, 20, 33, size // 10, size // 4, size // 2, size * 9 // 10, size - 13, size - 2, size - 1]
    return {f"cut-{place}": content[:place] for place in places}


def flips(content: bytes, number: int) -> Iterator[bytes]:
    """The file, with a few bytes wrong."""
    for seed in range(number):
        draw, changed = random.Random(seed), bytearray(content)
        for _ in range(1 + 4 * seed):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        yield bytes(changed)


def images(folder: Path) -> list[Case]:
    """Write all files of images; some are no regular files."""
    cases: list[Case] = []

    def write(name: str, content: bytes, expected: str | None = None) -> None:
        (folder / name).write_bytes(content)
        cases.append(Case(str(folder / name), expected))

    for make in (_damaged, _bombs, _others, _modes, _turned, _animated, _odd_sizes, _metadata):
        make(write)
    return cases + _no_files(folder)


Write = Callable[..., None]


def _damaged(write: Write) -> None:
    for name, (kind, options) in ENCODERS.items():
        content = encoded(picture(), kind, **options)
        write(name, content, GOOD)
        for cut, part in cuts(content).items():
            whole = name in CHECKED and len(part) > 40 and (name, part[-1:]) != ("one.gif", b"\0")
            write(f"{cut}-{name}", part, "picture-truncated" if whole else None)
        for number, changed in enumerate(flips(content, 4)):
            write(f"flip-{number}-{name}", changed)
        write(f"header-{name}", content[:40] + random.Random(1).randbytes(3000))
        write(f"followed-{name}", content + random.Random(2).randbytes(3000), GOOD)
        write(f"zeros-{name}", content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
    content = encoded(picture(), "PNG")
    write("wrong-sum.png", content[:40] + bytes([content[40] ^ 1]) + content[41:])
    write("no-data.png", content[:33] + content[-12:], "damaged-picture")
    write("no-palette.png", png(8, 8, bytes(9 * 8), color=3))
    write("unknown-depth.png", png(8, 8, bytes(25 * 8), depth=7))
    write("short-data.png", png(97, 61, bytes(100)), "damaged-picture")
    content = encoded(picture(), "JPEG")
    table = content.index(b"\xff\xc4")
    write("no-tables.jpg", content[:table] + content[content.index(b"\xff\xda") :])


def _bombs(write: Write) -> None:
    large = "picture-too-large"
    write("60000.png", png(60000, 60000, bytes(10)), large)
    write("20000.png", png(20000, 20000, bytes(10)), large)
    write("10000.png", png(10000, 9000, bytes(10)), large)
    write("negative.png", png(2**31 - 1, 2**31 - 1, bytes(10)))
    write("flat.png", png(9000, 9000, bytes(9001 * 9000), color=0), GOOD)  # 81 million pixels, 80 KB
    write("65535.gif", _patched(encoded(picture(), "GIF"), 6, struct.pack("<HH", 65535, 65535)), large)
    write("100000.bmp", _patched(encoded(picture(), "BMP"), 18, struct.pack("<ii", 100000, 100000)), large)
    write("99999.ppm", b"P6 99999 99999 255\n" + bytes(100), large)
    content = encoded(picture(), "JPEG")
    write("65535.jpg", _patched(content, content.index(b"\xff\xc0") + 5, b"\xff\xff\xff\xff"), large)
    content = encoded(picture(), "TIFF")
    content = content.replace(struct.pack("<HHII", 256, 4, 1, 97), struct.pack("<HHII", 256, 4, 1, 2**31))
    write("wide.tiff", content.replace(struct.pack("<HHII", 257, 4, 1, 61), struct.pack("<HHII", 257, 4, 1, 2**31)))
    samples = struct.pack("<HHII", 277, 3, 1, 3)
    assert samples in content
    write("samples.tiff", content.replace(samples, struct.pack("<HHII", 277, 3, 1, 2048)))
    text = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**28), 9))
    write("text-bomb.png", png(8, 8, bytes(25 * 8), extra=text))
    profile = chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(2**28), 9))
    write("profile-bomb.png", png(8, 8, bytes(25 * 8), extra=profile))
    content = encoded(Image.new("L", (9000, 9000)), "JPEG", progressive=True)
    scan = content.rindex(b"\xff\xda")
    write("scans.jpg", content[:scan] + content[scan:-2] * 2000 + b"\xff\xd9", large)


def _patched(content: bytes, place: int, part: bytes) -> bytes:
    return content[:place] + part + content[place + len(part) :]


def _others(write: Write) -> None:
    for name, content in {
        "page.jpg": b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
        "error.png": b'{"error": "rate limit"}',
        "text.jpg": b"a text " * 100,
        "drawing.png": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
        "page.pdf": b"%PDF-1.7\n" + bytes(100),
        "script.eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 99 99\n%%EndComments\n{} loop\n",
        "archive.jpg": b"PK\x03\x04" + bytes(100),
        "program.png": b"\x7fELF" + bytes(100),
        "array.jpg": b"\x93NUMPY" + bytes(100),
        "pointer.jpg": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "noise.jpg": random.Random(3).randbytes(5000),
        "zeros.jpg": bytes(5000),
    }.items():
        write(name, content, "not-a-picture")
    write("empty.jpg", b"", "picture-empty")
    for name, (kind, options) in list(ENCODERS.items())[:6]:  # named as another format
        write(f"really-{name}.bin", encoded(picture(), kind, **options), GOOD)


def _modes(write: Write) -> None:
    for mode in ("1", "L", "LA", "P", "RGBA"):
        write(f"mode-{mode}.png", encoded(picture(mode=mode), "PNG"), GOOD)
    for mode in ("1", "L", "CMYK", "YCbCr", "RGBA", "RGBX"):
        write(f"mode-{mode}.tiff", encoded(picture(mode=mode), "TIFF"), GOOD)
    write("mode-LAB.tiff", encoded(Image.merge("LAB", picture().split()), "TIFF"), GOOD)
    for mode in ("L", "CMYK"):
        write(f"mode-{mode}.jpg", encoded(picture(mode=mode), "JPEG"), GOOD)
    see_through = picture(mode="P")
    write("see-through.png", encoded(see_through, "PNG", transparency=bytes(range(256))), GOOD)
    write("see-through.gif", encoded(see_through, "GIF", transparency=3), GOOD)
    write("grey-1.png", png(64, 64, bytes(9 * 64), depth=1, color=0), GOOD)
    write("grey-4.png", png(64, 64, bytes(range(33)) * 64, depth=4, color=0))
    write("rgb-16.png", png(40, 40, b"".join(b"\0" + bytes(range(240)) for _ in range(40)), depth=16), GOOD)
    grey = np.asarray(picture(mode="L")).astype(np.uint16)
    write("16-dark.png", encoded(Image.fromarray(grey), "PNG"), GOOD)
    for name, values, kind in (
        ("16.png", grey * 257, "PNG"),
        ("16.tiff", grey * 257, "TIFF"),
        ("16-big-endian.tiff", (grey * 257).astype(">u2"), "TIFF"),
        ("32.tiff", grey.astype(np.int32) * 65537, "TIFF"),
        ("float.tiff", (grey / 255).astype(np.float32), "TIFF"),
    ):
        write(name, encoded(Image.fromarray(values), kind), "deep-picture")


def _turned(write: Write) -> None:
    for orientation in range(10):
        exif = Image.Exif()
        exif[0x0112] = orientation
        for kind in ("JPEG", "PNG", "WEBP", "TIFF"):
            write(f"turned-{orientation}.{kind}", encoded(picture(), kind, exif=exif.tobytes()), GOOD)
    for name, exif_bytes in {
        "cut": b"Exif\0\0II*\0\x08\0\0\0\xff",
        "noise": b"Exif\0\0" + random.Random(4).randbytes(500),
        "loop": b"Exif\0\0II*\0\x08\0\0\0\0\0\x08\0\0\0",
        "text": b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x02\0\0\0\x04abc\0\0\0\0\0",
    }.items():
        write(f"exif-{name}.jpg", encoded(picture(), "JPEG", exif=exif_bytes))


def _animated(write: Write) -> None:
    frames = [picture().rotate(10 * number) for number in range(5)]
    for kind in ("GIF", "WEBP", "PNG", "TIFF"):
        content = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
        assert len(list(ImageSequence.Iterator(Image.open(io.BytesIO(content))))) == 5
        write(f"animated.{kind}", content, GOOD)
        write(f"animated-cut.{kind}", content[: len(content) * 3 // 4])
    content = encoded(frames[0], "MPO", save_all=True, append_images=frames[1:])
    write("animated.mpo", content, GOOD)


def _odd_sizes(write: Write) -> None:
    for width, height in ((1, 1), (1, 2), (27, 29), (28, 28), (5000, 3), (20000, 1), (1, 20000), (199, 1), (30, 6030)):
        write(f"{width}x{height}.png", encoded(picture(width, height), "PNG"), GOOD)
    write("20000x1.jpg", encoded(picture(20000, 1), "JPEG"), GOOD)
    write("1000000x1.png", encoded(Image.new("RGB", (1000000, 1)), "PNG"), "thin-picture")
    write("0x5.png", png(0, 5, bytes(5)))
    write("0x0.bmp", _patched(encoded(picture(), "BMP"), 18, bytes(8)))


def _metadata(write: Write) -> None:
    content = encoded(picture(), "JPEG")
    write("comments.jpg", content[:2] + (b"\xff\xfe\xff\xff" + bytes(65533)) * 60 + content[2:], GOOD)
    write("markers.jpg", content[:2] + b"\xff\xe1\x00\x02" * 5000 + content[2:], GOOD)
    write("padded.jpg", content[:2] + b"\xff" * 20000 + content[2:])
    content = encoded(picture(), "PNG")
    write("text.png", content[:33] + chunk(b"tEXt", b"a\0" + b"b" * 5_000_000) + content[33:])
    write("chunks.png", content[:33] + chunk(b"prVt", b"") * 50000 + content[33:], GOOD)


def _no_files(folder: Path) -> list[Case]:
    unreadable = "unreadable-picture"
    (folder / "directory.jpg").mkdir()
    os.mkfifo(folder / "pipe.jpg")
    (folder / "loop.jpg").symlink_to("loop.jpg")
    (folder / "dangling.jpg").symlink_to("nowhere.jpg")
    (folder / "locked.jpg").write_bytes(encoded(picture(), "JPEG"))
    (folder / "locked.jpg").chmod(0)
    locked = None if os.access(folder / "locked.jpg", os.R_OK) else unreadable
    return [
        Case(str(folder / "directory.jpg"), unreadable),
        Case(str(folder / "pipe.jpg"), unreadable),
        Case(str(folder / "loop.jpg"), unreadable),
        Case(str(folder / "dangling.jpg"), "picture-missing"),
        Case(str(folder / "locked.jpg"), locked),
        Case("/dev/zero", unreadable),
        Case(str(folder / "plain.png" / "below.jpg"), unreadable),
        Case(str(folder / ("long" * 100)), unreadable),
        Case(str(folder / "nul\0.jpg"), unreadable),
        Case(str(folder / "half-\udcff.jpg"), "picture-missing"),
    ]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{len(images(folder))} files in {folder}")
