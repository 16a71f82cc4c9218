"""One row of a file and its place, and what can be wrong with a row's bytes and JSON, in words for users."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from megatune.data.bad_rows import RowError
from megatune.errors import ExitCode, Finding, MegatuneError

UTF8_BOM = b"\xef\xbb\xbf"

# Long runs are of other encodings (GBK, Shift-JIS), a leading byte and its follower of UTF-8 that was cut.
_NOT_WESTERN = re.compile(rb"[\x80-\xff]{4}|[\xc2-\xf4][\x80-\xbf]")
_CP1252_ONLY = re.compile(rb"[\x80-\x9f]")
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
    """A place in a file from which reading can continue.

    Attributes:
        row: number of rows before it.
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
    """Return the JSON name of a value's type, for messages."""
    return "null" if value is None else _JSON_NAMES.get(type(value), type(value).__name__)


def unreadable(where: Path | str, what: str, why: str = "", fix: str = "") -> MegatuneError:
    """Return the error that ends the reading of a file (exit code 65)."""
    return MegatuneError(Finding(what, str(where), why, fix), ExitCode.DATA)


class DuplicateKeyError(ValueError):
    """A JSON object has a key twice, so that one of the two values would be lost silently."""


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build an object, as json's `object_pairs_hook`.

    Raises:
        DuplicateKeyError: a key occurs twice.
    """
    fields = dict(pairs)
    if len(fields) != len(pairs):
        keys = [key for key, _ in pairs]
        raise DuplicateKeyError(next(key for key in keys if keys.count(key) > 1))
    return fields


DECODER = json.JSONDecoder(object_pairs_hook=unique_keys)


def json_error(error: Exception) -> str:
    """Return the cause of one of json's errors, without its place: "unterminated string"."""
    if isinstance(error, json.JSONDecodeError):
        cause = error.msg.removesuffix(" at").removesuffix(" starting").rstrip(": ")
        cause = cause.replace("Expecting", "expected")
        return cause[:1].lower() + cause[1:]
    return "nested too deep" if isinstance(error, RecursionError) else "a number of too many digits"


def key_twice(error: DuplicateKeyError) -> RowError:
    return RowError("duplicate-key", "a key twice", repr(str(error)))


def not_an_object(value: object) -> RowError:
    detail = f"expected an object with the row's fields, got {json_type(value)}"
    return RowError("not-an-object", "not a JSON object", detail)


def has_nul(place: str) -> RowError:
    return RowError("nul-bytes", "the row has NUL bytes", place)


def line_not_utf8(line: bytes) -> RowError:
    looks = _looks_like(line)
    guess = f"; the file looks like {looks}: save it as UTF-8" if looks else "; save the file as UTF-8"
    return RowError("not-utf8", "not UTF-8", _bad_byte(line) + guess)


def file_not_utf8(path: Path, line: bytes, number: int) -> MegatuneError:
    """Return the error of a file whose `line`, the `number`-th (from 1), is not UTF-8."""
    why = f"the file looks like {looks}" if (looks := _looks_like(line)) else ""
    return unreadable(f"{path}:{number}", f"not UTF-8: {_bad_byte(line)}", why, "save the file as UTF-8")


def _bad_byte(line: bytes) -> str:
    try:
        line.decode()
    except UnicodeDecodeError as error:
        return f"byte 0x{line[error.start]:02x} at column {len(line[: error.start].decode()) + 1}"
    raise ValueError("the line is UTF-8")


def _looks_like(line: bytes) -> str:
    if _NOT_WESTERN.search(line):
        return ""
    if not _CP1252_ONLY.search(line):
        return "latin-1"
    try:
        line.decode("cp1252")
    except UnicodeDecodeError:
        return ""
    return "cp1252"
