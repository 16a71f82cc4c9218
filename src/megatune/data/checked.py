"""Digests of the blocks of a large file, each held against its block when that is first read.

A whole file would take a second for every few gigabytes before the first step; a block takes microseconds.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash

BLOCK_BYTES = 2**16

_SUFFIX = ".xxh3"
_DIGEST = np.dtype("<u8")


def write_digests(path: Path) -> None:
    """Write the digest of every block of a file beside it."""
    content = map_file(path, np.dtype(np.uint8))
    starts = range(0, len(content), BLOCK_BYTES)
    digests = [xxhash.xxh3_64_intdigest(content[start : start + BLOCK_BYTES].data) for start in starts]
    _beside(path).write_bytes(np.array(digests, dtype=_DIGEST).tobytes())


class CheckedFile:
    """Tells whether what is read of a file is what was written; True of one that has no digests.

    Raises:
        OSError, ValueError: the digests are not there, or are those of a file of another size.
    """

    def __init__(self, path: Path) -> None:
        self._content = map_file(path, np.dtype(np.uint8))
        digests = _beside(path)
        self._digests = map_file(digests, _DIGEST) if digests.exists() else None
        blocks = -(-len(self._content) // BLOCK_BYTES)
        if self._digests is not None and len(self._digests) != blocks:
            raise ValueError(f"{digests.name} has digests of {len(self._digests)} blocks, {path.name} has {blocks}")
        self._checked = bytearray(blocks)

    def damaged(self, start: int, stop: int) -> int | None:
        """Return where the first block between two bytes begins that is not as it was written; None if all are."""
        if self._digests is None:
            return None
        for block in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            if not self._checked[block]:
                content = self._content[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
                if xxhash.xxh3_64_intdigest(content.data) != int(self._digests[block]):
                    return block * BLOCK_BYTES
                self._checked[block] = 1
        return None


def map_file(path: Path, dtype: np.dtype) -> np.ndarray:
    """Map a file; an empty one cannot be."""
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype=dtype)


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}{_SUFFIX}")
