"""Whether a file of an image or a video is there to its end, as far as its format tells without decoding."""

from __future__ import annotations

import os
from collections.abc import Callable
from io import BytesIO
from typing import BinaryIO

_TAIL = 2**24  # bytes that an end is looked for in, where something follows it
_Read = Callable[[int, int], bytes]  # so many bytes, from this place on


def is_whole(file: BinaryIO) -> bool:
    """Return False if a file stops too early; True, too, where its format does not tell. The place in it stays."""
    read, size = _reader(file)
    head = read(12, 0)
    check = next((check for magic, at, check in _CHECKS if head[at : at + len(magic)] == magic), None)
    try:
        return check is None or check(read, size)
    except (IndexError, ValueError, OverflowError, OSError):  # a length leads beyond the end
        return False


def _reader(file: BinaryIO) -> tuple[_Read, int]:
    """Return what reads anywhere in the file, and the file's size."""
    if isinstance(file, BytesIO):
        content = file.getvalue()
        return lambda size, at: content[at : at + size], len(content)
    descriptor = file.fileno()
    return lambda size, at: os.pread(descriptor, size, at), os.fstat(descriptor).st_size


def _has_marker(marker: bytes) -> Callable[[_Read, int], bool]:
    def check(read: _Read, size: int) -> bool:
        return read(len(marker), size - len(marker)) == marker or marker in read(_TAIL, max(size - _TAIL, 0))

    return check


def _has_riff(read: _Read, size: int) -> bool:
    """WebP and AVI: their length is at their start."""
    return int.from_bytes(read(4, 4), "little") + 8 <= size


def _has_frame(read: _Read, size: int) -> bool:
    """GIF: its first frame has an end; the others are not read."""
    if size > _TAIL:
        return True
    content = read(size, 0)
    at = 13 + _table_size(content[10])
    while content[at] == ord("!"):
        at = _behind_blocks(content, at + 2)
    return content[at] == ord(",") and _behind_blocks(content, at + 11 + _table_size(content[at + 9])) <= size


def _table_size(flags: int) -> int:
    return 3 * 2 ** (flags % 8 + 1) if flags & 128 else 0


def _behind_blocks(content: bytes, at: int) -> int:
    while content[at]:
        at += 1 + content[at]
    return at + 1


def _has_boxes(read: _Read, size: int) -> bool:
    """MP4, QuickTime and AVIF: boxes, one after the other, each with its length."""
    at = 0
    while at + 16 <= size:
        head = read(16, at)
        length, name = int.from_bytes(head[:4], "big"), head[4:8]
        if length == 1:
            length = int.from_bytes(head[8:], "big")
        if length < 8 or not name.isalnum():  # to the end, or no box any more
            return True
        at += length
    return at <= size


def _has_segment(read: _Read, size: int) -> bool:
    """Matroska and WebM: a header and a segment, each with its length, unless it is written as unknown."""
    header, bytes_of_header = _ebml_length(read(8, 4))
    at = 4 + bytes_of_header + header
    head = read(12, at)
    if head[:4] != b"\x18\x53\x80\x67":
        return True
    length, bytes_of_length = _ebml_length(head[4:])
    return length == 2 ** (7 * bytes_of_length) - 1 or at + 4 + bytes_of_length + length <= size


def _ebml_length(content: bytes) -> tuple[int, int]:
    """Return a length, and the bytes that it takes."""
    count = 9 - content[0].bit_length()
    return int.from_bytes(content[:count], "big") - (1 << 7 * count), count


_CHECKS = (
    (b"\xff\xd8\xff", 0, _has_marker(b"\xff\xd9")),
    (b"\x89PNG", 0, _has_marker(b"IEND\xaeB`\x82")),
    (b"GIF8", 0, _has_frame),
    (b"RIFF", 0, _has_riff),
    (b"\x1aE\xdf\xa3", 0, _has_segment),
    *((name, 4, _has_boxes) for name in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")),
)
