"""Atomic and durable writes of files and folders, error messages of failed writes, files of JSON lines, and the lock of
an output_dir."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.progress import amount
from megatune.references import ref, write

_logger = logging.getLogger(__name__)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TORCH_SHORT_WRITE = "unexpected pos "  # the only text in torch.save's error when the disk is full


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the content of `path` atomically: readers see the old or the new file, also after a crash.

    Bytes of a name that are not UTF-8 are written as in JSON: \\udcff.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
    sync(partial)
    os.replace(partial, path)
    sync(path.parent)


def ensure_disk_space(path: Path, bytes_needed: int) -> None:
    """Check that the disk of `path`, which need not exist yet, has enough free space.

    Raises:
        MegatuneError: CANNOT_WRITE.
    """
    with writing(path, bytes_needed):
        free = shutil.disk_usage(nearest_folder(path)).free
        if bytes_needed > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def writing(path: Path, bytes_needed: int | None = None) -> Iterator[None]:
    """Convert an OSError of the block into a MegatuneError (CANNOT_WRITE) with the target and its free space.

    Errors with which safetensors and torch_dist report a full disk are converted, too.

    Args:
        path: the file or folder that the block writes.
        bytes_needed: the number of bytes that the block writes, if known.
    """
    try:
        yield
    except MegatuneError:
        raise
    except BaseException as error:  # torch.distributed.checkpoint's CheckpointException is not an Exception
        cause = error if isinstance(error, OSError) else _full_disk(error)
        if cause is None:
            raise
        raise MegatuneError(_finding(path, cause, bytes_needed), ExitCode.CANNOT_WRITE) from error


def _full_disk(error: BaseException) -> OSError | None:
    """Return an OSError if the text of another error reports a full disk."""
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
        room = f"{amount(shutil.disk_usage(nearest_folder(path)).free)} free there"
    except OSError:
        room = "and it is not reachable"
    fix = "free some room, keep fewer checkpoints, or choose an output_dir on another disk"
    if error.errno == errno.EFBIG:
        fix = "raise the limit on the size of a file (ulimit -f), or choose an output_dir whose file system allows it"
    return Finding(f"no room to write {path}: {need}{room}", "", why, fix)


def nearest_folder(path: Path) -> Path:
    """Return `path` or its nearest parent that is a folder."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())


class OutputLock(contextlib.AbstractContextManager["OutputLock"]):
    """An exclusive lock on `output_dir`, held from construction to `release` or the end of the process.

    It is a kernel lock, so that a killed run releases it. The content of the file only names the holder.

    Raises:
        MegatuneError: CANNOT_WRITE, if another run holds it (named by process, host and age) or the folder cannot be
            written to.
    """

    def __init__(self, output_dir: Path) -> None:
        self._path = Path(output_dir) / ".megatune.lock"
        with writing(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._acquire()
            holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": time.time()})
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, holder.encode(), 0)
        # Otherwise a forked data worker would keep the lock after a kill -9 of its parent.
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
            os.close(descriptor)  # an earlier run removed the file between the open and the lock

    def release(self) -> None:
        """Release the lock. A second call has no effect."""
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __exit__(self, *error: object) -> None:
        self.release()


def _held_by(output_dir: Path, holder: bytes) -> Finding:
    try:
        record = json.loads(holder)
        age = timedelta(seconds=max(0, round(time.time() - record["started"])))
        who = f"process {record['pid']} on host {record['host']}, started {age} ago"
    except (ValueError, KeyError, TypeError):  # the holder has not written the file yet
        who = "a process that has just started"
    fix = "wait for that run or stop it, or choose another output_dir"
    return Finding(f"{output_dir} is being written to by another run: {who}", fix=fix)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the records of a file, or [] if it does not exist. Incomplete lines are skipped."""
    if not path.exists():
        return []
    records = []
    # `splitlines` would also split at U+2028 and the like, which JSON does not escape.
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                records.append(record)
    return records


def keep_json_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Remove the other records from a file, if it exists, and an incomplete last line, which would spoil the next."""
    if path.exists():
        write_atomically(path, "".join(json_line(record) for record in read_json_lines(path) if keep(record)))


def json_line(record: Mapping[str, Any]) -> str:
    """Return a record as a line. Numbers that are not finite become null."""
    not_finite = {key: None for key, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
    return json.dumps({**record, **not_finite}, ensure_ascii=False, allow_nan=False) + "\n"


@contextmanager
def new_folder(target: Path, num_bytes: int) -> Iterator[Path]:
    """Yield an empty folder that replaces `target` at the end, or is deleted if the block fails.

    Raises:
        MegatuneError: CANNOT_WRITE.
    """
    ensure_disk_space(target, num_bytes)
    partial, replaced = (target.with_name(f".{target.name}.{state}") for state in ("partial", "replaced"))
    with writing(target, num_bytes):
        for folder in (partial, replaced):
            shutil.rmtree(folder, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            yield partial
        except Exception:  # of a damaged source, which may be found late
            shutil.rmtree(partial, ignore_errors=True)
            raise
        for path in partial.rglob("*"):
            sync(path)
        sync(partial)
        if target.exists():
            os.rename(target, replaced)
        os.rename(partial, target)
        sync(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)


def check_target(target: Path, sources: Sequence[Path], overwrite: bool) -> None:
    """Check that the target is neither a source nor the working directory, and is empty or may be overwritten."""
    resolved = target.resolve()
    for source in sources:
        if resolved == source.resolve() or resolved in source.resolve().parents:
            why = f"{source} is read from there"
            finding = Finding(f"{target} cannot be written", ref("export_dir"), why, "choose another folder")
            raise MegatuneError(finding, ExitCode.CANNOT_WRITE)
    here = Path.cwd()
    if resolved == here or resolved in here.parents:
        why = "the folder that this command runs in would be replaced"
        finding = Finding(f"{target} cannot be written", ref("export_dir"), why, "choose another folder")
        raise MegatuneError(finding, ExitCode.CANNOT_WRITE)
    if target.is_file():
        finding = Finding(f"{target} is a file", ref("export_dir"), "", "name a folder")
        raise MegatuneError(finding, ExitCode.CANNOT_WRITE)
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        fix = f"choose another folder, or {write('overwrite_output_dir', True)}, which deletes what is in it"
        finding = Finding(f"{target} is not empty", ref("export_dir"), "", fix)
        raise MegatuneError(finding, ExitCode.CANNOT_WRITE)
