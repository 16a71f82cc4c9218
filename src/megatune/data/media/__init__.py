"""Images and videos of a row: their sizes in tokens, their pixels, their positions.

This module resolves where the encoded bytes of one are: in a file, in the row, or in a list of frames.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatune.data.bad_rows import RowError

Kind = Literal["image", "video"]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_DATA_URL = re.compile(r"data:(image|video)/[\w.+-]+;base64,")
# How image and video files begin in base64: JPEG, PNG, GIF, RIFF (WebP, AVI), Matroska, BMP, TIFF, and boxes of up to
# 255 bytes (MP4, AVIF). No path of this length begins like that.
_BASE64 = re.compile(r"/9j/|iVBORw0KGgo|R0lGOD|UklGR|GkXfo|Qk[0-3]|SUkqA|TU0AK|AAAA")
_MIN_BASE64 = 64  # characters


@dataclass(frozen=True, slots=True)
class MediaSource:
    """An encoded image or video.

    Attributes:
        path: of the file; next to `data` only its name.
        data: the file's content, if the row holds it.
        frames: of a video that is a list of images; path and data are None then.
    """

    kind: Kind
    path: str | None = None
    data: bytes | None = None
    frames: tuple[MediaSource, ...] | None = None

    @property
    def name(self) -> str:
        """The name in messages to the user."""
        if self.frames is not None:
            return f"{len(self.frames)} frames"
        return self.path if self.path is not None else f"{self.kind} of {len(self.data or b'')} bytes"


def media_source(value: object, kind: Kind, media_dir: str) -> MediaSource:
    """Return the source of an image or video that a row names or holds.

    Args:
        value: a path, bytes, base64 (also as a data URL), or the datasets library's {"bytes": ..., "path": ...}; for a
            video also a list of these, its frames.
        media_dir: the base of relative paths. As in LLaMA-Factory, a path that is no file there is used unchanged.

    Raises:
        RowError: the value is none of these, or a URL. A missing file is detected when it is measured.
    """
    if kind == "video" and isinstance(value, list | tuple):
        return MediaSource("video", frames=tuple(media_source(frame, "image", media_dir) for frame in value))
    if isinstance(value, Mapping):
        content, path = value.get("bytes"), value.get("path")
        if content is not None:
            content = _from_base64(content, kind) if isinstance(content, str) else content
            if isinstance(content, bytes | bytearray | memoryview):
                return MediaSource(kind, path if isinstance(path, str) else None, bytes(content))
        value = path if content is None else value
    if isinstance(value, bytes | bytearray | memoryview):
        return MediaSource(kind, data=bytes(value))
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or not value:
        what: Any = value if value is None or value == "" else type(value).__name__
        raise RowError("bad-picture", f"{kind}: expected a path, bytes or base64", f"got {what!r}")
    value = value.removeprefix("file://")
    if _DATA_URL.match(value):
        return MediaSource(kind, data=_from_base64(value.partition(",")[2], kind))
    if _URL.match(value) or value.startswith("data:"):
        detail = value if len(value) < 200 else f"{value[:200]}..."
        raise RowError("picture-url", f"{kind}: a URL; only local files are read", detail)
    inside = os.path.join(media_dir, value)
    for path in (inside, value):
        if os.path.isfile(path):
            return MediaSource(kind, path)
    if is_base64(value):
        return MediaSource(kind, data=_from_base64(value, kind))
    return MediaSource(kind, inside)


def is_base64(text: str) -> bool:
    """Return whether a text without a file of its name is an image or a video in base64."""
    return len(text) >= _MIN_BASE64 and _BASE64.match(text) is not None


def _from_base64(text: str, kind: Kind) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowError("bad-base64", f"{kind}: not base64", str(error)) from error
