"""One run at a time writes to an output_dir."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
from datetime import timedelta
from pathlib import Path

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.training.storage.files import writing

_logger = logging.getLogger(__name__)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class OutputLock:
    """An exclusive lock on `output_dir`, held from construction to `release` or the end of the process.

    The kernel holds it, so a run that was killed leaves none behind, and no guess is made about who is still alive.
    The file beside it only says who holds it.

    Raises:
        MegatuneError: CANNOT_WRITE, where another run holds it (named by process, host and age) or the folder cannot
            be written to.
    """

    def __init__(self, output_dir: Path) -> None:
        self._path = Path(output_dir) / ".megatune.lock"
        with writing(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._acquire()
            holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": time.time()})
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, holder.encode(), 0)
        # A forked data worker would otherwise keep the lock alive after a kill -9 of the process that took it.
        os.register_at_fork(after_in_child=self._close)

    def _acquire(self) -> int:
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 4096, 0)
                os.close(descriptor)
                raise MegatuneError(_held_by(self._path.parent, holder), ExitCode.CANNOT_WRITE) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    os.close(descriptor)
                    raise
                folder = self._path.parent
                _logger.warning("the file system of %s has no locks: another run could write to it too", folder)
                return descriptor
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(self._path)):
                    return descriptor
            os.close(descriptor)  # the run before released it, and removed the file, between the open and the lock

    def release(self) -> None:
        """Give the lock back; releasing twice does nothing."""
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> OutputLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def _held_by(output_dir: Path, holder: bytes) -> Finding:
    try:
        record = json.loads(holder)
        age = timedelta(seconds=max(0, round(time.time() - record["started"])))
        who = f"process {record['pid']} on host {record['host']}, started {age} ago"
    except (ValueError, KeyError, TypeError):  # it has the lock and has not written its name yet
        who = "a process that has just started"
    fix = "wait for that run or stop it, or choose another output_dir"
    return Finding(f"{output_dir} is being written to by another run: {who}", fix=fix)
