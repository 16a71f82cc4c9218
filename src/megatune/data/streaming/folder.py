"""The folder of a stream's blocks that the ranks of a machine and their loader processes share.

    FOLDER/block-NUMBER-FIRST-ROWS/  a whole block, with rows FIRST to FIRST + ROWS - 1 of the run
    FOLDER/doing.json                what the process that writes them does, in words

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
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatune.data.cache.files import owned_folder, remove_abandoned
from megatune.errors import ExitCode, Finding, MegatuneError

Look = Callable[[], MegatuneError | None]  # called now and then while waiting; returns why no more blocks come

_BLOCK = re.compile(r"block-(\d+)-(\d+)-(\d+)")
_DOING_FILE = "doing.json"
_POLL_SECONDS = 0.02
_LOOK_SECONDS = 0.5


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

    def blocks(self) -> list[BlockPlace]:
        """Return the blocks that are there, by number."""
        matches = filter(None, map(_BLOCK.fullmatch, os.listdir(self.path)))
        return sorted(BlockPlace(int(m[1]), int(m[2]), int(m[3]), self.path / m.string) for m in matches)

    def publish(self, draft: Path, number: int, first_row: int, rows: int) -> None:
        """Give a written block its place."""
        draft.rename(self.path / f"block-{number:08}-{first_row:012}-{rows}")

    def release(self, row: int) -> None:
        """Delete the blocks that end before this row, and show other machines that the folder is in use."""
        with contextlib.suppress(OSError):
            os.utime(self.path)
        for block in self.blocks():
            if block.stop_row > row:
                return
            shutil.rmtree(block.folder, ignore_errors=True)

    def say(self, doing: str) -> None:
        """Note what the process that writes blocks does."""
        draft = self.path / f".{_DOING_FILE}"
        draft.write_text(json.dumps(doing), encoding="utf-8")
        draft.replace(self.path / _DOING_FILE)

    def doing(self) -> str:
        """Return what the process that writes blocks does, as far as it has said so."""
        try:
            return str(json.loads((self.path / _DOING_FILE).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return "it has not begun to read"

    def wait_for_row(self, row: int, limit: float, look: Look) -> BlockPlace:
        """Wait for the block that holds a row of the run.

        Args:
            limit: seconds until the process that writes blocks counts as too slow.

        Raises:
            MegatuneError: what `look` returns; it is too slow (exit code 76).
        """
        look_at = time.monotonic()
        deadline = look_at + limit
        failure: MegatuneError | None = None
        while (found := self._holding(row)) is None:
            if failure is not None:
                raise failure
            now = time.monotonic()
            if now >= look_at:
                look_at = now + _LOOK_SECONDS
                failure = look()  # what came before it is looked for once more
            if now > deadline:
                why = f"{self.doing()}; ddp_timeout is {limit:g} seconds"
                fix = "raise ddp_timeout, lower buffer_size, or give it more processes with preprocessing_num_workers"
                what = "the next block of rows has not arrived from the process that reads the data"
                raise MegatuneError(Finding(what, why=why, fix=fix), ExitCode.PROCESS_DIED)
            time.sleep(_POLL_SECONDS)
        return found

    def _holding(self, row: int) -> BlockPlace | None:
        return next((block for block in self.blocks() if block.first_row <= row < block.stop_row), None)
