"""Read image files: the size from the header, and the pixels; any problem with a file is a RowError.

Truncated image and video files are detected as far as their format allows without decoding.

Images are turned upright by their EXIF orientation, as in Transformers' load_image and the datasets library.
LLaMA-Factory turns decoded columns, but not files named by path; labels describe what people see.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from io import SEEK_END, BytesIO
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageFile

from megatune.data.bad_rows import RowError
from megatune.data.media import MediaSource

# Without formats whose readers start another program (EPS: Ghostscript), and those of cameras and desktops.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "ICO")
MAX_PIXELS = 2**28 // 3  # a quarter GiB of RGB: PIL warns above it
# A progressive JPEG is decoded once per scan, and a small file can have thousands of scans.
MAX_SCANNED_PIXELS = 100 * MAX_PIXELS
_MIN_SCAN = 10  # bytes of a scan
_EXIF_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_STDERR = threading.Lock()
_TAIL = 2**24  # bytes at the end of a file that are searched for the end marker
_Read = Callable[[int, int], bytes]  # reads this many bytes from this offset

# PIL's warnings and logs are about errors that are raised here (too many pixels), or irrelevant (unreadable metadata).
# The filter is permanent, since catch_warnings is not thread-safe.
warnings.filterwarnings("ignore", module=r"PIL\.")
logging.getLogger("PIL").setLevel(logging.CRITICAL)


def image_size(source: MediaSource) -> tuple[int, int]:
    """Return width and height of the upright image, read from its header.

    Raises:
        RowError: it cannot be read, is too large, or is truncated; other damage is detected only by decoding.
    """
    with open_file(source) as file:
        check_end(file, source)
        image = _open(file, source)
        orientation, (width, height) = _orientation(image), image.size
        _check_depth(image, source)
        return (height, width) if orientation in (5, 6, 7, 8) else (width, height)


def load_image(source: MediaSource) -> Image.Image:
    """Decode an image, upright, in the mode of its file; the first frame of an animation.

    Raises:
        RowError: it cannot be read, is too large or damaged.
    """
    with open_file(source) as file:
        image = _open(file, source)
        orientation = _orientation(image)
        if image.format in ("JPEG", "MPO"):
            _check_scans(file, image, source)
        _check_depth(image, source)
        _decode(image, source)
        turn = _UPRIGHT.get(orientation)
        return image if turn is None else image.transpose(turn)


def open_image(source: MediaSource) -> Image.Image:
    """Decode an image as `load_image` does, in RGB."""
    return load_image(source).convert("RGB")


def open_file(source: MediaSource) -> BinaryIO:
    """Open the encoded bytes.

    Raises:
        RowError: the file does not exist, is empty, or is not a regular file that can be read.
    """
    if source.data is not None:
        if not source.data:
            raise _empty(source)
        return BytesIO(source.data)
    assert source.path is not None
    try:
        # Without O_NONBLOCK, opening a named pipe waits for a writer.
        descriptor = os.open(source.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise RowError("picture-missing", f"{source.kind}: there is no such file", source.name) from None
    except (OSError, ValueError) as error:
        raise _unreadable(source, getattr(error, "strerror", None) or str(error)) from None
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_size:
        return open(descriptor, "rb")
    os.close(descriptor)
    raise _empty(source) if stat.S_ISREG(status.st_mode) else _unreadable(source, "not a regular file")


def check_pixels(width: int, height: int, source: MediaSource) -> None:
    """Raise a RowError if an image or a frame has more pixels than the limit."""
    if width * height > MAX_PIXELS:
        detail = f"{source.name}: {width} x {height}; the limit is {MAX_PIXELS:,} pixels"
        raise RowError("picture-too-large", f"{source.kind}: too many pixels", detail)


def check_end(file: BinaryIO, source: MediaSource) -> None:
    """Raise a RowError if the file is truncated."""
    if not is_whole(file):
        raise RowError("picture-truncated", f"{source.kind}: the file is truncated", source.name)


def decode_error(source: MediaSource, error: Exception) -> RowError:
    """Return the RowError for a failed decoding."""
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return RowError("damaged-picture", f"{source.kind}: the file is damaged", f"{source.name}: {why}")


def _open(file: BinaryIO, source: MediaSource) -> ImageFile.ImageFile:
    try:
        image = Image.open(file, formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise RowError("picture-too-large", "image: too many pixels", f"{source.name}: {error}") from None
    except Image.UnidentifiedImageError:
        detail = f"{source.name}; formats: {', '.join(FORMATS)}"
        raise RowError("not-a-picture", "image: not in a supported format", detail) from None
    except Exception as error:  # PIL raises any exception for damaged headers
        raise decode_error(source, error) from None
    check_pixels(*image.size, source)
    return image


def _decode(image: ImageFile.ImageFile, source: MediaSource) -> None:
    # PIL's TIFF library writes errors to the process's stderr.
    with _no_stderr() if image.format == "TIFF" else nullcontext():
        try:
            image.load()
        except Exception as error:
            raise decode_error(source, error) from None


def _check_depth(image: ImageFile.ImageFile, source: MediaSource) -> None:
    """Reject gray values that do not have 8 bits: PIL, and so Transformers' processor, turns them white or black."""
    if not image.mode.startswith(("I", "F")):
        return
    _decode(image, source)
    values = np.asarray(image)
    low, high = values.min(), values.max()
    if image.mode == "F" or low < 0 or high > 255:
        detail = f"{source.name}: {low} to {high}; convert it to 8 bits"
        raise RowError("deep-picture", "image: gray values that are not whole numbers from 0 to 255", detail)


