"""Checks of disks: the folders that a run writes to, and the space that it needs."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from megatune.doctor.check import Check, Verdict, check
from megatune.progress import amount
from megatune.training.checks import DiskSpace
from megatune.training.storage.files import nearest_folder

_PROBE_BYTES = 64 * 2**20
_SLOW = 50 * 10**6  # bytes/s: a checkpoint of 100 GB takes more than half an hour
_LEAST_INODES = 10_000
_LEAST_TEMPORARY = 10**9
_check = partial(check, "disk")


def folders(output_dir: Path, room: DiskSpace) -> Iterator[Check]:
    """Check the folder of a run and the one for temporary files.

    Args:
        room: space for the checkpoints of a run.
    """
    folder = nearest_folder(output_dir)
    try:
        # In the nearest existing folder, so that a check creates no folders.
        with tempfile.TemporaryDirectory(prefix=".megatune-doctor-", dir=folder) as name:
            yield _room(folder, room)
            yield _inodes(folder)
            yield _speed(Path(name))
            yield _rename(Path(name))
    except OSError as error:
        fix = "make it writable, or choose another output_dir"
        yield _check(str(folder), "not writable", False, f"{error.strerror or error}", fix)
    temporary, free = Path(tempfile.gettempdir()), 0
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(temporary).free
    name, passes = f"temporary files ({temporary})", free >= _LEAST_TEMPORARY
    why = "rendezvous files and prepared data are written there"
    yield _check(name, f"{amount(free)} free", passes, why, "set TMPDIR to another disk", Verdict.WARN)


def _room(folder: Path, room: DiskSpace) -> Check:
    free, name = f"{amount(shutil.disk_usage(folder).free)} free", f"room of {folder}"
    if not room.checkpoint:
        return _check(name, f"{free}; add a settings file to check the space for checkpoints")
    problem = room.problem(folder)
    why, fix = (problem.why, problem.fix) if problem else ("", "")
    return _check(name, f"{free}, {room.words}", not problem, why, fix)


def _inodes(folder: Path) -> Check:
    state = os.statvfs(folder)
    found = f"{state.f_favail} more" if state.f_files else "not counted"  # by some file systems
    why = "without free inodes a file system is full, even with free space"
    passes = not state.f_files or state.f_favail >= _LEAST_INODES
    return _check("files", found, passes, why, "remove small files")


def _speed(folder: Path) -> Check:
    """Measure writing and syncing, like a checkpoint."""
    block = os.urandom(2**20)  # random, because file systems may compress
    began = time.perf_counter()
    with (folder / "speed").open("wb") as file:
        for _ in range(_PROBE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    rate = _PROBE_BYTES / (time.perf_counter() - began)
    found, why = f"{rate / 1e6:,.0f} MB/s, synced", f"a checkpoint of 100 GB takes {100e9 / rate / 60:.0f} min"
    fix = "use another disk, async_save: true, or fewer saves"
    return _check("writing", found, rate >= _SLOW, why, fix, Verdict.WARN)


def _rename(folder: Path) -> Check:
    """Check that a folder can be renamed, like a finished checkpoint, and that a file can replace another."""
    (folder / "new").mkdir()
    for name in ("new/file", "one", "two"):
        (folder / name).write_text(name)
    found = "folders and files are renamed atomically"
    try:
        os.rename(folder / "new", folder / "final")
        os.replace(folder / "two", folder / "one")
        whole = (folder / "final" / "file").read_text() == "new/file" and (folder / "one").read_text() == "two"
        found = found if whole else "a renamed file has other content"
    except OSError as error:
        whole, found = False, f"{error.strerror}"
    why, fix = "a checkpoint would be visible before it is complete", "use another file system"
    return _check("renaming", found, whole, why, fix)
