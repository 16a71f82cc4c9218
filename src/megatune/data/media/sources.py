"""Where the encoded bytes of an image or a video are: a file, bytes of the row, or a list of frames."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatune.data.bad_rows import RowError

Kind = Literal["image", "video"]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_DATA_URL = re.compile(r"data:(image|video)/[\w.+-]+;base64,")
# How files of pictures begin in base64: JPEG, PNG, GIF, RIFF (WebP, AVI), Matroska, BMP, TIFF, and boxes of up to 255
# bytes (MP4, AVIF). No path of this length begins so.
_BASE64 = re.compile(r"/9j/|iVBORw0KGgo|R0lGOD|UklGR|GkXfo|Qk[0-3]|SUkqA|TU0AK|AAAA")
_LEAST_BASE64 = 64  # characters


@dataclass(frozen=True, slots=True)
class PictureSource:
    """An image or a video, encoded.

    Attributes:
        path: of the file; with `data` only its name.
        data: the file's content, where the row holds it.
        frames: of a video that is a list of images; it has neither path nor data.
    """

    kind: Kind
    path: str | None = None
    data: bytes | None = None
    frames: tuple[PictureSource, ...] | None = None

    @property
    def name(self) -> str:
        """What names it to the user."""
        if self.frames is not None:
            return f"{len(self.frames)} frames"
        return self.path if self.path is not None else f"{self.kind} of {len(self.data or b'')} bytes"

    def to_bytes(self) -> bytes:
        """Return it for the row cache: a line of JSON, and the content that the row holds."""
        parts = (self,) if self.frames is None else self.frames
        header = {
            "kind": self.kind,
            "frames": self.frames is not None,
            "parts": [[part.path, None if part.data is None else len(part.data)] for part in parts],
        }
        return b"".join([json.dumps(header).encode(), b"\n", *(part.data or b"" for part in parts)])

    @classmethod
    def from_bytes(cls, content: bytes | memoryview) -> PictureSource:
        """Return what `to_bytes` made the content of."""
        header, begin = _header(content)
        parts = []
        for path, size in header["parts"]:
            parts.append((path, None if size is None else bytes(content[begin : begin + size])))
            begin += size or 0
        if header["frames"]:
            return cls(header["kind"], frames=tuple(cls("image", *part) for part in parts))
        return cls(header["kind"], *parts[0])


def files_in(content: bytes | memoryview) -> tuple[list[str], int]:
    """Return the files of what `to_bytes` made, and the bytes of pictures that it holds itself; these are not read."""
    parts = _header(content)[0]["parts"]
    return [path for path, size in parts if size is None], sum(size or 0 for _, size in parts)


def _header(content: bytes | memoryview) -> tuple[dict[str, Any], int]:
    """Return the line of JSON, and where it ends."""
    size = 256
    while b"\n" not in (head := bytes(content[:size])) and size < len(content):
        size *= 4
    line = head.partition(b"\n")[0]
    return json.loads(line), len(line) + 1


def picture_source(value: object, kind: Kind, media_dir: str) -> PictureSource:
    """Return where the bytes of a picture are that a row names or holds.

    Args:
        value: a path, bytes, base64 (a data URL, too), or the datasets library's {"bytes": ..., "path": ...}; of a
            video also a list of these, its frames.
        media_dir: where relative paths begin. As in LLaMA-Factory, a path that is no file there is taken as it is.

    Raises:
        RowError: it is none of these, or a URL. Whether the file is there shows when it is measured.
    """
    if kind == "video" and isinstance(value, list | tuple):
        return PictureSource("video", frames=tuple(picture_source(frame, "image", media_dir) for frame in value))
    if isinstance(value, Mapping):
        content, path = value.get("bytes"), value.get("path")
        if content is not None:
            content = _from_base64(content, kind) if isinstance(content, str) else content
            if isinstance(content, bytes | bytearray | memoryview):
                return PictureSource(kind, path if isinstance(path, str) else None, bytes(content))
        value = path if content is None else value
    if isinstance(value, bytes | bytearray | memoryview):
        return PictureSource(kind, data=bytes(value))
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or not value:
        what: Any = value if value is None or value == "" else type(value).__name__
        raise RowError("bad-picture", f"{kind}: neither a path, nor bytes, nor base64", f"it is {what!r}")
    value = value.removeprefix("file://")
    if _DATA_URL.match(value):
        return PictureSource(kind, data=_from_base64(value.partition(",")[2], kind))
    if _URL.match(value) or value.startswith("data:"):
        detail = value if len(value) < 200 else f"{value[:200]}..."
        raise RowError("picture-url", f"{kind}: a URL; only local files are read", detail)
    inside = os.path.join(media_dir, value)
    for path in (inside, value):
        if os.path.isfile(path):
            return PictureSource(kind, path)
    if len(value) >= _LEAST_BASE64 and _BASE64.match(value):
        return PictureSource(kind, data=_from_base64(value, kind))
    return PictureSource(kind, inside)


def _from_base64(text: str, kind: Kind) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowError("bad-base64", f"{kind}: not base64", str(error)) from error
