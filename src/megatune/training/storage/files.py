"""Durable writes, and what a user is told when a disk refuses them."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatune.errors import ExitCode, Finding, MegatuneError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TORCH_SHORT_WRITE = "unexpected pos "  # all that torch.save says when the disk takes less than it was given


def sync(path: Path) -> None:
    """Force a file's content, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace `path` by `content`: a reader, or a crash, sees the old file or the new one, nothing between."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    sync(partial)
    os.replace(partial, path)
    sync(path.parent)


def ensure_room(path: Path, bytes_needed: int) -> None:
    """Refuse a write that the disk of `path` (which need not exist yet) has no room for.

    Raises:
        MegatuneError: CANNOT_WRITE.
    """
    with writing(path, bytes_needed):
        free = shutil.disk_usage(_existing(path)).free
        if bytes_needed > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def writing(path: Path, bytes_needed: int | None = None) -> Iterator[None]:
    """Turn an OSError of the block into a MegatuneError (CANNOT_WRITE) that names the target and its free room.

    Writers that wrap a full disk into an error of their own (safetensors, torch_dist) are understood too.

    Args:
        path: what the block writes, a file or a folder.
        bytes_needed: how much the block writes, where it is known.
    """
    try:
        yield
    except MegatuneError:
        raise
    except BaseException as error:  # torch.distributed.checkpoint's CheckpointException is no Exception
        cause = error if isinstance(error, OSError) else _full_disk(error)
        if cause is None:
            raise
        raise MegatuneError(_finding(path, cause, bytes_needed), ExitCode.CANNOT_WRITE) from error


def _full_disk(error: BaseException) -> OSError | None:
    """Return the OSError of a full disk that the text of another error tells of."""
    text = str(error)
    if _TORCH_SHORT_WRITE in text:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return next((OSError(code, os.strerror(code)) for code in _FULL if os.strerror(code) in text), None)


def _finding(path: Path, error: OSError, bytes_needed: int | None) -> Finding:
    why = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
    if error.errno not in _FULL:
        return Finding(f"cannot write {path}", why=why, fix="make it writable, or choose another output_dir")
    need = f"needs {amount(bytes_needed)}, " if bytes_needed is not None else ""
    try:
        room = f"{amount(shutil.disk_usage(_existing(path)).free)} free there"
    except OSError:
        room = "and it is not reachable"
    fix = "free some room, lower save_total_limit, or choose an output_dir on another disk"
    return Finding(f"no room to write {path}: {need}{room}", "", why, fix)


def _existing(path: Path) -> Path:
    """Return `path`, or the nearest folder above it that exists."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())


def amount(num_bytes: int) -> str:
    """1234567 -> "1.2 MB", in the decimal units that disks are sold in."""
    amount = float(num_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"
