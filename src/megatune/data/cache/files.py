"""How a folder comes into being whole: a lock between processes, a partial folder beside its place, and a rename.

A folder that one process owns has the name of its machine and its number in its own name, so that another process can
tell whether it is abandoned. A lock cannot tell: file systems shared by machines may have none, or keep them local.
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

SAY_AFTER = 5.0  # seconds of waiting before a line says for whom
_POLL_SECONDS = 0.1
_MARK = ".megatune-partial-"
_ABANDONED_SECONDS = 24 * 3600.0  # without a change, of processes that cannot be looked for from here


@contextmanager
def locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of this file, which is made for it and removed again; between machines, too, that share locks.

    The kernel frees it when its holder dies, however that happens. On a file system without locks nothing is held:
    callers must work when there are two of them. `say` gets the name of who holds the lock that is waited for.

    Raises:
        OSError: the file cannot be made.
    """
    file = _acquire(path, say)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # before it is freed: whoever gets it then sees that it is no longer the one in use
        os.close(file)


def _acquire(path: Path, say: Callable[[str], None]) -> int:
    said_at = time.monotonic() + SAY_AFTER
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_in_use(file, path):
                with suppress(OSError):  # a full disk: the name is for waiting processes to show only
                    os.ftruncate(file, 0)
                    os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return file
        except BlockingIOError:
            if time.monotonic() > said_at:
                say(os.pread(file, 200, 0).decode(errors="replace") or "another process")
                said_at = float("inf")
        except OSError:
            return file  # no locks here
        except BaseException:
            os.close(file)
            raise
        os.close(file)
        time.sleep(_POLL_SECONDS)


def _is_in_use(file: int, path: Path) -> bool:
    """Return whether the open file is still the one of this name; its last holder may have removed it."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def owned_folder(parent: Path, name: str) -> Path:
    """Make a new, empty folder that `remove_abandoned` leaves alone while this process lives.

    Raises:
        OSError: it cannot be made.
    """
    folder = parent / f".{name}-{uuid4().hex[:8]}{_MARK}{_place()}-{os.getpid()}"
    folder.mkdir()
    return folder


@contextmanager
def partial_folder(folder: Path) -> Iterator[Path]:
    """Yield a new, empty folder beside `folder`; what is left of it at the end is removed.

    Raises:
        OSError: it cannot be made.
    """
    partial = owned_folder(folder.parent, folder.name)
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
    """Remove the folders in `parent` whose process is gone; those of other machines after a day without a change."""
    for partial in parent.glob(f".*{_MARK}*"):
        place, _, process = partial.name.partition(_MARK)[2].removesuffix("-old").rpartition("-")
        if process.isdigit() and (_is_old(partial) if place != _place() else not psutil.pid_exists(int(process))):
            shutil.rmtree(partial, ignore_errors=True)


def _place() -> str:
    """Return where a process number means this one: the machine and, as containers count from 1, the namespace."""
    try:
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        namespace = "0"
    return f"{socket.gethostname()}-{namespace}"


def _is_old(partial: Path) -> bool:
    try:
        newest = max(path.stat().st_mtime for path in (partial, *partial.rglob("*")))
    except OSError:
        return False  # another process moves or removes it just now
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
