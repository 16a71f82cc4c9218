"""Errors of rows that cannot be trained on, and their handling by on_bad_row."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.data.samples import Sample

BAD_ROWS_FILE = "bad_rows.jsonl"
MOST_NAMED = 20  # rows that an error lists
TOO_LONG = "too-long"


class RowError(Exception):
    """A row that cannot be trained on.

    Args:
        code: machine-readable kind of the problem, such as "missing-field"; docs/data-formats.md lists all codes.
        reason: description of the problem, the same for all rows that have it (reports count rows by reason).
        detail: details of this row.
    """

    def __init__(self, code: str, reason: str, detail: str = "") -> None:
        super().__init__(code, reason, detail)
        self.code, self.reason, self.detail = code, reason, detail

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})" if self.detail else self.reason


class LengthError(RowError):
    """A row that is dropped because of cutoff_len; `length` is its number of tokens before truncation."""

    def __init__(self, code: str, reason: str, detail: str = "", length: int = 0) -> None:
        super().__init__(code, reason, detail)
        self.length = length


class UnsupportedRow(Exception):  # noqa: N818 - not an error of the row
    """A row that needs an unsupported feature or another stage. Its data set is refused: dropping the row would hide
    the problem.

    Args:
        what: what the row needs.
        fix: how to fix it, or "".
    """

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what)
        self.what, self.fix = what, fix


def no_rows(name: str) -> Finding:
    """Return the finding for a data set whose files have no rows."""
    return Finding(f"{name}: there are no rows", fix="write rows into its files, or remove it from the data")


class BadRows:
    """Context manager that collects dropped rows, and copies or refuses them.

    Rows longer than cutoff_len are refused only by truncation_strategy: error, whatever the policy is.

    Args:
        policy: on_bad_row.
        truncation: truncation_strategy.
        folder: where bad_rows.jsonl is written if there are bad rows and the policy is "quarantine".
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
        """Add one dropped row."""
        kind = "long" if error.code == TOO_LONG else "bad"
        self._counts[kind] += 1
        if len(self._named[kind]) < MOST_NAMED:
            self._named[kind].append(Finding(error.reason, sample.row.where, error.detail))
        if self._path is None:
            return
        if self._file is None:
            # A lone surrogate is written as in its JSON source: backslash, u, four digits.
            self._file = open(self._path, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        # A row that could not be parsed is written as its text.
        row = {"raw": sample.row.raw} if sample.row.error is not None else {"row": _written(sample.row.fields)}
        entry = {"where": sample.row.where, "code": error.code, "reason": error.reason, "detail": error.detail, **row}
        self._file.write(f"{json.dumps(entry, ensure_ascii=False, default=str)}\n")

    def check(self, num_read: int) -> None:
        """Raise if the settings refuse any of the dropped rows, after all `num_read` rows of all data sets are read.

        Raises:
            MegatuneError: there are such rows (exit code 65).
        """
        findings: list[Finding] = []
        for kind, what, fix in (
            ("bad", "rows cannot be trained on", "correct them, or write on_bad_row: quarantine, which leaves them out "
             f"and copies them to {BAD_ROWS_FILE} in output_dir"),
            ("long", "rows are longer than cutoff_len", "raise cutoff_len, or write truncation_strategy: budget to cut "
             "them, drop to leave them out"),
        ):  # fmt: skip
            named, count = self._named[kind], self._counts[kind]
            if self._refused[kind] and count:
                more = f"and {count - len(named)} more: " if count > len(named) else ""
                findings += [*named, Finding(f"{more}{count} of {num_read} {what}", fix=fix)]
        if findings:
            raise MegatuneError(findings, ExitCode.DATA)


def _written(fields: Mapping[str, Any]) -> Any:
    """Return a row for bad_rows.jsonl; json can read deeper nesting than Python's recursion limit allows here."""
    try:
        return _without_media(fields)
    except RecursionError:
        return "nested too deep"


def _without_media(value: Any) -> Any:
    """Return a row's value with encoded images and videos replaced by digests; "where" names the row itself."""
    if isinstance(value, Mapping):
        return {name: _without_media(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_media(part) for part in value]
    if isinstance(value, str) and value.startswith("data:") and ";base64," in value[:100]:
        return f"{value[: value.index(',') + 1]}{_digest(value.encode(errors='surrogatepass'))}"
    return _digest(bytes(value)) if isinstance(value, bytes | bytearray | memoryview) else value


def _digest(content: bytes) -> str:
    return f"<{len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()}>"
