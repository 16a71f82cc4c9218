"""Columns: files of values that are appended, then mapped by every process that reads them.

A column has digests of its blocks beside it, each compared with its block when that is first read. A digest of the
whole file would take a second for every few gigabytes before the first step; a block takes microseconds.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

BLOCK_BYTES = 2**16

_SUFFIX = ".xxh3"
_DIGEST = np.dtype("<u8")


class ColumnWriter:
    """Appends values to a new file."""

    def __init__(self, path: Path, dtype: npt.DTypeLike) -> None:
        self._path, self._dtype = path, np.dtype(dtype)
        self._file = path.open("xb")

    def append(self, values: npt.ArrayLike | bytes | memoryview) -> None:
        """Write values, converted to the column's type; bytes as they are."""
        is_raw = isinstance(values, bytes | memoryview)
        self._file.write(values if is_raw else np.asarray(values, dtype=self._dtype).tobytes())  # type: ignore[arg-type]

    def seal(self) -> None:
        """Write the digests of what was written so far."""
        self._file.flush()
        content = _mapped(self._path, np.dtype(np.uint8))
        starts = range(0, len(content), BLOCK_BYTES)
        digests = [xxhash.xxh3_64_intdigest(content[start : start + BLOCK_BYTES].data) for start in starts]
        _beside(self._path).write_bytes(np.array(digests, dtype=_DIGEST).tobytes())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Column:
    """The values of a file, memory-mapped: `values` unchecked, and `read` compared with the digests.

    Raises:
        OSError, ValueError: the file or its digests are not there, or of another size.
    """

    def __init__(self, path: Path, dtype: npt.DTypeLike) -> None:
        self.values = _mapped(path, np.dtype(dtype))
        self._name, self._content = path.name, self.values.view(np.uint8).reshape(-1)
        self._digests = _mapped(_beside(path), _DIGEST)
        blocks = -(-len(self._content) // BLOCK_BYTES)
        if len(self._digests) != blocks:
            what = f"{_beside(path).name} has digests of {len(self._digests)} blocks"
            raise ValueError(f"{what}, {self._name} has {blocks}")
        self._checked = bytearray(blocks)

    def __len__(self) -> int:
        return len(self.values)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the values between two places.

        Raises:
            ValueError: they differ from what was written.
        """
        size = self.values.itemsize
        for block in range(start * size // BLOCK_BYTES, -(-stop * size // BLOCK_BYTES)):
            if not self._checked[block]:
                content = self._content[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
                if xxhash.xxh3_64_intdigest(content.data) != int(self._digests[block]):
                    place = f"from byte {block * BLOCK_BYTES} on"
                    raise ValueError(f"{self._name} differs from what was written {place}: a disk or memory failed")
                self._checked[block] = 1
        return self.values[start:stop]


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    """Map a file; an empty one cannot be."""
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype=dtype)


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}{_SUFFIX}")
