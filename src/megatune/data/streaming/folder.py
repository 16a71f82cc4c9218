"""The folder that the producer of a machine and its ranks share, and how ranks wait for what comes into it.

    FOLDER/block-NUMBER-FIRST-ROWS/  a whole block, with rows FIRST to FIRST + ROWS - 1 of the run
    FOLDER/ready.json                what was made before the first block
    FOLDER/reached-NUMBER            a rank has come to this block
    FOLDER/doing.json                what the producer does, in words
    FOLDER/failure.json              why the producer ended, by itself or by the rank that started it

The listing is the index: no file is read to find a row's block. Everything comes into being by a rename.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from megatune.data.cache.files import owned_folder, remove_abandoned
from megatune.errors import ExitCode, Finding, MegatuneError

T = TypeVar("T")
Meanwhile = Callable[[], None]  # called now and then while waiting

_BLOCK = re.compile(r"block-(\d+)-(\d+)-(\d+)")
_REACHED = "reached-"
_POLL_SECONDS = 0.02
_LOOK_SECONDS = 0.5  # between looks at whether the producer has failed

READY_NOTE = "ready.json"
_DOING_NOTE = "doing.json"
_FAILURE_NOTE = "failure.json"


class BlockPlace(NamedTuple):
    """Where a block is, and which rows of the run it holds."""

    number: int
    first_row: int
    rows: int
    folder: Path

    @property
    def stop_row(self) -> int:
        """The first row behind it."""
        return self.first_row + self.rows


@dataclass(frozen=True, slots=True)
class StreamFolder:
    """The folder; picklable, so that loader processes can have it."""

    path: Path

    @classmethod
    def make(cls, parent: Path, name: str) -> StreamFolder:
        """Return a new one, in the cache or, where that cannot be written, among the temporary files.

        Raises:
            MegatuneError: neither can be written (exit code 73).
        """
        try:
            parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(parent)
            return cls(owned_folder(parent, name))
        except OSError as error:
            try:
                return cls(Path(tempfile.mkdtemp(prefix=f"megatune-stream-{name}-")))
            except OSError:
                finding = Finding(
                    "cannot write the rows that are read ahead", str(parent), error.strerror or str(error)
                )
                raise MegatuneError(finding, ExitCode.CANNOT_WRITE) from error

    def remove(self) -> None:
        """Delete all of it, as far as that can be done."""
        shutil.rmtree(self.path, ignore_errors=True)

    # Blocks

    def blocks(self) -> list[BlockPlace]:
        """Return those that are there, by number."""
        matches = filter(None, map(_BLOCK.fullmatch, os.listdir(self.path)))
        return sorted(BlockPlace(int(m[1]), int(m[2]), int(m[3]), self.path / m.string) for m in matches)

    def publish(self, draft: Path, number: int, first_row: int, rows: int) -> None:
        """Give a written block its place."""
        draft.rename(self.path / f"block-{number:08}-{first_row:012}-{rows}")

    def release(self, row: int) -> None:
        """Delete the blocks that end before this row."""
        for block in self.blocks():
            if block.stop_row > row:
                return
            shutil.rmtree(block.folder, ignore_errors=True)
            for number in self.reached():
                if number <= block.number:
                    (self.path / f"{_REACHED}{number:08}").unlink(missing_ok=True)

    def reached(self) -> list[int]:
        """Return the numbers of the blocks that a rank has come to."""
        return [int(name.removeprefix(_REACHED)) for name in os.listdir(self.path) if name.startswith(_REACHED)]

    # Notes

    def note(self, name: str, content: Any) -> None:
        """Write a JSON file, whole or not at all."""
        draft = self.path / f".{name}"
        draft.write_text(json.dumps(content), encoding="utf-8")
        draft.replace(self.path / name)

    def noted(self, name: str) -> Any | None:
        """Return what `note` wrote, None while there is nothing."""
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None

    def say(self, doing: str) -> None:
        """Note what the producer does."""
        self.note(_DOING_NOTE, doing)

    def doing(self) -> str:
        """Return what the producer does, as far as it has said so."""
        return str(self.noted(_DOING_NOTE) or "it has not begun to read")

    def fail(self, error: MegatuneError) -> None:
        """Note why the producer ends."""
        findings = [asdict(finding) for finding in error.findings]
        self.note(_FAILURE_NOTE, {"findings": findings, "exit_code": int(error.exit_code)})

    def failure(self) -> MegatuneError | None:
        """Return what `fail` noted, None while there is nothing."""
        raw = self.noted(_FAILURE_NOTE)
        return raw and MegatuneError([Finding(**finding) for finding in raw["findings"]], ExitCode(raw["exit_code"]))

    # Waiting, never without an end, and never for a producer that is gone

    def wait_for(
        self, look: Callable[[], T | None], limit: float, wanted: str, meanwhile: Meanwhile, *, patient: bool = False
    ) -> T:
        """Wait until `look` finds something.

        Args:
            limit: seconds until the producer counts as too slow.
            wanted: what is waited for, in words.
            patient: the limit is from one sign of progress to the next, not for all of it.

        Raises:
            MegatuneError: the producer failed (with its own exit code), died, or is too slow (76).
        """
        look_at = time.monotonic()
        deadline = look_at + limit
        doing = self.doing()
        failure: MegatuneError | None = None
        while (found := look()) is None:
            if failure is not None:
                raise failure
            now = time.monotonic()
            if now >= look_at:
                look_at = now + _LOOK_SECONDS
                meanwhile()
                if patient and doing != (doing := self.doing()):
                    deadline = now + limit
                failure = self.failure()  # what came before it is looked for once more
            if now > deadline:
                why = f"{self.doing()}; ddp_timeout is {limit:g} seconds"
                fix = "raise ddp_timeout, lower buffer_size, or give it more processes with preprocessing_num_workers"
                what = f"{wanted} has not arrived from the process that reads the data"
                raise MegatuneError(Finding(what, why=why, fix=fix), ExitCode.PROCESS_DIED)
            time.sleep(_POLL_SECONDS)
        return found

    def wait_for_row(self, row: int, limit: float, meanwhile: Meanwhile) -> BlockPlace:
        """Wait for the block that holds a row of the run; see `wait_for`."""

        def look() -> BlockPlace | None:
            blocks = self.blocks()
            found = next((block for block in blocks if block.first_row <= row < block.stop_row), None)
            number = found.number if found else blocks[-1].number + 1 if blocks else 0
            (self.path / f"{_REACHED}{number:08}").touch()  # so that the producer continues behind it
            return found

        return self.wait_for(look, limit, "the next block of rows", meanwhile)

    def touch(self) -> None:
        """Show other machines, which see no process of this one, that the folder is in use."""
        with contextlib.suppress(OSError):
            os.utime(self.path)
