"""Folders of prepared rows: each is built once and atomically, by any number of concurrent runs.

    CACHE/rows/KEY/...           what `build` wrote
    CACHE/rows/KEY/key.txt       the key of the rows
    CACHE/rows/KEY/made_of.json  what the key was computed from

A folder is filled under a temporary name next to its final path and renamed, under a lock. If the file system has no
locks, two runs build the same rows, and one of them is kept. A folder that cannot be read is rebuilt.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megatune.data.cache.files import locked, partial_folder, publish, remove_abandoned
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.hub.digests import cache_dir

if TYPE_CHECKING:
    from megatune.config.settings import Settings


KEY_FILE = "key.txt"
_MADE_OF_FILE = "made_of.json"
_DAMAGED = "damaged"  # the second word of key.txt

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CANNOT_WRITE = (*_FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EIO)


T = TypeVar("T")


def get_or_build(
    settings: Settings,
    key: str,
    build: Callable[[Path], None],
    read: Callable[[Path], T],
    made_of: Mapping[str, Any] | None = None,
) -> T:
    """Return the rows of this key: read them from their folder if it is complete and readable, else build them first.

    The folder is tokenized_path if that is set. Otherwise it is in the cache, or, if the cache is not writable, among
    this user's temporary files.

    Args:
        key: identifies everything that determines the rows.
        build: fills an empty folder.
        read: reads the folder; raises a MegatuneError if it is damaged.
        made_of: the parts and settings from which `key` was computed, with JSON values.

    Raises:
        MegatuneError: tokenized_path holds something else (exit code 64), nothing can be written (73), or `build` or
            `read` raises it.
    """
    data = settings.data
    if data.tokenized_path:
        folder = Path(data.tokenized_path).expanduser().absolute()
        locations = [_Location(folder, key, made_of or {}, named=True)]
    else:
        temporary = Path(os.environ.get("TMPDIR") or "/tmp") / f"megatune-{os.getuid()}"
        in_cache = _Location(cache_dir() / "rows" / key, key, made_of or {})
        locations = [in_cache, replace(in_cache, folder=temporary / "rows" / key, private=True)]
    failures: list[_CannotWriteError] = []
    for location in locations:
        if failures:
            _report(f"{failures[0]}; prepared rows are written to {location.folder}")
        try:
            return location.get_or_build(build, read)
        except _CannotWriteError as failure:
            failures.append(failure)
    fix = "name a writable folder as " + ("tokenized_path" if data.tokenized_path else "$MEGATUNE_CACHE")
    findings = [Finding("cannot write the prepared rows", str(f.folder), f.reason, fix) for f in failures]
    raise MegatuneError(findings, ExitCode.CANNOT_WRITE) from failures[-1]


def mark_damaged(folder: Path) -> None:
    """Mark a folder as damaged, if that can be written, so that the next `get_or_build` rebuilds it."""
    with suppress(OSError):
        _mark(folder)


def _mark(folder: Path) -> None:
    if (key := stored_key(folder)) is not None:
        (folder / KEY_FILE).write_text(f"{key}\n{_DAMAGED}\n", encoding="ascii")


def is_full(error: OSError) -> bool:
    """Return whether a disk or a quota is full; numpy reports it without an errno: 1024 requested and 0 written."""
    return error.errno in _FULL or (error.errno is None and str(error).endswith("written"))


def free_space(folder: Path, written: Path | None = None) -> str:
    """Describe the free space of a folder's disk, and how much of the failed write was completed."""
    free = _mib(shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.exists())).free)
    files = [] if written is None else [path for path in written.rglob("*") if path.is_file()]
    before = f"{_mib(sum(path.stat().st_size for path in files))} were written and more are needed, " if files else ""
    return f"{before}{free} are free"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


class _CannotWriteError(Exception):
    """Raised if nothing can be written to a folder."""

    def __init__(self, folder: Path, error: OSError, building: Path | None = None) -> None:
        self.folder, self.reason = folder, error.strerror or os.strerror(error.errno or errno.ENOSPC)
        if is_full(error):
            with suppress(OSError):  # the folder may be removed meanwhile
                self.reason += f": {free_space(folder, building)}"
        super().__init__(f"cannot write {folder}: {self.reason}")


