"""Atomic creation of folders: a lock between processes, a partial folder next to the final path, and a rename.

The name of a folder that one process owns includes its machine and process id, so that other processes can tell whether
it is abandoned. Locks cannot tell: file systems shared by machines may have none, or only local ones.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import psutil

REPORT_AFTER = 5.0  # seconds of waiting before the holder of the lock is reported
_POLL_SECONDS = 0.1
_MARK = ".megatune-partial-"
_ABANDONED_SECONDS = 24 * 3600.0  # without a change, for processes on other machines


@contextmanager
def locked(path: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock file, which is created and removed again; works between machines whose file system shares locks.

    The kernel releases it when its holder dies. On a file system without locks nothing is held: callers must work with
    two holders. `report` is called with the name of the holder if the lock has to be waited for.

    Raises:
        OSError: the file cannot be created.
    """
    file = _acquire(path, report)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # before it is released: the next holder then sees that this file is no longer the lock
        os.close(file)


def _acquire(path: Path, report: Callable[[str], None]) -> int:
    report_at = time.monotonic() + REPORT_AFTER
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_in_use(file, path):
                with suppress(OSError):  # a full disk: the holder's name is only for messages
                    os.ftruncate(file, 0)
                    os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return file
        except BlockingIOError:
            if time.monotonic() > report_at:
                report(os.pread(file, 200, 0).decode(errors="replace") or "another process")
                report_at = float("inf")
        except OSError:
            return file  # the file system has no locks
        except BaseException:
            os.close(file)
            raise
        os.close(file)
        time.sleep(_POLL_SECONDS)


def _is_in_use(file: int, path: Path) -> bool:
    """Return whether the open file is still the one at this path; its last holder may have removed it."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def owned_folder(parent: Path, name: str) -> Path:
    """Create a new, empty folder that `remove_abandoned` keeps while this process lives.

    Raises:
        OSError: it cannot be created.
    """
    folder = parent / f".{name}-{uuid4().hex[:8]}{_MARK}{_place()}-{os.getpid()}"
    folder.mkdir()
    return folder


@contextmanager
def partial_folder(folder: Path) -> Iterator[Path]:
    """Yield a new, empty folder next to `folder`; remove it at the end if it was not published.

    Raises:
        OSError: it cannot be created.
    """
    partial = owned_folder(folder.parent, folder.name)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def publish(partial: Path, folder: Path) -> None:
    """Sync a filled folder to disk and rename it to its final path, replacing what is there.

    If another process publishes the same folder concurrently without a lock, one of the two is kept.

    Raises:
        OSError: the file system fails.
    """
    for parent, _, names in os.walk(partial, topdown=False):
        for name in (*names, ""):
            _sync(Path(parent, name))
    if folder.exists():
        old = partial.with_name(f"{partial.name}-old")
        folder.rename(old)
        shutil.rmtree(old, ignore_errors=True)
    try:
        partial.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    _sync(folder.parent)


def remove_abandoned(parent: Path) -> None:
    """Remove the folders in `parent` whose process has ended; those of other machines after a day without a change."""
    for partial in parent.glob(f".*{_MARK}*"):
        place, _, process = partial.name.partition(_MARK)[2].removesuffix("-old").rpartition("-")
        if process.isdigit() and (_is_old(partial) if place != _place() else not psutil.pid_exists(int(process))):
            shutil.rmtree(partial, ignore_errors=True)


def _place() -> str:
    """Return where a process id is valid: the machine, and the PID namespace, as containers count from 1."""
    try:
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        namespace = "0"
    return f"{socket.gethostname()}-{namespace}"


def _is_old(partial: Path) -> bool:
    try:
        newest = max(path.stat().st_mtime for path in (partial, *partial.rglob("*")))
    except OSError:
        return False  # another process is moving or removing it
    return time.time() - newest > _ABANDONED_SECONDS


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some file systems have nothing to sync in a folder
            raise
    finally:
        os.close(file)
