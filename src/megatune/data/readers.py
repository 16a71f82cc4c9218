"""Strict readers: every row comes with its place in its file, and what is wrong with it where something is."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatune.errors import ExitCode, Finding, MegatuneError

PARQUET_BATCH_ROWS = 1024

_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_JSON_SPACE = re.compile(r"[ \t\r\n]*")
_ARRAY_OF_OBJECTS = re.compile(rb"\s*\[\s*[\]{]")


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row of a file as it was read.

    Attributes:
        where: "FILE:LINE" for files of lines, "FILE:row N" (from 1) for others.
        fields: the row's columns; empty where `problem` is set.
        problem: why the row cannot be read, "" where it can.
        detail: more on the problem, for the reader of a report.
    """

    where: str
    fields: dict[str, object]
    problem: str = ""
    detail: str = ""


def read_rows(path: Path) -> Iterator[RawRow]:
    """The rows of one file, chosen by its extension. Blank lines are no rows.

    Raises:
        MegatuneError: the file is missing or of an unknown kind (exit code 66), or cannot be read as a whole: wrong
            encoding, a JSON array or CSV that breaks off, an empty file (exit code 65).
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        kinds = ", ".join(sorted(_READERS))
        raise MegatuneError(
            Finding("not a kind of data file that is read", str(path), mend=f"one of {kinds}"), ExitCode.INPUT
        )
    try:
        with open(path, "rb") as file:
            first = file.read(1)
    except OSError as error:
        raise MegatuneError(Finding(f"cannot read: {error.strerror}", str(path)), ExitCode.INPUT) from error
    if not first:
        raise _unreadable(str(path), "the file is empty")
    return reader(path)


def supported_suffixes() -> tuple[str, ...]:
    """Extensions of the files that `read_rows` reads."""
    return tuple(_READERS)


def _read_json(path: Path) -> Iterator[RawRow]:
    """A JSON array of objects, or JSON Lines under the name .json or .jsonl."""
    with open(path, "rb") as file:
        head = file.read(4096).removeprefix(_UTF8_BOM)
    if _ARRAY_OF_OBJECTS.match(head):
        return _read_json_array(path)
    return _read_json_lines(path)


def _read_json_array(path: Path) -> Iterator[RawRow]:
    """Decodes element by element, so that a break in the file is named by its line and column."""
    text = _decoded(path.read_bytes(), path, first_line=1)
    decoder = json.JSONDecoder()
    position = _skip_space(text, text.index("[") + 1)
    number = 0
    while text[position : position + 1] != "]":
        number += 1
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            why, place = getattr(error, "msg", str(error)), getattr(error, "pos", position)
            raise _broken_array(path, text, place, number, why) from error
        yield _object_row(f"{path}:row {number}", value)
        position = _skip_space(text, position)
        if text[position : position + 1] == ",":
            position = _skip_space(text, position + 1)
            if text[position : position + 1] == "]":
                raise _broken_array(path, text, position, number, "a comma before the closing bracket")
        elif text[position : position + 1] != "]":
            raise _broken_array(path, text, position, number, "expected a comma or the closing bracket")
    if text[position + 1 :].strip():
        raise _broken_array(path, text, position + 1, number, "text after the closing bracket")


def _read_json_lines(path: Path) -> Iterator[RawRow]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            yield _object_row(where, json.loads(line))
        except json.JSONDecodeError as error:
            yield RawRow(where, {}, "invalid JSON", f"{error.msg.removesuffix(' at')} at column {error.colno}")
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists in lists without end
            yield RawRow(where, {}, "invalid JSON", str(error))


def _read_csv(path: Path) -> Iterator[RawRow]:
    csv.field_size_limit(sys.maxsize)
    text = _decoded(path.read_bytes(), path, first_line=1)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] | None = None
    try:
        for values in reader:
            if not values:
                continue
            if header is None:
                header = values
                continue
            where = f"{path}:{reader.line_num}"
            if len(values) != len(header):
                yield RawRow(where, {}, "wrong number of fields", f"{len(values)} fields, the header has {len(header)}")
            else:
                yield RawRow(where, dict(zip(header, values, strict=True)))
    except csv.Error as error:
        raise _unreadable(f"{path}:{reader.line_num}", f"invalid CSV: {error}") from error


def _read_text(path: Path) -> Iterator[RawRow]:
    return (RawRow(f"{path}:{number}", {"text": line}) for number, line in _lines(path) if line.strip())


def _read_parquet(path: Path) -> Iterator[RawRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        number = 0
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=PARQUET_BATCH_ROWS):
            for value in batch.to_pylist():
                number += 1
                yield RawRow(f"{path}:row {number}", value)
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(str(path), f"not a whole parquet file: {error}") from error


_READERS: dict[str, Callable[[Path], Iterator[RawRow]]] = {
    ".json": _read_json,
    ".jsonl": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_text,
}


def _object_row(where: str, value: object) -> RawRow:
    if isinstance(value, dict):
        return RawRow(where, value)
    return RawRow(where, {}, "not a JSON object", f"expected an object with the row's fields, got {json_type(value)}")


def json_type(value: object) -> str:
    """The JSON name of a value's type, as messages to users say it."""
    if value is None:
        return "null"
    names = {bool: "a boolean", str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines without their ends (LF or CRLF), decoded one at a time."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            yield number, _decoded(line, path, first_line=number).rstrip("\r\n")


def _decoded(raw: bytes, path: Path, first_line: int) -> str:
    """UTF-8 text; a byte order mark at the start of the file is dropped."""
    if first_line == 1:
        if raw.startswith(_UTF16_BOMS):
            raise _unreadable(str(path), "the file is UTF-16", "save it as UTF-8")
        raw = raw.removeprefix(_UTF8_BOM)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + raw.count(b"\n", 0, error.start)
        raise _unreadable(
            f"{path}:{line}", f"not UTF-8: byte 0x{raw[error.start]:02x}", "save the file as UTF-8"
        ) from error


def _skip_space(text: str, position: int) -> int:
    match = _JSON_SPACE.match(text, position)
    assert match is not None  # the pattern matches the empty string
    return match.end()


def _broken_array(path: Path, text: str, position: int, row: int, why: str) -> MegatuneError:
    line = text.count("\n", 0, position) + 1
    column = position - (text.rfind("\n", 0, position) + 1) + 1
    return _unreadable(f"{path}:{line}", f"invalid JSON in row {row}: {why.removesuffix(' at')} at column {column}")


def _unreadable(where: str, what: str, mend: str = "") -> MegatuneError:
    return MegatuneError(Finding(what, where, mend=mend), ExitCode.DATA)