@dataclass(frozen=True, slots=True)
class _Location:
    folder: Path
    key: str
    made_of: Mapping[str, Any]
    named: bool = False  # set by the user, so that the folder may hold something else
    private: bool = False  # in a folder that others can write to, so that its owner is checked

    def get_or_build(self, build: Callable[[Path], None], read: Callable[[Path], T]) -> T:
        """Return the rows in the folder, after building them if necessary; raise _CannotWriteError if that fails."""
        self._check_content()
        if (found := self._read(read)) is not None:
            return found
        with ExitStack() as stack:
            with _writing(self.folder):
                self._make_parent()
                waiting = f"waiting for {{}}, which prepares the same rows in {self.folder}"
                lock = self.folder.with_name(f".{self.folder.name}.lock")
                stack.enter_context(locked(lock, lambda holder: _report(waiting.format(holder))))
            self._check_content()
            if not self._is_complete():  # another run may have built it meanwhile
                self._build(build)
            return read(self.folder)

    def _is_complete(self) -> bool:
        return _stored(self.folder) == [self.key]

    def _read(self, read: Callable[[Path], T]) -> T | None:
        """Return the rows in the folder; None if they must be built or rebuilt."""
        from megatune.data.media_table import are_current  # imports numpy, which checks of settings avoid

        if stored_key(self.folder) is None or not self._is_trusted():
            return None
        line = f"the prepared rows in {self.folder} are damaged and are recreated"
        if self._is_complete():
            with suppress(MegatuneError):
                found = read(self.folder)
                if are_current(self.folder):
                    return found
                line = f"image or video files were removed or changed: the prepared rows in {self.folder} are recreated"
        _report(line)
        with _writing(self.folder):
            _mark(self.folder)
        return None

    def _build(self, build: Callable[[Path], None]) -> None:
        with ExitStack() as stack:
            with _writing(self.folder):
                remove_abandoned(self.folder.parent)
                partial = stack.enter_context(partial_folder(self.folder))
            with _writing(self.folder, building=partial):
                build(partial)
            with _writing(self.folder):
                (partial / KEY_FILE).write_text(f"{self.key}\n", encoding="ascii")
                (partial / _MADE_OF_FILE).write_text(json.dumps(self.made_of, indent=2), encoding="ascii")
                if not self._is_complete():  # without locks, another run may have built it
                    publish(partial, self.folder)

    def _check_content(self) -> None:
        """Reject a user's folder that holds something else, or rows of other data."""
        if not self.named:
            return
        stored = stored_key(self.folder)
        if stored is None and _holds_something(self.folder):
            what, why = "is not a folder of prepared rows", "megatune never replaces a folder that it did not create"
            fix = "name a new folder"
        elif stored not in (None, self.key):
            what = "has rows that were prepared from other data or settings, or by another version of megatune"
            why, fix = self._difference(), "name another folder, or delete this one to prepare its rows again"
        else:
            return
        raise MegatuneError(Finding(f"tokenized_path: {self.folder} {what}", "", why, fix), ExitCode.SETTINGS)

    def _difference(self) -> str:
        """Describe how the rows in the folder differ; "" if the folder does not state how they were made."""
        try:
            there: dict[str, Any] = json.loads((self.folder / _MADE_OF_FILE).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return ""
        here: dict[str, Any] = json.loads(json.dumps(self.made_of))
        differing = [name for name in {**there, **here} if there.get(name, self) != here.get(name, self)]
        return "; ".join(
            f"{name} is {json.dumps(here[name])}, but {json.dumps(there[name])} in the folder"
            if " " not in name and name in here and name in there
            else f"{name} differs"
            for name in differing
        )

    def _make_parent(self) -> None:
        """Create the parent folder; also raise OSError if others could have put rows there."""
        parent = self.folder.parent
        if self.private:
            parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_trusted():
                raise PermissionError(errno.EACCES, "the folder belongs to another user")
        parent.mkdir(parents=True, exist_ok=True)

    def _is_trusted(self) -> bool:
        status = self.folder.parent.parent.lstat() if self.private else None
        return status is None or (stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid())


@contextmanager
def _writing(folder: Path, building: Path | None = None) -> Iterator[None]:
    """Convert errors of the file system to _CannotWriteError; while `building`, which also reads other files, only
    failures to write into the folder that is built."""
    try:
        yield
    except OSError as error:
        if building is not None:
            elsewhere = error.filename is not None and not Path(os.fsdecode(error.filename)).is_relative_to(building)
            if not (error.errno is None and is_full(error)) and (elsewhere or error.errno not in _CANNOT_WRITE):
                raise
        raise _CannotWriteError(folder, error, building) from error


def stored_key(folder: Path) -> str | None:
    """Return the key of the rows in the folder; None if it has none."""
    return next(iter(_stored(folder)), None)


def _stored(folder: Path) -> list[str]:
    """Return the words of the folder's key.txt: the key, and _DAMAGED if the rows are damaged."""
    try:
        return (folder / KEY_FILE).read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return []


def _holds_something(path: Path) -> bool:
    """Return whether the path is a file, or a folder that is not empty or not readable."""
    try:
        return any(path.iterdir()) if path.is_dir() else path.exists()
    except OSError:
        return True


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
