"""Arrays on disk with checksums: written at once or appended to, then memory-mapped by every process that reads them.

An array is an .npy file, next to a file with digests of its 64 KiB blocks. A block is checked when it is first read,
which takes microseconds; a digest of the whole file would take a second per few gigabytes before the first step.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash
from numpy.lib import format as npy

BLOCK_BYTES = 2**16

_SUFFIX = ".xxh3"
_DIGEST = np.dtype("<u8")


class ColumnWriter:
    """Appends values to a new array."""

    def __init__(self, path: Path, dtype: npt.DTypeLike) -> None:
        self._path, self._dtype, self._length = path, np.dtype(dtype), 0
        self._sealed: int | None = None  # the length of the file when it was complete
        self._file = path.open("xb")
        self._write_header()

    def append(self, values: npt.ArrayLike | bytes) -> None:
        """Write values, converted to the column's dtype; bytes are written unchanged."""
        content = values if isinstance(values, bytes) else np.asarray(values, dtype=self._dtype).tobytes()
        self._file.write(content)
        self._length += len(content) // self._dtype.itemsize

    def seal(self) -> None:
        """Complete the file: write the header and the digests of everything appended so far."""
        if self._sealed == self._length:
            return
        self._sealed, end = self._length, self._file.tell()
        self._write_header()
        self._file.seek(end)
        self._file.flush()
        _write_digests(self._path)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write_header(self) -> None:
        """Write the header; numpy pads it, so that any length fits."""
        self._file.seek(0)
        described = {"descr": npy.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self._length,)}
        npy.write_array_header_1_0(self._file, described)


def write_array(path: Path, values: np.ndarray) -> None:
    """Write a whole array."""
    np.save(path, values, allow_pickle=False)
    _write_digests(path)


class Column:
    """A memory-mapped array. `values` is unchecked; `read` and `whole` check the digests.

    Raises:
        OSError, ValueError: the file or its digests are missing, or have another size.
    """

    def __init__(self, path: Path) -> None:
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
        self._name, self._start = path.name, mapped.offset
        self.values: np.ndarray = np.asarray(mapped)  # slicing an ndarray takes a tenth of the time of a memmap
        self._content = np.memmap(path, np.uint8, "r")
        self._digests = np.memmap(_beside(path), _DIGEST, "r")
        blocks = -(-len(self._content) // BLOCK_BYTES)
        if len(self._digests) != blocks:
            what = f"{_beside(path).name} has digests of {len(self._digests)} blocks"
            raise ValueError(f"{what}, {self._name} has {blocks}")
        self._checked = bytearray(blocks)

    def __len__(self) -> int:
        return len(self.values)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return values[start:stop].

        Raises:
            ValueError: they differ from what was written.
        """
        size = self.values.itemsize
        self._check(self._start + start * size, self._start + stop * size)
        return self.values[start:stop]

    def whole(self) -> np.ndarray:
        """Return all values.

        Raises:
            ValueError: they differ from what was written.
        """
        self._check(0, len(self._content))
        return self.values

    def _check(self, begin: int, end: int) -> None:
        for block in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            if not self._checked[block]:
                content = self._content[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
                if xxhash.xxh3_64_intdigest(content.data) != int(self._digests[block]):
                    place = f"from byte {block * BLOCK_BYTES} on"
                    raise ValueError(f"{self._name} differs from what was written {place}: a disk or memory failed")
                self._checked[block] = 1


def _write_digests(path: Path) -> None:
    # Read, not mapped: all of a mapped file would count as memory of this process.
    with path.open("rb") as file:
        digests = [xxhash.xxh3_64_intdigest(block) for block in iter(partial(file.read, BLOCK_BYTES), b"")]
    np.array(digests, _DIGEST).tofile(_beside(path))


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}{_SUFFIX}")
