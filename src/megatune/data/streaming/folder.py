"""The folder that the producer of a machine and its ranks share.

    FOLDER/block-NUMBER-FIRST-ROWS/  a whole block, with rows FIRST to FIRST + ROWS - 1 of the run
    FOLDER/ready.json                what was made before the first block
    FOLDER/reached-NUMBER            somebody has come to this block
    FOLDER/doing.json                what the producer does, in words
    FOLDER/failure.json              why the producer ended
    FOLDER/alive                     is locked by the producer as long as it lives

The listing is the index: no file is read to find a row's block. Everything comes into being by a rename.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatune.errors import ExitCode, Finding, MegatuneError

_BLOCK = re.compile(r"block-(\d+)-(\d+)-(\d+)")
_REACHED = re.compile(r"reached-(\d+)")
_ABANDONED_SECONDS = 3600.0  # of a folder that its run had no time to lock

ALIVE_FILE = "alive"
READY_NOTE = "ready.json"
_DOING_NOTE = "doing.json"
_FAILURE_NOTE = "failure.json"


@dataclass(frozen=True, slots=True, order=True)
class BlockPlace:
    """Where a block is, and which rows of the run it holds."""

    number: int
    first_row: int
    rows: int
    folder: Path

    @property
    def end(self) -> int:
        """The first row behind it."""
        return self.first_row + self.rows


@dataclass(frozen=True, slots=True)
class StreamFolder:
    """The folder; picklable, so that loader processes can have it."""

    path: Path

    @classmethod
    def make(cls, parent: Path, name: str) -> StreamFolder:
        """A new one, in the cache or, where that cannot be written, among the temporary files.

        Raises:
            MegatuneError: neither can be written (exit code 73).
        """
        try:
            parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(parent)
            return cls(Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent)))
        except OSError as error:
            try:
                return cls(Path(tempfile.mkdtemp(prefix=f"megatune-stream-{name}-")))
            except OSError:
                finding = Finding("cannot write what is read ahead", str(parent), error.strerror or str(error))
                raise MegatuneError(finding, ExitCode.CANNOT_WRITE) from error

    def remove(self) -> None:
        """All of it, as far as it can be."""
        shutil.rmtree(self.path, ignore_errors=True)

    # Blocks

    def blocks(self) -> list[BlockPlace]:
        """Those that are there, by number."""
        matches = filter(None, map(_BLOCK.fullmatch, os.listdir(self.path)))
        return sorted(
            BlockPlace(int(match[1]), int(match[2]), int(match[3]), self.path / match.string) for match in matches
        )

    def block(self, number: int) -> Path:
        """The folder of a block that is there."""
        return next(block.folder for block in self.blocks() if block.number == number)

    @contextmanager
    def draft(self) -> Iterator[Path]:
        """An empty folder to write a block into; what is left of it at the end is removed."""
        path = Path(tempfile.mkdtemp(prefix="draft-", dir=self.path))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def publish(self, draft: Path, number: int, first_row: int, rows: int) -> None:
        """Give a written block its place."""
        draft.rename(self.path / f"block-{number:08}-{first_row:012}-{rows}")

    def release(self, row: int) -> None:
        """Delete the blocks that end before this row."""
        for block in self.blocks():
            if block.end > row:
                return
            shutil.rmtree(block.folder, ignore_errors=True)
            for name in self._reached_names():
                if _number(name) <= block.number:
                    (self.path / name).unlink(missing_ok=True)

    # Notes

    def reach(self, number: int) -> None:
        """Note that somebody has come to this block, which may be still to come."""
        (self.path / f"reached-{number:08}").touch()

    def reached(self) -> int:
        """The last block that somebody has come to; -1 before the first."""
        return max(map(_number, self._reached_names()), default=-1)

    def _reached_names(self) -> list[str]:
        return [name for name in os.listdir(self.path) if _REACHED.fullmatch(name)]

    def note(self, name: str, content: Any) -> None:
        """Write a JSON file, whole or not at all."""
        draft = self.path / f".{name}"
        draft.write_text(json.dumps(content), encoding="utf-8")
        draft.replace(self.path / name)

    def noted(self, name: str) -> Any | None:
        """What `note` wrote, None while there is nothing."""
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None

    def say(self, doing: str) -> None:
        """Note what the producer does."""
        self.note(_DOING_NOTE, doing)

    def doing(self) -> str:
        """What the producer does, as far as it has said so."""
        return str(self.noted(_DOING_NOTE) or "it has not begun to read")

    def fail(self, error: MegatuneError) -> None:
        """Note why the producer ends."""
        findings = [asdict(finding) for finding in error.findings]
        self.note(_FAILURE_NOTE, {"findings": findings, "exit_code": int(error.exit_code)})

    def failure(self) -> MegatuneError | None:
        """Why the producer ended, None where it has not said."""
        raw = self.noted(_FAILURE_NOTE)
        if raw is None:
            return None
        return MegatuneError([Finding(**finding) for finding in raw["findings"]], ExitCode(raw["exit_code"]))

    # Life

    def lock(self) -> int:
        """Open and lock the file that tells that the producer lives; it does while anyone has this descriptor."""
        descriptor = os.open(self.path / ALIVE_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with contextlib.suppress(OSError):  # no locks here: then only its parent sees it die
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor

    def is_alive(self) -> bool:
        """Whether the producer lives."""
        try:
            descriptor = os.open(self.path / ALIVE_FILE, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False


def _number(name: str) -> int:
    match = _REACHED.fullmatch(name)
    assert match is not None
    return int(match.group(1))


def _remove_abandoned(parent: Path) -> None:
    """Folders whose run was killed: nobody holds their lock any more."""
    for path in parent.iterdir():
        with contextlib.suppress(OSError):
            old = time.time() - path.stat().st_mtime > _ABANDONED_SECONDS
            if not StreamFolder(path).is_alive() and ((path / ALIVE_FILE).exists() or old):
                shutil.rmtree(path, ignore_errors=True)
