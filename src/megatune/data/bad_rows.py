"""on_bad_row: what becomes of rows that cannot be trained on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from megatune.data.row_error import RowError
from megatune.data.samples import Sample
from megatune.data.truncation import TOO_LONG
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.data.prepare import Prepared

BAD_ROWS_FILE = "bad_rows.jsonl"
MOST_NAMED = 20  # rows that an error names


class BadRows:
    """Keeps, or refuses, the rows that are dropped; use as a context manager.

    Rows that truncation_strategy: drop leaves out are dropped as the user asks: they are kept with the others, and
    refused only by truncation_strategy: error.

    Args:
        policy: on_bad_row.
        truncation: truncation_strategy.
        folder: gets bad_rows.jsonl, if there are bad rows and the policy is "quarantine".
    """

    def __init__(self, policy: str, truncation: str, folder: Path) -> None:
        self._refused = {"bad": policy == "error", "long": truncation == "error"}
        self._path = folder / BAD_ROWS_FILE if policy == "quarantine" else None
        self._file: TextIO | None = None
        self._named: dict[str, list[Finding]] = {"bad": [], "long": []}
        self._counts = {"bad": 0, "long": 0}

    def __enter__(self) -> BadRows:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, sample: Sample, error: RowError) -> None:
        """Keep one row that is dropped."""
        kind = "long" if error.code == TOO_LONG else "bad"
        self._counts[kind] += 1
        if len(self._named[kind]) < MOST_NAMED:
            self._named[kind].append(Finding(error.reason, sample.where, error.detail))
        if self._path is None:
            return
        if self._file is None:
            # What JSON spells as half of a surrogate pair is written as it was: backslash, u, four digits.
            self._file = open(self._path, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        self._file.write(f"{json.dumps(_entry(sample, error), ensure_ascii=False, default=str)}\n")

    def check(self, num_read: int) -> None:
        """Call when all rows are read.

        Args:
            num_read: rows of all data sets.

        Raises:
            MegatuneError: there are rows that the settings refuse (exit code 65).
        """
        fixes = {
            "bad": "correct them, or write on_bad_row: quarantine, which leaves them out and copies them to "
            f"{BAD_ROWS_FILE} in output_dir",
            "long": "raise cutoff_len, or write truncation_strategy: budget to cut them, drop to leave them out",
        }
        whats = {"bad": "rows cannot be trained on", "long": "rows are longer than cutoff_len"}
        findings = []
        for kind in ("bad", "long"):
            if not self._refused[kind] or not self._counts[kind]:
                continue
            unnamed = self._counts[kind] - len(self._named[kind])
            what = f"{self._counts[kind]} of {num_read} {whats[kind]}"
            if unnamed:
                what = f"and {unnamed} more: {what}"
            findings += [*self._named[kind], Finding(what, fix=fixes[kind])]
        if findings:
            raise MegatuneError(findings, ExitCode.DATA)


def copy_bad_rows(prepared: Prepared, output_dir: Path) -> Path | None:
    """Put the rows that were left out beside the run's other files, whether it prepared them or found them prepared.

    Returns:
        The copy; None where nothing was quarantined.

    Raises:
        OSError: it cannot be written.
    """
    kept = prepared.directory / BAD_ROWS_FILE
    if not kept.exists():
        return None
    return Path(shutil.copyfile(kept, output_dir / BAD_ROWS_FILE))


def _entry(sample: Sample, error: RowError) -> dict[str, object]:
    """A row that could not be parsed is kept as its text."""
    row = {"raw": sample.row.raw} if sample.row.error is not None else {"row": sample.row.fields}
    return {"where": sample.where, "code": error.code, "reason": error.reason, "detail": error.detail, **row}
