"""Disks: the folders that a run writes to, compared with what it will write."""

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
        room: that the checkpoints of a run need.
    """
    folder = nearest_folder(output_dir)
    try:
        # In the nearest folder that is there: a check leaves nothing behind.
        with tempfile.TemporaryDirectory(prefix=".megatune-doctor-", dir=folder) as name:
            yield _room(folder, room)
            yield _inodes(folder)
            yield _speed(Path(name))
            yield _rename(Path(name))
    except OSError as error:
        fix = "make it writable, or choose another output_dir"
        yield _check(str(folder), "cannot be written", False, f"{error.strerror or error}", fix)
    temporary, free = Path(tempfile.gettempdir()), 0
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(temporary).free
    name, passes = f"temporary files ({temporary})", free >= _LEAST_TEMPORARY
    why = "processes meet in files there, and data is prepared there"
    yield _check(name, f"{amount(free)} free", passes, why, "TMPDIR on another disk", Verdict.WARN)


def _room(folder: Path, room: DiskSpace) -> Check:
    free, name = f"{amount(shutil.disk_usage(folder).free)} free", f"room of {folder}"
    if not room.checkpoint:
        return _check(name, f"{free}; what a run writes is known with a settings file")
    problem = room.problem(folder)
    why, fix = (problem.why, problem.fix) if problem else ("", "")
    return _check(name, f"{free}, {room.words}", not problem, why, fix)


def _inodes(folder: Path) -> Check:
    state = os.statvfs(folder)
    found = f"{state.f_favail} more" if state.f_files else "not counted"  # some file systems count none
    why = "a file system without free inodes is full, whatever room it has"
    passes = not state.f_files or state.f_favail >= _LEAST_INODES
    return _check("files", found, passes, why, "remove small files there")


def _speed(folder: Path) -> Check:
    """Write and sync as a checkpoint is written."""
    block = os.urandom(2**20)  # file systems may compress
    began = time.perf_counter()
    with (folder / "speed").open("wb") as file:
        for _ in range(_PROBE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    rate = _PROBE_BYTES / (time.perf_counter() - began)
    found, why = (
        f"{rate / 1e6:,.0f} MB/s, written and synced",
        f"a checkpoint of 100 GB takes {100e9 / rate / 60:.0f} min",
    )
    return _check("writing", found, rate >= _SLOW, why, "another disk, async_save: true, or fewer saves", Verdict.WARN)


def _rename(folder: Path) -> Check:
    """Rename a folder onto a name, as a checkpoint becomes visible; and a file over another."""
    (folder / "new").mkdir()
    for name in ("new/file", "one", "two"):
        (folder / name).write_text(name)
    found = "a folder and a file take their final name at once"
    try:
        os.rename(folder / "new", folder / "final")
        os.replace(folder / "two", folder / "one")
        whole = (folder / "final" / "file").read_text() == "new/file" and (folder / "one").read_text() == "two"
        found = found if whole else "a renamed file has other content"
    except OSError as error:
        whole, found = False, f"{error.strerror}"
    return _check("renaming", found, whole, "a checkpoint would be visible before it is whole", "another file system")
