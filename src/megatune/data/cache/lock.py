"""A lock between processes, also of different machines where their file system shares locks."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SAY_AFTER = 5.0  # seconds of waiting before a line says for whom
_POLL_SECONDS = 0.1


@contextmanager
def locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of this file, which is made for it and removed again.

    The kernel frees it when its holder dies, however that happens. On a file system without locks nothing is held:
    callers must bear to be two.

    Args:
        say: told who holds the lock, once it has been waited for.

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
                holder = os.pread(file, 200, 0).decode(errors="replace") or "another process"
                say(holder)
                said_at = float("inf")
        except OSError:
            return file  # no locks here
        except BaseException:
            os.close(file)
            raise
        os.close(file)
        time.sleep(_POLL_SECONDS)


def _is_in_use(file: int, path: Path) -> bool:
    """Whether the open file is still the one of this name; its last holder may have removed it."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
