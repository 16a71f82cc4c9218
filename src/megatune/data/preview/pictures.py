"""Pictures of rows that are shown: their sizes in words, and small copies of them for a page."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator

from PIL import Image

from megatune.data.bad_rows import RowError
from megatune.data.media.images import open_image
from megatune.data.media.video import decode_frames
from megatune.data.pictures import DocumentPicture, unpacked
from megatune.data.report import counted

_SIDE = 160  # pixels of the longest side of a small copy
_MOST_FRAMES = 4  # of a video


def describe(number: int, picture: DocumentPicture) -> str:
    """Write a document's picture of this number in words: its name, size, patches and tokens."""
    source, measured = unpacked(picture.packed)
    frames = f"{counted(len(measured.frames), 'frame')} of " if picture.is_video else ""
    size = f"{frames}{' × '.join(map(str, measured.size))} pixels"
    patches = f"{' × '.join(map(str, picture.grid[0 if picture.is_video else 1 :]))} patches"
    return f"{source.kind} {number} ({source.name}): {size}, {patches}, {counted(picture.num_tokens, 'token')}"


def small_copies(picture: DocumentPicture) -> Iterator[str]:
    """Yield data URLs of small copies: of an image, or of some frames of a video.

    Raises:
        RowError: it cannot be decoded.
    """
    source, measured = unpacked(picture.packed)
    images: Iterable[Image.Image]
    chosen = sorted({place * (len(measured.frames) - 1) // (_MOST_FRAMES - 1) for place in range(_MOST_FRAMES)})
    if source.kind == "image":
        images = [open_image(source)]
    elif source.frames is not None:
        images = (open_image(source.frames[place]) for place in chosen)
    else:
        images = decode_frames(source, tuple(measured.frames[place] for place in chosen))
    for image in images:
        image.thumbnail((_SIDE, _SIDE))
        content = io.BytesIO()
        image.convert("RGB").save(content, "JPEG")
        yield f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"


def copies_or_fault(picture: DocumentPicture) -> tuple[list[str], str]:
    """Return data URLs of small copies, or why there are none."""
    try:
        return list(small_copies(picture)), ""
    except RowError as error:
        return [], str(error)
