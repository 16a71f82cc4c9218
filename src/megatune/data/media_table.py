"""Images and videos ("media") of documents: positions of their tokens, and the sources they are decoded from.

    FOLDER/media.npy     a record of every image and video in tokens.npy, in the order of their tokens
    FOLDER/sources.npy   the measurement of each, and its file name, or its bytes if it has no file
    FOLDER/files.npy     "SIZE TIME DIGEST PATH" of every file, each followed by a zero byte

No pixels are stored: an image or video is measured from its header when rows are prepared, and decoded in the step that
trains it. Rows depend on its size in pixels, which determines the number of its tokens, and the reference's
log-probabilities next to the rows depend on its content. `are_current` therefore compares the size and the time of each
file before prepared rows are reused, and decoding fails if an image has another size in pixels than measured. Copies
have other times: if only the time differs, the digests of the first and last bytes decide.
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

from megatune.data.media import MediaSource
from megatune.data.media.processor import MediaShape
from megatune.data.store import Column, ColumnWriter
from megatune.hub.digests import ends_digest

MEDIA_FILE = "media.npy"
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
_DIGESTED_BYTES = 4096  # at each end of a file; the end of a compressed image depends on all of it
_STAT_THREADS = 16  # network file systems have a high latency per file
_FILES_PER_TASK = 1024


class DocumentMedia(NamedTuple):
    """An image or video of a document.

    Attributes:
        start: index of its first placeholder token in the document.
        num_tokens: number of its placeholder tokens, in one run, or in several if the frames of a video are separated.
        grid: patches (t, h, w).
        seconds_per_grid: seconds between temporal patches of a video, if the model uses them.
        packed: its source, see `unpacked`.
        files: see `file_records`; empty if it is read from a table.
    """

    start: int
    num_tokens: int
    grid: tuple[int, int, int]
    seconds_per_grid: float | None
    is_video: bool
    packed: bytes | memoryview
    files: bytes = b""


def packed(source: MediaSource, measured: MediaShape) -> bytes:
    """Serialize the source of an image or video: the size of a JSON header, the header, and the bytes that the row
    contains.

    Raises:
        OSError: a file cannot be accessed.
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


def file_records(source: MediaSource) -> bytes:
    """Return size, modification time in nanoseconds, digest and path of each file, for `are_current`.

    Raises:
        OSError: a file cannot be read.
    """
    parts = (source,) if source.frames is None else source.frames
    records = []
    for path in (os.fsencode(part.path or "") for part in parts if part.data is None):
        status = os.stat(path)
        digest = ends_digest(path, _DIGESTED_BYTES).encode()
        records.append(b"%d %d %b %b\0" % (status.st_size, status.st_mtime_ns, digest, path))
    return b"".join(records)


def unpacked(content: bytes | memoryview) -> tuple[MediaSource, MediaShape]:
    """Deserialize what `packed` returned."""
    header, begin = _header_of(content)
    parts = []
    for path, size in header["parts"]:
        parts.append((path, None if size is None else bytes(content[begin : begin + size])))
        begin += size or 0
    if header["frames"]:
        source = MediaSource(header["kind"], frames=tuple(MediaSource("image", *part) for part in parts))
    else:
        source = MediaSource(header["kind"], *parts[0])
    written = header["measured"].items()
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in written}
    return source, MediaShape(**fields)


def _header_of(content: bytes | memoryview) -> tuple[dict[str, Any], int]:
    """Return the header, and the offset of its end."""
    (size,) = _SIZE.unpack_from(content)
    stop = _SIZE.size + size
    return json.loads(bytes(content[_SIZE.size : stop])), stop


def are_current(folder: Path) -> bool:
    """Return whether the image and video files of a folder of token rows are unchanged, see `MediaTable`."""
    return not (folder / MEDIA_FILE).exists() or MediaTable(folder).is_current()


@dataclass(frozen=True, slots=True)
class MediaCounts:
    """Numbers of images and videos, each counted as often as it is used.

    Attributes:
        tokens: number of their tokens.
        largest: number of tokens of the largest one.
        of_row: number of their tokens in the row with the most.
    """

    images: int = 0
    videos: int = 0
    tokens: int = 0
    largest: int = 0
    of_row: int = 0

    def describe(self) -> str:
        """Return the counts for users, "" if there are none."""
        number = self.images + self.videos
        if not number:
            return ""
        kinds = ((self.images, "image"), (self.videos, "video"))
        what = " and ".join(f"{count:,} {kind}{'s' * (count > 1)}" for count, kind in kinds if count)
        mean = self.tokens / number
        return f"{what} with {self.tokens:,} tokens, {mean:,.0f} each and {self.largest:,} at most"


