"""Digests of files by their content, remembered, so that a file that has not changed is read once."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

import xxhash

_CHUNK_BYTES = 2**20
_SETTLED_NS = 2_000_000_000  # a file may change again within the tick of its time stamp, and keep it


class FileDigests:
    """Digests of files.

    Args:
        folder: where they are remembered; one that cannot be written remembers nothing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, path: Path) -> str:
        """128 bits of the file's content, in hexadecimal.

        A file of the same place, size, times and inode as before is not read again.

        Raises:
            OSError: it cannot be read.
        """
        path = path.resolve()
        note = self._folder / f"{xxhash.xxh3_128_hexdigest(os.fsencode(path))}.json"
        began = time.time_ns()
        identity = _identity(path)
        with suppress(OSError, ValueError, TypeError, KeyError):
            remembered = json.loads(note.read_text(encoding="utf-8"))
            if remembered["identity"] == identity:
                return str(remembered["digest"])
        digest = _digest(path)
        if _identity(path) == identity and max(identity[1:3]) < began - _SETTLED_NS:
            self._remember(note, {"path": str(path), "identity": identity, "digest": digest})
        return digest

    def _remember(self, note: Path, content: dict[str, object]) -> None:
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            partial = note.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(content, ensure_ascii=True), encoding="ascii")
            partial.replace(note)


def _identity(path: Path) -> list[int]:
    """Size, both times in nanoseconds, and inode: what changes when a file does."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _digest(path: Path) -> str:
    state = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            state.update(chunk)
    return state.hexdigest()
