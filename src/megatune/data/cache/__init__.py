"""Folders of prepared rows: made once, whole or not there, by as many runs as want them at the same time.

    CACHE/rows/KEY/...           what `build` wrote
    CACHE/rows/KEY/key.txt       of what the rows were made, as one name
    CACHE/rows/KEY/made_of.json  the same in words

A folder is filled beside its place and renamed, under a lock. Where a file system has no locks two runs build the same
rows, and the rename decides. One that cannot be read, as a file of it is damaged or cut short, is made again.
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
_DAMAGED = "damaged"  # the second word of a key.txt

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CANNOT_WRITE = (*_FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EIO)


T = TypeVar("T")


def built(
    settings: Settings,
    key: str,
    build: Callable[[Path], None],
    read: Callable[[Path], T],
    made_of: Mapping[str, Any] | None = None,
) -> T:
    """Return what is read of the folder with the rows of this key: as it is where it can be read, else made.

    It is tokenized_path where that is set. Else it is in the cache; where that cannot be written, among this user's
    temporary files.

    Args:
        key: names all that determines the rows.
        build: fills an empty folder.
        read: raises a MegatuneError where the folder is damaged.
        made_of: what `key` names, each part or setting with a value that JSON can hold.

    Raises:
        MegatuneError: tokenized_path holds something else (exit code 64), nothing can be written (73), or what
            `build` and then `read` raise.
    """
    data = settings.data
    if data.tokenized_path:
        folder = Path(data.tokenized_path).expanduser().absolute()
        places = [_Place(folder, key, made_of or {}, named=True)]
    else:
        temporary = Path(os.environ.get("TMPDIR") or "/tmp") / f"megatune-{os.getuid()}"
        in_cache = _Place(cache_dir() / "rows" / key, key, made_of or {})
        places = [in_cache, replace(in_cache, folder=temporary / "rows" / key, private=True)]
    failures: list[_CannotWriteError] = []
    for place in places:
        if failures:
            _say(f"{failures[0]}; prepared rows are written to {place.folder}")
        try:
            return place.opened(build, read)
        except _CannotWriteError as failure:
            failures.append(failure)
    fix = "name a writable folder as " + ("tokenized_path" if data.tokenized_path else "$MEGATUNE_CACHE")
    findings = [Finding("cannot write the prepared rows", str(f.folder), f.reason, fix) for f in failures]
    raise MegatuneError(findings, ExitCode.CANNOT_WRITE) from failures[-1]


def mark_damaged(folder: Path) -> None:
    """Let the next `built` make a folder again whose content is not what was written, as far as that can be noted."""
    with suppress(OSError):
        _mark(folder)


def _mark(folder: Path) -> None:
    if (key := stored_key(folder)) is not None:
        (folder / KEY_FILE).write_text(f"{key}\n{_DAMAGED}\n", encoding="ascii")


def is_full(error: OSError) -> bool:
    """Tell whether a disk, or a quota of it, is full; numpy says so without a number: 1024 requested and 0 written."""
    return error.errno in _FULL or (error.errno is None and str(error).endswith("written"))


def room_left(folder: Path, written: Path | None = None) -> str:
    """Say how much is free where a folder is, and how much of what did not fit was written before that."""
    free = _mib(shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.exists())).free)
    files = [] if written is None else [path for path in written.rglob("*") if path.is_file()]
    before = f"{_mib(sum(path.stat().st_size for path in files))} were written and more are needed, " if files else ""
    return f"{before}{free} are free"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


class _CannotWriteError(Exception):
    """Nothing can be written at a place."""

    def __init__(self, folder: Path, error: OSError, building: Path | None = None) -> None:
        self.folder, self.reason = folder, error.strerror or os.strerror(error.errno or errno.ENOSPC)
        if is_full(error):
            with suppress(OSError):  # the folder goes while it is looked at
                self.reason += f": {room_left(folder, building)}"
        super().__init__(f"cannot write {folder}: {self.reason}")


@dataclass(frozen=True, slots=True)
class _Place:
    folder: Path
    key: str
    made_of: Mapping[str, Any]
    named: bool = False  # by the user, who may have something else in it
    private: bool = False  # in a folder that others can write to, so that its owner counts

    def opened(self, build: Callable[[Path], None], read: Callable[[Path], T]) -> T:
        """Return what is read of the folder; raise _CannotWriteError where it is not there and cannot be made."""
        self._check_content()
        if (found := self._read(read)) is not None:
            return found
        with ExitStack() as stack:
            with _writing(self.folder):
                self._make_parent()
                waiting = f"waiting for {{}}, which prepares the same rows in {self.folder}"
                lock = self.folder.with_name(f".{self.folder.name}.lock")
                stack.enter_context(locked(lock, lambda holder: _say(waiting.format(holder))))
            self._check_content()
            if not self._is_made():  # another run may have made it meanwhile
                self._make(build)
            return read(self.folder)

    def _is_made(self) -> bool:
        return _stored(self.folder) == [self.key]

    def _read(self, read: Callable[[Path], T]) -> T | None:
        """Return what is read of the folder; None where it is to be made, or made again."""
        from megatune.data.pictures import are_current  # imports numpy, which checks of settings do without

        if stored_key(self.folder) is None or not self._is_trusted():
            return None
        line = f"the prepared rows in {self.folder} are damaged and are recreated"
        if self._is_made():
            with suppress(MegatuneError):
                found = read(self.folder)
                if are_current(self.folder):
                    return found
                line = f"image or video files were removed or changed: the prepared rows in {self.folder} are recreated"
        _say(line)
        with _writing(self.folder):
            _mark(self.folder)
        return None

    def _make(self, build: Callable[[Path], None]) -> None:
        with ExitStack() as stack:
            with _writing(self.folder):
                remove_abandoned(self.folder.parent)
                partial = stack.enter_context(partial_folder(self.folder))
            with _writing(self.folder, building=partial):
                build(partial)
            with _writing(self.folder):
                (partial / KEY_FILE).write_text(f"{self.key}\n", encoding="ascii")
                (partial / _MADE_OF_FILE).write_text(json.dumps(self.made_of, indent=2), encoding="ascii")
                if not self._is_made():  # where there are no locks, it may be
                    publish(partial, self.folder)

    def _check_content(self) -> None:
        """Refuse a folder of the user's with something else in it, and rows of other data."""
        if not self.named:
            return
        stored = stored_key(self.folder)
        if stored is None and _holds_something(self.folder):
            what, why = "is not a folder of prepared rows", "megatune never replaces a folder that it did not make"
            fix = "name a new folder"
        elif stored not in (None, self.key):
            what = "has rows that were prepared from other data or settings, or by another version of megatune"
            why, fix = self._difference(), "name another folder, or delete this one to prepare its rows again"
        else:
            return
        raise MegatuneError(Finding(f"tokenized_path: {self.folder} {what}", "", why, fix), ExitCode.SETTINGS)

    def _difference(self) -> str:
        """Say what else the rows in the folder were made of; "" where it does not tell."""
        try:
            there: dict[str, Any] = json.loads((self.folder / _MADE_OF_FILE).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return ""
        here: dict[str, Any] = json.loads(json.dumps(self.made_of))
        differing = [name for name in {**there, **here} if there.get(name, self) != here.get(name, self)]
        return "; ".join(
            f"{name} is {json.dumps(here[name])}, and {json.dumps(there[name])} there"
            if " " not in name and name in here and name in there
            else f"{name} differs"
            for name in differing
        )

    def _make_parent(self) -> None:
        """Raise OSError, also where others could have put rows there."""
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
    """Turn what the file system refuses into a _CannotWriteError; of what reads files, too, only failures to write into
    the folder that it is `building`."""
    try:
        yield
    except OSError as error:
        if building is not None:
            elsewhere = error.filename is not None and not Path(os.fsdecode(error.filename)).is_relative_to(building)
            if not (error.errno is None and is_full(error)) and (elsewhere or error.errno not in _CANNOT_WRITE):
                raise
        raise _CannotWriteError(folder, error, building) from error


def stored_key(folder: Path) -> str | None:
    """Return of what the rows in the folder were made; None where it does not say."""
    return next(iter(_stored(folder)), None)


def _stored(folder: Path) -> list[str]:
    """Return of what the rows in the folder were made, and _DAMAGED if they are."""
    try:
        return (folder / KEY_FILE).read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return []


def _holds_something(path: Path) -> bool:
    """Return whether it is a file, or a folder that is not empty, or is closed to us."""
    try:
        return any(path.iterdir()) if path.is_dir() else path.exists()
    except OSError:
        return True


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
