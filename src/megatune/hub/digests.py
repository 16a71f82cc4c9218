"""Digests of files; those of large files are cached between runs: an unchanged file is not read again."""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

Algorithm: TypeAlias = Literal["xxh3_128", "sha256"]

_SETTLED_NS = 2_000_000_000  # a file may change again within the resolution of its time stamp


@dataclass(frozen=True, slots=True)
class FileDigest:
    """A file of a folder: relative path (with forward slashes), size in bytes, digest (32 hexadecimal digits)."""

    name: str
    size: int
    xxh3_128: str


def cache_dir() -> Path:
    """Return the cache folder: $MEGATUNE_CACHE, else ~/.cache/megatune."""
    return Path(os.environ.get("MEGATUNE_CACHE") or "~/.cache/megatune").expanduser()


def remembered_digest(path: Path, folder: Path | None = None, algorithm: Algorithm = "xxh3_128") -> str:
    """Return the digest of a file's content, in hexadecimal.

    A file with the same path, size, times and inode as before is not read again.

    Args:
        folder: of cached digests, by default in the cache; nothing is cached if it cannot be written.

    Raises:
        OSError: it cannot be read.
    """
    path = path.resolve()
    name = f"{hashlib.blake2b(os.fsencode(path), digest_size=16).hexdigest()}.{algorithm}.json"
    note = (folder or cache_dir() / "digests") / name
    began = time.time_ns()
    identity = _identity(path)
    with suppress(OSError, ValueError, TypeError, KeyError):
        remembered = json.loads(note.read_text(encoding="utf-8"))
        if remembered["identity"] == identity:
            return str(remembered["digest"])
    digest = _content_digest(path, algorithm)
    if _identity(path) == identity and max(identity[1:3]) < began - _SETTLED_NS:
        remember(note, json.dumps({"path": str(path), "identity": identity, "digest": digest}))
    return digest


def ends_digest(path: Path | bytes, num_bytes: int) -> str:
    """Return a digest of a file's size, and of this many bytes of its start and of its end: 64 hexadecimal digits.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(num_bytes)
        file.seek(max(0, size - num_bytes))
        return hashlib.sha256(b"%d\0" % size + start + file.read(num_bytes)).hexdigest()


def remember(note: Path, text: str) -> None:
    """Write a file atomically; do nothing if it cannot be written."""
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        partial = note.with_suffix(f".{os.getpid()}")
        partial.write_text(text, "ascii")
        partial.replace(note)


def _identity(path: Path) -> list[int]:
    """Return size, both times in nanoseconds, and inode, which change with the file."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _content_digest(path: Path, algorithm: Algorithm) -> str:
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, lambda: _state(algorithm)).hexdigest()


def _state(algorithm: Algorithm) -> Any:
    if algorithm == "sha256":
        return hashlib.sha256()
    import xxhash  # the environment of a rollout engine does not have it

    return xxhash.xxh3_128()
