"""Pictures (images and videos) of documents: where their tokens are, and what a loader decodes them from.

    FOLDER/pictures.npy  a record of every picture of tokens.npy, in the order of their tokens
    FOLDER/sources.npy   how each was measured, and its file's name, or its bytes where it has no file
    FOLDER/files.npy     "SIZE PATH" of every file, a zero byte behind each

No pixel is stored: a picture is measured from its header when rows are prepared, and decoded when a step trains it.
What rows depend on is its size in pixels, with which its number of tokens changes. So they hold how many bytes each
file had: `are_current` compares them before prepared rows are used again, and a decoder refuses a picture of another
size than it was measured with. Times of files are left out, since copies on several machines differ in them.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatune.data.media import PictureSource
from megatune.data.media.processor import Measured
from megatune.data.store import Column, ColumnWriter

PICTURES_FILE = "pictures.npy"
SOURCES_FILE = "sources.npy"
FILES_FILE = "files.npy"

_RECORD = np.dtype([
    ("token", "<i8"),  # the first placeholder in tokens.npy
    ("num_tokens", "<i4"),
    ("grid", "<i4", (3,)),
    ("is_video", "<i4"),
    ("seconds_per_grid", "<f8"),  # nan: None
    ("offset", "<i8"),  # in sources.npy
    ("size", "<i8"),
])  # fmt: skip
_SIZE = struct.Struct("<I")
_LOOKING = 16  # threads: a file system over a network takes its time for each file
_FILES_A_LOOK = 1024


class DocumentPicture(NamedTuple):
    """A picture of a document.

    Attributes:
        start: its first placeholder token in the document.
        num_tokens: its placeholder tokens: a run of them, or, where the frames of a video are apart, several.
        grid: patches (t, h, w).
        seconds_per_grid: between patches of a video in time, where the model counts seconds.
        packed: what it is decoded from, by `unpacked`.
    """

    start: int
    num_tokens: int
    grid: tuple[int, int, int]
    seconds_per_grid: float | None
    is_video: bool
    packed: bytes | memoryview


def packed(source: PictureSource, measured: Measured) -> bytes:
    """Return what a picture is decoded from: the size of a header in JSON, the header, and the bytes of pictures that
    the row holds.

    Raises:
        OSError: a file of it cannot be looked at.
    """
    parts = (source,) if source.frames is None else source.frames
    header = {
        "kind": source.kind,
        "frames": source.frames is not None,
        "parts": [(part.path, None if part.data is None else len(part.data)) for part in parts],
        "files": [(part.path, os.stat(part.path or "").st_size) for part in parts if part.data is None],
        "measured": asdict(measured),
    }
    text = json.dumps(header).encode()
    return b"".join([_SIZE.pack(len(text)), text, *(part.data or b"" for part in parts)])


def unpacked(content: bytes | memoryview) -> tuple[PictureSource, Measured]:
    """Return what `packed` was given."""
    header, begin = _header_of(content)
    parts = []
    for path, size in header["parts"]:
        parts.append((path, None if size is None else bytes(content[begin : begin + size])))
        begin += size or 0
    if header["frames"]:
        source = PictureSource(header["kind"], frames=tuple(PictureSource("image", *part) for part in parts))
    else:
        source = PictureSource(header["kind"], *parts[0])
    written = header["measured"].items()
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in written}
    return source, Measured(**fields)


def _header_of(content: bytes | memoryview) -> tuple[dict[str, Any], int]:
    """Return the header, and where it ends."""
    (size,) = _SIZE.unpack_from(content)
    stop = _SIZE.size + size
    return json.loads(bytes(content[_SIZE.size : stop])), stop


def are_current(folder: Path) -> bool:
    """Return whether all pictures of a folder of token rows have the files that they were measured from."""
    return not (folder / PICTURES_FILE).exists() or PictureTable(folder).is_current()


@dataclass(frozen=True, slots=True)
class PictureCounts:
    """How many pictures there are, each as often as it is used.

    Attributes:
        tokens: of all of them.
        largest: tokens of the largest one.
        of_row: tokens of pictures in the row that has most.
    """

    images: int = 0
    videos: int = 0
    tokens: int = 0
    largest: int = 0
    of_row: int = 0

    def words(self) -> str:
        """Write the counts in words, "" where there is no picture."""
        number = self.images + self.videos
        if not number:
            return ""
        kinds = ((self.images, "image"), (self.videos, "video"))
        what = " and ".join(f"{count:,} {kind}{'s' * (count > 1)}" for count, kind in kinds if count)
        mean = self.tokens / number
        return f"{what} with {self.tokens:,} tokens, {mean:,.0f} each and {self.largest:,} at most"


class PictureTable:
    """The pictures of a folder of token rows, memory-mapped.

    Raises:
        OSError, ValueError: the files are not there, or not whole.
    """

    def __init__(self, folder: Path) -> None:
        self._records = Column(folder / PICTURES_FILE).whole()
        self._sources = Column(folder / SOURCES_FILE)
        self._files = Column(folder / FILES_FILE).whole()
        held = int(self._records["offset"][-1] + self._records["size"][-1]) if len(self._records) else 0
        if held != len(self._sources):
            raise ValueError(f"{SOURCES_FILE} has {len(self._sources)} bytes, {PICTURES_FILE} names {held}")

    def __len__(self) -> int:
        return len(self._records)

    def between(self, start: int, stop: int) -> tuple[DocumentPicture, ...]:
        """Return the pictures of the document whose tokens begin and end there in tokens.npy.

        Raises:
            ValueError: they differ from what was written.
        """
        if not len(self._records):
            return ()
        first, last = np.searchsorted(self._tokens, (start, stop))
        return tuple(self._picture(record, start) for record in self._records[first:last])

    def count(self, spans: np.ndarray) -> PictureCounts:
        """Count the pictures of documents, int [documents, 2] as `TokenRows.spans`."""
        uses = np.zeros(len(self) + 1, dtype=np.int64)
        for column, sign in ((0, 1), (1, -1)):
            np.add.at(uses, np.searchsorted(self._tokens, spans[:, column]), sign)
        uses = np.cumsum(uses[:-1])
        tokens, videos = self._records["num_tokens"].astype(np.int64), self._records["is_video"] != 0
        sums = (int(uses[~videos].sum()), int(uses[videos].sum()), int((uses * tokens).sum()))
        return PictureCounts(*sums, int(tokens[uses > 0].max(initial=0)))

    def tokens_between(self, spans: np.ndarray) -> np.ndarray:
        """Return tokens of pictures of each document, int64 [documents], of int [documents, 2] as `TokenRows.spans`."""
        tokens = np.concatenate(([0], np.cumsum(self._records["num_tokens"], dtype=np.int64)))
        first, last = (tokens[np.searchsorted(self._tokens, spans[:, column])] for column in (0, 1))
        return last - first

    def is_current(self) -> bool:
        """Return whether every picture's file is there with as many bytes as when it was measured."""
        files = self._files.tobytes().split(b"\0")[:-1]
        parts = (files[first : first + _FILES_A_LOOK] for first in range(0, len(files), _FILES_A_LOOK))
        with ThreadPoolExecutor(_LOOKING) as pool:
            return all(pool.map(_have_their_sizes, parts))

    def digested(self) -> Sequence[np.ndarray]:
        """Return the content, for a digest."""
        return (self._records, self._sources.values)

    @cached_property
    def _tokens(self) -> np.ndarray:
        return np.ascontiguousarray(self._records["token"])

    def _picture(self, record: np.void, start: int) -> DocumentPicture:
        offset, size = int(record["offset"]), int(record["size"])
        seconds = float(record["seconds_per_grid"])
        t, h, w = record["grid"].tolist()
        return DocumentPicture(
            start=int(record["token"] - start),
            num_tokens=int(record["num_tokens"]),
            grid=(t, h, w),
            seconds_per_grid=None if np.isnan(seconds) else seconds,
            is_video=bool(record["is_video"]),
            packed=self._sources.read(offset, offset + size).data,
        )


