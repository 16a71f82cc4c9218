"""Reading image files: the size from the header, and the pixels; whatever is wrong with a file is a RowError.

Images are turned upright by their EXIF orientation, as Transformers' load_image and the datasets library do.
LLaMA-Factory turns decoded columns and leaves files named by path as they are stored; labels describe what people see.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from io import SEEK_END, BytesIO
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageFile

from megatune.data.bad_rows import RowError
from megatune.data.media.ends import is_whole
from megatune.data.media.sources import PictureSource

# Without those whose reading starts another program (EPS, by Ghostscript), and those of cameras and desktops.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "ICO")
MOST_PIXELS = 2**28 // 3  # a quarter GiB of RGB: PIL warns from here on
# A progressive JPEG is decoded once for each of its scans, of which a small file can have thousands.
MOST_SCANNED_PIXELS = 100 * MOST_PIXELS
_LEAST_SCAN = 10  # bytes of one
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

# What PIL warns of, and logs, is refused here (too many pixels), or does not matter (metadata that cannot be read).
# A filter for good, since catch_warnings is not for threads.
warnings.filterwarnings("ignore", module=r"PIL\.")
logging.getLogger("PIL").setLevel(logging.CRITICAL)


def image_size(source: PictureSource) -> tuple[int, int]:
    """Return width and height of the upright image, read from its header.

    Raises:
        RowError: it cannot be read, is too large, or ends before its end; damage within shows only as it is decoded.
    """
    with open_file(source) as file:
        check_end(file, source)
        image = _opened(file, source)
        orientation, (width, height) = _orientation(image), image.size
        _check_depth(image, source)
        return (height, width) if orientation in (5, 6, 7, 8) else (width, height)


def load_image(source: PictureSource) -> Image.Image:
    """Decode an image, upright, in the mode of its file. Of an animation it is the first frame.

    Raises:
        RowError: it cannot be read, is too large or damaged.
    """
    with open_file(source) as file:
        image = _opened(file, source)
        orientation = _orientation(image)
        if image.format in ("JPEG", "MPO"):
            _check_scans(file, image, source)
        _check_depth(image, source)
        _decode(image, source)
        turn = _UPRIGHT.get(orientation)
        return image if turn is None else image.transpose(turn)


def open_image(source: PictureSource) -> Image.Image:
    """Decode an image as `load_image` does, in RGB."""
    return load_image(source).convert("RGB")


def open_file(source: PictureSource) -> BinaryIO:
    """Open the encoded bytes.

    Raises:
        RowError: there is no such file, it is empty, or not a regular file that can be read.
    """
    if source.data is not None:
        if not source.data:
            raise _empty(source)
        return BytesIO(source.data)
    assert source.path is not None
    try:
        # Otherwise opening a named pipe waits for a writer.
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


def check_pixels(width: int, height: int, source: PictureSource) -> None:
    """Raise a RowError if an image, or a frame, has more pixels than are ever decoded."""
    if width * height > MOST_PIXELS:
        detail = f"{source.name}: {width} x {height}, and at most {MOST_PIXELS:,} pixels are read"
        raise RowError("picture-too-large", f"{source.kind}: too many pixels", detail)


def check_end(file: BinaryIO, source: PictureSource) -> None:
    """Raise a RowError if the file stops before the end that its format prescribes."""
    if not is_whole(file):
        raise RowError("picture-truncated", f"{source.kind}: the file is truncated", source.name)


def damaged(source: PictureSource, error: Exception) -> RowError:
    """Return what says that decoding failed with this error."""
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return RowError("damaged-picture", f"{source.kind}: the file is damaged", f"{source.name}: {why}")


def _opened(file: BinaryIO, source: PictureSource) -> ImageFile.ImageFile:
    try:
        image = Image.open(file, formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise RowError("picture-too-large", "image: too many pixels", f"{source.name}: {error}") from None
    except Image.UnidentifiedImageError:
        detail = f"{source.name}; formats: {', '.join(FORMATS)}"
        raise RowError("not-a-picture", "image: not in a supported format", detail) from None
    except Exception as error:  # PIL's readers of damaged headers raise anything
        raise damaged(source, error) from None
    check_pixels(*image.size, source)
    return image


def _decode(image: ImageFile.ImageFile, source: PictureSource) -> None:
    # PIL's TIFF library writes what it finds wrong to the process's standard error.
    with _no_stderr() if image.format == "TIFF" else nullcontext():
        try:
            image.load()
        except Exception as error:
            raise damaged(source, error) from None


def _check_depth(image: ImageFile.ImageFile, source: PictureSource) -> None:
    """Refuse grey values that are not of 8 bits, which PIL, and so Transformers' processor, makes white or black."""
    if not image.mode.startswith(("I", "F")):
        return
    _decode(image, source)
    values = np.asarray(image)
    low, high = values.min(), values.max()
    if image.mode == "F" or low < 0 or high > 255:
        detail = f"{source.name}: {low} to {high}; convert it to 8 bits"
        raise RowError("deep-picture", "image: grey values that are not whole numbers from 0 to 255", detail)


def _check_scans(file: BinaryIO, image: Image.Image, source: PictureSource) -> None:
    place, size = file.tell(), file.seek(0, SEEK_END)
    file.seek(0 if size // _LEAST_SCAN * image.width * image.height > MOST_SCANNED_PIXELS else size)
    scans = sum(block.count(b"\xff\xda") for block in iter(lambda: file.read(2**24), b""))
    file.seek(place)
    if scans * image.width * image.height > MOST_SCANNED_PIXELS:
        detail = f"{source.name}: {scans} scans of {image.width} x {image.height}"
        raise RowError("picture-too-large", "image: too many pixels", detail)


def _orientation(image: ImageFile.ImageFile) -> int:
    """Return the EXIF orientation, 1 (upright) to 8; ask before the image is decoded."""
    if image.format == "TIFF":  # PIL turns it itself
        return 1
    try:
        # PngImageFile's own method would decode the image.
        return int(Image.Image.getexif(image).get(_EXIF_ORIENTATION, 1))
    except Exception:  # damaged metadata of a sound image
        return 1


def _empty(source: PictureSource) -> RowError:
    return RowError("picture-empty", f"{source.kind}: the file is empty", source.name)


def _unreadable(source: PictureSource, why: str) -> RowError:
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
