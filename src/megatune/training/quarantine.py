"""bad_rows.jsonl of a run: rows that were left out when they were read, and pictures that no step could decode."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatune.data.bad_rows import BAD_ROWS_FILE
from megatune.data.batch_pictures import Unreadable
from megatune.training.callbacks.base import Callback
from megatune.training.storage.files import writing


class Quarantine(Callback):
    """The run's file, with each row and picture once, however often it is read.

    Args:
        keep: what an earlier process of the run wrote.
    """

    def __init__(self, output_dir: Path, *, keep: bool) -> None:
        self.path = output_dir / BAD_ROWS_FILE
        self._kept: set[tuple[str, str]] = set()
        with writing(output_dir):
            if not keep:
                self.path.unlink(missing_ok=True)
            elif self.path.exists():
                whole, _, _ = self.path.read_bytes().rpartition(b"\n")
                self._kept = {_identity(line) for line in whole.splitlines()}
                self.path.write_bytes(whole + b"\n" if whole else b"")

    def copy(self, folder: Path) -> bool:
        """Copy what is new of the bad rows of a folder of token rows; return whether there are any."""
        bad_rows = folder / BAD_ROWS_FILE
        if not bad_rows.exists():
            return False
        with open(bad_rows, "rb") as rows:
            self._add(rows)
        return True

    def on_unreadable(self, pictures: Sequence[Unreadable]) -> None:
        entries = ({name: getattr(each, name) for name in ("where", "code", "reason", "detail")} for each in pictures)
        lines = (f"{json.dumps(entry, ensure_ascii=False)}\n" for entry in entries)
        self._add(line.encode("utf-8", "backslashreplace") for line in lines)

    def _add(self, lines: Iterable[bytes]) -> None:
        with writing(self.path.parent), open(self.path, "ab") as file:
            for line in lines:
                identity = _identity(line)
                if identity not in self._kept:
                    self._kept.add(identity)
                    file.write(line)


def _identity(line: bytes) -> tuple[str, str]:
    row = json.loads(line)
    return row["where"], row["code"]
