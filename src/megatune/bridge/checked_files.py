"""Files that are read in ranges, and block digests that verify what is read of a checkpoint.

A run's safetensors files have a digest of every block of `BLOCK_BYTES` in `training/digests`. While a run resumes, each
block is compared with its digest when it is read: nothing is read twice, and every rank checks what it uses. Damaged
blocks are recorded, but still read, because other ranks wait for this one; `end_check` returns the problems.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

BLOCK_BYTES = 64 * 1024
_TRAINING = "training"


@dataclass(slots=True)
class ReadCheck:
    """The verification of a checkpoint's files while they are read.

    Attributes:
        problems: errors of files, by the file's name in the checkpoint.
        num_bytes: number of bytes read.
    """

    checkpoint: Path
    problems: dict[str, str] = field(default_factory=dict)
    num_bytes: int = 0


_check: ReadCheck | None = None


def begin_check(checkpoint: Path) -> None:
    """Compare what this process reads of a checkpoint with its digests, until `end_check`."""
    global _check
    _check = ReadCheck(checkpoint.resolve())


def end_check() -> ReadCheck | None:
    """Return the result since `begin_check`; None if no check was started."""
    global _check
    found, _check = _check, None
    return found


def digests_of(path: Path) -> Path:
    """Return the path of the digests of a checkpoint's file."""
    folder = path.parent if path.parent.name == _TRAINING else path.parent / _TRAINING
    return folder / "digests" / f"{path.name}.xxh3"


def block_digests(content: memoryview) -> Iterator[int]:
    """Yield the digests of consecutive blocks from the start of the content."""
    for start in range(0, len(content), BLOCK_BYTES):
        yield xxhash.xxh3_64_intdigest(content[start : start + BLOCK_BYTES])


class RangedFile:
    """A file that is read in ranges.

    Args:
        check: where to record the blocks; None uses the active check, if the file belongs to its checkpoint.

    Raises:
        OSError: the file does not exist.
    """

    def __init__(self, path: Path, check: ReadCheck | None = None) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        self._size = os.fstat(self._descriptor).st_size
        self._check, self._digests = check or _check, None
        self._last = (-1, torch.empty(0, dtype=torch.uint8))  # a range often starts in the block where the last ended
        if self._check is not None and self._check.checkpoint in path.resolve().parents:
            digests = digests_of(path)
            self._digests = np.fromfile(digests, dtype="<u8") if digests.is_file() else None

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def read(self, start: int, stop: int) -> Tensor:
        """Read bytes start..stop, uint8 [stop - start], into new memory.

        Raises:
            OSError: they cannot be read, or the file is shorter; if the file is checked, this is recorded instead.
        """
        if self._digests is None or self._check is None:
            content = torch.empty(stop - start, dtype=torch.uint8)
            self._fill(content, start)
            return content
        begin, end = start // BLOCK_BYTES * BLOCK_BYTES, min(-(-stop // BLOCK_BYTES) * BLOCK_BYTES, self._size)
        content = torch.zeros(max(end - begin, stop - begin), dtype=torch.uint8)
        known = 0
        if self._last[0] == begin:
            known = len(self._last[1])
            content[:known] = self._last[1]
        try:
            self._fill(content[known:], begin + known)
        except OSError as error:
            self._note(f"cannot be read: {error.strerror or error}")
        self._check.num_bytes += len(content) - known
        first = (begin + known) // BLOCK_BYTES
        found = list(block_digests(content[known:].numpy().data))
        if found != self._digests[first : first + len(found)].tolist():
            self._note("is damaged: its digest does not match")
        if len(content):
            tail = (len(content) - 1) // BLOCK_BYTES * BLOCK_BYTES
            self._last = begin + tail, content[tail:].clone()
        return content[start - begin : stop - begin]

    def _fill(self, content: Tensor, start: int) -> None:
        view, position = content.numpy().data, 0
        while position < len(view):
            count = os.preadv(self._descriptor, [view[position:]], start + position)
            if not count:
                raise OSError(f"it ends at byte {start + position}")
            position += count

    def _note(self, problem: str) -> None:
        assert self._check is not None
        name = self.path.resolve().relative_to(self._check.checkpoint).as_posix()
        self._check.problems.setdefault(name, f"{name} {problem}")
