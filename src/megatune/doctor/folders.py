"""Disks: what a run writes to, held against what it will write."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from megatune.doctor.check import Check, Verdict
from megatune.training.room import Room
from megatune.training.storage.files import amount, nearest_folder

_PROBE_BYTES = 64 * 2**20
_SLOW = 50 * 10**6  # bytes/s: a checkpoint of 100 GB takes more than half an hour
_LEAST_INODES = 10_000
_LEAST_TEMPORARY = 10**9


def folders(output_dir: Path, room: Room) -> Iterator[Check]:
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
        why = f"{error.strerror or error}"
        yield Check(
            "disk",
            str(folder),
            Verdict.FAIL,
            "cannot be written",
            why,
            "make it writable, or choose another output_dir",
        )
    yield _temporary()


def _room(folder: Path, room: Room) -> Check:
    free, name = f"{amount(shutil.disk_usage(folder).free)} free", f"room of {folder}"
    if not room.checkpoint:
        return Check("disk", name, Verdict.PASS, f"{free}; what a run writes is known with a settings file")
    if problem := room.problem(folder):
        return Check("disk", name, Verdict.FAIL, f"{free}, {room.words}", problem.why, problem.fix)
    return Check("disk", name, Verdict.PASS, f"{free}, {room.words}")


def _inodes(folder: Path) -> Check:
    state = os.statvfs(folder)
    if not state.f_files or state.f_favail >= _LEAST_INODES:  # some file systems count none
        return Check("disk", "files", Verdict.PASS, f"{state.f_favail} more" if state.f_files else "not counted")
    why = "a file system without free inodes is full, whatever room it has"
    return Check("disk", "files", Verdict.FAIL, f"{state.f_favail} more", why, "remove small files there")


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
    found = f"{rate / 1e6:,.0f} MB/s, written and synced"
    if rate >= _SLOW:
        return Check("disk", "writing", Verdict.PASS, found)
    why = f"a checkpoint of 100 GB takes {100e9 / rate / 60:.0f} min"
    return Check("disk", "writing", Verdict.WARN, found, why, "another disk, async_save: true, or fewer saves")


def _rename(folder: Path) -> Check:
    """Rename a folder onto a name, as a checkpoint becomes visible; and a file over another."""
    (folder / "new").mkdir()
    (folder / "new" / "file").write_text("new")
    (folder / "one").write_text("one")
    (folder / "two").write_text("two")
    try:
        os.rename(folder / "new", folder / "final")
        os.replace(folder / "two", folder / "one")
        whole = (folder / "final" / "file").read_text() == "new" and (folder / "one").read_text() == "two"
    except OSError as error:
        whole, text = False, f"{error.strerror}"
    else:
        text = "a renamed file has other content"
    if whole:
        return Check("disk", "renaming", Verdict.PASS, "a folder and a file take their final name at once")
    return Check(
        "disk",
        "renaming",
        Verdict.FAIL,
        text,
        "a checkpoint would be visible before it is whole",
        "another file system",
    )


def _temporary() -> Check:
    folder = Path(tempfile.gettempdir())
    free = 0
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(folder).free
    if free >= _LEAST_TEMPORARY:
        return Check("disk", f"temporary files ({folder})", Verdict.PASS, f"{amount(free)} free")
    why = "processes meet in files there, and data is prepared there"
    return Check(
        "disk", f"temporary files ({folder})", Verdict.WARN, f"{amount(free)} free", why, "TMPDIR on another disk"
    )
