"""One row of a file, and its place."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from megatune.data.row_error import RowError
from megatune.errors import ExitCode, Finding, MegatuneError

_JSON_NAMES = {
    bool: "a boolean",
    str: "a string",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
}


@dataclass(frozen=True, slots=True)
class Position:
    """Where to go on in a file.

    Attributes:
        row: how many rows come before.
        offset: bytes before it in a file of lines (of the decompressed text where the file is compressed); 0 elsewhere.
        line: lines before it in a file of lines; 0 elsewhere.
    """

    row: int
    offset: int = 0
    line: int = 0


@dataclass(slots=True)  # not frozen: that would double the time to make one
class RawRow:
    """One row of a file as it was read.

    Attributes:
        where: "FILE:LINE" for files of lines and CSV (the line it begins on), "FILE:row N" (from 1) for others.
        fields: the row's columns; empty where there is an `error`.
        error: why the row cannot be read, None where it can.
        raw: the text of a row that cannot be read, with bytes that are no UTF-8 as \\xNN; "" where it can.
        next: the position after this row.
    """

    where: str
    fields: dict[str, object]
    error: RowError | None = None
    raw: str = ""
    next: Position = field(default=Position(0))


def json_type(value: object) -> str:
    """The JSON name of a value's type, as messages to users say it."""
    return "null" if value is None else _JSON_NAMES.get(type(value), type(value).__name__)


def unreadable(where: Path | str, what: str, why: str = "", fix: str = "") -> MegatuneError:
    """The error that ends the reading of a file (exit code 65)."""
    return MegatuneError(Finding(what, str(where), why, fix), ExitCode.DATA)