class MediaTable:
    """The images and videos of a folder of token rows, memory-mapped.

    Raises:
        OSError, ValueError: the files are missing or incomplete.
    """

    def __init__(self, folder: Path) -> None:
        self._records = Column(folder / MEDIA_FILE).whole()
        self._sources = Column(folder / SOURCES_FILE)
        self._files = Column(folder / FILES_FILE).whole()
        held = int(self._records["offset"][-1] + self._records["size"][-1]) if len(self._records) else 0
        if held != len(self._sources):
            raise ValueError(f"{SOURCES_FILE} has {len(self._sources)} bytes, {MEDIA_FILE} names {held}")

    def __len__(self) -> int:
        return len(self._records)

    def between(self, start: int, stop: int) -> tuple[DocumentMedia, ...]:
        """Return the images and videos of the document with tokens start to stop of tokens.npy.

        Raises:
            ValueError: they differ from what was written.
        """
        if not len(self._records):
            return ()
        first, last = np.searchsorted(self._tokens, (start, stop))
        return tuple(self._item(record, start) for record in self._records[first:last])

    def count(self, spans: np.ndarray, rows: np.ndarray) -> MediaCounts:
        """Count the images and videos of token rows.

        Args:
            spans: int [documents, 2] as in `TokenRows.spans`.
            rows: int [rows + 1], start of each row in `spans`.
        """
        first, last = (np.searchsorted(self._tokens, spans[:, column]) for column in (0, 1))
        starts, stops = (np.bincount(places, minlength=len(self) + 1) for places in (first, last))
        uses = np.cumsum(starts - stops)[:-1]
        tokens, videos = self._records["num_tokens"].astype(np.int64), self._records["is_video"] != 0
        before = np.append(0, np.cumsum(tokens))
        of_rows = np.diff(np.append(0, np.cumsum(before[last] - before[first]))[rows])
        return MediaCounts(
            images=int(uses[~videos].sum()),
            videos=int(uses[videos].sum()),
            tokens=int((uses * tokens).sum()),
            largest=int(tokens[uses > 0].max(initial=0)),
            of_row=int(of_rows.max(initial=0)),
        )

    def is_current(self) -> bool:
        """Return whether every file exists as it was when it was measured."""
        files = self._files.tobytes().split(b"\0")[:-1]
        parts = (files[first : first + _FILES_PER_TASK] for first in range(0, len(files), _FILES_PER_TASK))
        with ThreadPoolExecutor(_STAT_THREADS) as pool:
            return all(pool.map(_are_unchanged, parts))

    def digested(self) -> Sequence[np.ndarray]:
        """Return the content, for a digest."""
        return (self._records, self._sources.values)

    @cached_property
    def _tokens(self) -> np.ndarray:
        return np.ascontiguousarray(self._records["token"])

    def _item(self, record: np.void, start: int) -> DocumentMedia:
        offset, size = int(record["offset"]), int(record["size"])
        seconds = float(record["seconds_per_grid"])
        t, h, w = record["grid"].tolist()
        return DocumentMedia(
            start=int(record["token"] - start),
            num_tokens=int(record["num_tokens"]),
            grid=(t, h, w),
            seconds_per_grid=None if np.isnan(seconds) else seconds,
            is_video=bool(record["is_video"]),
            packed=self._sources.read(offset, offset + size).data,
        )


def _are_unchanged(files: Sequence[bytes]) -> bool:
    try:
        for size, time, digest, path in (each.split(b" ", 3) for each in files):
            status = os.stat(path)
            if status.st_size != int(size):
                return False
            if status.st_mtime_ns != int(time) and ends_digest(path, _DIGESTED_BYTES).encode() != digest:
                return False
    except (OSError, ValueError):
        return False
    return True


class MediaWriter:
    """Writes the images and videos of a folder of token rows, in the order of their tokens."""

    def __init__(self, folder: Path) -> None:
        self._records = ColumnWriter(folder / MEDIA_FILE, _RECORD)
        self._sources = ColumnWriter(folder / SOURCES_FILE, np.uint8)
        self._files = ColumnWriter(folder / FILES_FILE, np.uint8)
        self.columns = (self._records, self._sources, self._files)
        self._offset = 0

    def add(self, start: int, media: Sequence[DocumentMedia]) -> None:
        """Write the images and videos of the document that begins at this token of tokens.npy."""
        for each in media:
            seconds = np.nan if each.seconds_per_grid is None else each.seconds_per_grid
            place = (start + each.start, each.num_tokens, each.grid, each.is_video, seconds)
            self._records.append(np.array((*place, self._offset, len(each.packed)), dtype=_RECORD))
            self._sources.append(each.packed)
            self._files.append(each.files)
            self._offset += len(each.packed)