def _check_scans(file: BinaryIO, image: Image.Image, source: MediaSource) -> None:
    place, size = file.tell(), file.seek(0, SEEK_END)
    file.seek(0 if size // _MIN_SCAN * image.width * image.height > MAX_SCANNED_PIXELS else size)
    scans = sum(block.count(b"\xff\xda") for block in iter(lambda: file.read(2**24), b""))
    file.seek(place)
    if scans * image.width * image.height > MAX_SCANNED_PIXELS:
        detail = f"{source.name}: {scans} scans of {image.width} x {image.height}"
        raise RowError("picture-too-large", "image: too many pixels", detail)


def _orientation(image: ImageFile.ImageFile) -> int:
    """Return the EXIF orientation, 1 (upright) to 8; call it before the image is decoded."""
    if image.format == "TIFF":  # PIL turns TIFF images itself
        return 1
    try:
        # PngImageFile.getexif would decode the image.
        return int(Image.Image.getexif(image).get(_EXIF_ORIENTATION, 1))
    except Exception:  # damaged metadata of a valid image
        return 1


def _empty(source: MediaSource) -> RowError:
    return RowError("picture-empty", f"{source.kind}: the file is empty", source.name)


def _unreadable(source: MediaSource, why: str) -> RowError:
    return RowError("unreadable-picture", f"{source.kind}: the file cannot be read", f"{source.name}: {why}")


@contextmanager
def _no_stderr() -> Iterator[None]:
    with _STDERR:
        kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, 2)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            os.close(nowhere)


def is_whole(file: BinaryIO) -> bool:
    """Return False if a file is truncated; True also if its format cannot tell. The file position is kept."""
    read, size = _reader(file)
    head = read(12, 0)
    check = next((check for magic, at, check in _CHECKS if head[at : at + len(magic)] == magic), None)
    try:
        return check is None or check(read, size)
    except (IndexError, ValueError, OverflowError, OSError):  # a length points beyond the end
        return False


def _reader(file: BinaryIO) -> tuple[_Read, int]:
    """Return a function that reads anywhere in the file, and the file's size."""
    if isinstance(file, BytesIO):
        content = file.getvalue()
        return lambda size, at: content[at : at + size], len(content)
    descriptor = file.fileno()
    return lambda size, at: os.pread(descriptor, size, at), os.fstat(descriptor).st_size


def _has_marker(marker: bytes) -> Callable[[_Read, int], bool]:
    def check(read: _Read, size: int) -> bool:
        return read(len(marker), size - len(marker)) == marker or marker in read(_TAIL, max(size - _TAIL, 0))

    return check


def _has_frame(read: _Read, size: int) -> bool:
    """GIF: the first frame must be complete; the others are not read."""
    if size > _TAIL:
        return True
    content = read(size, 0)
    at = 13 + _table_size(content[10])
    while content[at] == ord("!"):
        at = _skip_blocks(content, at + 2)
    return content[at] == ord(",") and _skip_blocks(content, at + 11 + _table_size(content[at + 9])) <= size


def _table_size(flags: int) -> int:
    return 3 * 2 ** (flags % 8 + 1) if flags & 128 else 0


def _skip_blocks(content: bytes, at: int) -> int:
    while content[at]:
        at += 1 + content[at]
    return at + 1


def _has_boxes(read: _Read, size: int) -> bool:
    """MP4, QuickTime and AVIF: consecutive boxes, each with its length."""
    at = 0
    while at + 16 <= size:
        head = read(16, at)
        length, name = int.from_bytes(head[:4], "big"), head[4:8]
        if length == 1:
            length = int.from_bytes(head[8:], "big")
        if length < 8 or not name.isalnum():  # the box extends to the end of the file, or it is not a box
            return True
        at += length
    return at <= size


def _has_segment(read: _Read, size: int) -> bool:
    """Matroska and WebM: a header and a segment, each with its length, unless it is marked as unknown."""
    header, bytes_of_header = _ebml_length(read(8, 4))
    at = 4 + bytes_of_header + header
    head = read(12, at)
    if head[:4] != b"\x18\x53\x80\x67":
        return True
    length, bytes_of_length = _ebml_length(head[4:])
    return length == 2 ** (7 * bytes_of_length) - 1 or at + 4 + bytes_of_length + length <= size


def _ebml_length(content: bytes) -> tuple[int, int]:
    """Return a length and the number of bytes that encode it."""
    count = 9 - content[0].bit_length()
    return int.from_bytes(content[:count], "big") - (1 << 7 * count), count


_CHECKS = (
    (b"\xff\xd8\xff", 0, _has_marker(b"\xff\xd9")),
    (b"\x89PNG", 0, _has_marker(b"IEND\xaeB`\x82")),
    (b"GIF8", 0, _has_frame),
    (b"RIFF", 0, lambda read, size: int.from_bytes(read(4, 4), "little") + 8 <= size),  # WebP and AVI
    (b"\x1aE\xdf\xa3", 0, _has_segment),
    *((name, 4, _has_boxes) for name in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")),
)
