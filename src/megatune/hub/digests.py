"""Digests of large files, remembered between runs: a file that has not changed is not read again."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

ALGORITHMS: dict[str, Callable[[], Any]] = {"xxh3_128": xxhash.xxh3_128, "sha256": hashlib.sha256}

_SETTLED_NS = 2_000_000_000  # a file may change again within the tick of its time stamp, and keep it


def cache_dir() -> Path:
    """Return what is kept between runs: $MEGATUNE_CACHE, else ~/.cache/megatune."""
    return Path(os.environ.get("MEGATUNE_CACHE") or "~/.cache/megatune").expanduser()


def remembered_digest(path: Path, folder: Path | None = None, algorithm: str = "xxh3_128") -> str:
    """Return the digest of a file's content, in hexadecimal.

    A file of the same place, size, times and inode as before is not read again.

    Args:
        folder: where digests are remembered, by default in the cache; one that cannot be written remembers nothing.
        algorithm: a key of ALGORITHMS.

    Raises:
        OSError: it cannot be read.
    """
    path = path.resolve()
    name = f"{xxhash.xxh3_128_hexdigest(os.fsencode(path))}.{algorithm}.json"
    note = (folder or cache_dir() / "digests") / name
    began = time.time_ns()
    identity = _identity(path)
    with suppress(OSError, ValueError, TypeError, KeyError):
        remembered = json.loads(note.read_text(encoding="utf-8"))
        if remembered["identity"] == identity:
            return str(remembered["digest"])
    digest = _content_digest(path, algorithm)
    if _identity(path) == identity and max(identity[1:3]) < began - _SETTLED_NS:
        with suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            partial = note.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps({"path": str(path), "identity": identity, "digest": digest}), "ascii")
            partial.replace(note)
    return digest


def _identity(path: Path) -> list[int]:
    """Return size, both times in nanoseconds, and inode: what changes when a file does."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _content_digest(path: Path, algorithm: str) -> str:
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, ALGORITHMS[algorithm]).hexdigest()
