"""Folders that are being filled beside the place they are for, and what is left of those whose process died."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MARK = ".megatune-partial-"
_ABANDONED_SECONDS = 24 * 3600.0  # without a change, of processes that cannot be looked for from here


@contextmanager
def partial_folder(folder: Path) -> Iterator[Path]:
    """A new, empty folder beside `folder`; what is left of it at the end is removed.

    Raises:
        OSError: it cannot be made.
    """
    partial = _beside(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def publish(partial: Path, folder: Path) -> None:
    """Make a filled folder durable and give it its name; what has the name is removed.

    Where another process, without a lock, publishes the same at the same time, one of the two folders stays.

    Raises:
        OSError: the file system refuses.
    """
    _sync(partial)
    if folder.exists():
        old = partial.with_name(f"{partial.name}-old")
        folder.rename(old)
        shutil.rmtree(old, ignore_errors=True)
    try:
        partial.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    _sync_one(folder.parent)


def remove_abandoned(parent: Path) -> None:
    """Remove the partial folders in `parent` that nobody fills any more."""
    for partial in parent.glob(f".*{_MARK}*"):
        place, _, process = partial.name.partition(_MARK)[2].removesuffix("-old").rpartition("-")
        if process.isdigit() and (_is_dead(int(process)) if place == _place() else _is_old(partial)):
            shutil.rmtree(partial, ignore_errors=True)


def _beside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}{_MARK}{_place()}-{os.getpid()}")


def _place() -> str:
    """Where a process number means this one: the machine and, as containers count from 1, the kernel's namespace."""
    try:
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        namespace = "0"
    return f"{socket.gethostname()}-{namespace}"


def _is_dead(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _is_old(partial: Path) -> bool:
    try:
        newest = max(path.stat().st_mtime for path in (partial, *partial.rglob("*")))
    except OSError:
        return False  # somebody moves or removes it just now
    return time.time() - newest > _ABANDONED_SECONDS


def _sync(folder: Path) -> None:
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            _sync_one(Path(parent, name))
        _sync_one(Path(parent))


def _sync_one(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some file systems have nothing to sync in a folder
            raise
    finally:
        os.close(file)