def _have_their_sizes(files: Sequence[bytes]) -> bool:
    try:
        return all(os.stat(path).st_size == int(size) for size, _, path in (each.partition(b" ") for each in files))
    except OSError:
        return False


class PictureWriter:
    """Writes the pictures of a folder of token rows, in the order of their tokens."""

    def __init__(self, folder: Path) -> None:
        self._records = ColumnWriter(folder / PICTURES_FILE, _RECORD)
        self._sources = ColumnWriter(folder / SOURCES_FILE, np.uint8)
        self._files = ColumnWriter(folder / FILES_FILE, np.uint8)
        self.columns = (self._records, self._sources, self._files)
        self._offset = 0

    def add(self, start: int, pictures: Sequence[DocumentPicture]) -> None:
        """Write the pictures of a document that begins with this token of tokens.bin."""
        for each in pictures:
            seconds = np.nan if each.seconds_per_grid is None else each.seconds_per_grid
            place = (start + each.start, each.num_tokens, each.grid, each.is_video, seconds)
            self._records.append(np.array((*place, self._offset, len(each.packed)), dtype=_RECORD))
            self._sources.append(each.packed)
            files = _header_of(each.packed)[0]["files"]
            self._files.append(b"".join(b"%d %b\0" % (size, os.fsencode(path)) for path, size in files))
            self._offset += len(each.packed)
