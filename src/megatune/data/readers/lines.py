"""Files of lines, where whatever is wrong with a line is that row's problem; and CSV and TSV, records of lines."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from megatune.data.bad_rows import RowError
from megatune.data.readers.files import (
    DECODER,
    MOST_ROW_BYTES,
    UTF8_BOM,
    Position,
    RawRow,
    file_not_utf8,
    json_problem,
    line_not_utf8,
    lines_of,
    not_an_object,
    open_bytes,
    unique_keys,
    unreadable,
)

_LINE_ENDS = frozenset(("\n", "", "\r\n"))
_HAS_NUL = "the row has NUL bytes"

Fields = dict[str, object]


def read_lines(path: Path, after: Position, fields_of: Callable[[bytes], Fields | RowError | None]) -> Iterator[RawRow]:
    """Read the rows that `fields_of` makes of lines; a line that it makes None of is no row."""
    name, row, offset, number = f"{path}:", after.row, after.offset, after.line
    with open_bytes(path, offset) as stream:
        lines = lines_of(stream, path, number)
        if offset == 0:
            first = next(lines, b"")
            offset = len(UTF8_BOM) if first.startswith(UTF8_BOM) else 0
            lines = chain((first[offset:],), lines)
        for line in lines:
            number += 1
            offset += len(line)
            fields = fields_of(line)
            if isinstance(fields, RowError):
                row += 1
                raw = line.decode("utf-8", "backslashreplace").rstrip("\r\n")
                yield RawRow(f"{name}{number}", {}, fields, raw, Position(row, offset, number))
            elif fields is not None:
                row += 1
                yield RawRow(f"{name}{number}", fields, None, "", Position(row, offset, number))


def json_fields(line: bytes) -> Fields | RowError | None:
    """Parse one JSON object."""
    try:
        whole = line.decode()
        value, end = DECODER.raw_decode(whole)
        if type(value) is dict and whole[end:] in _LINE_ENDS:
            return value
    except (ValueError, RecursionError):
        pass
    # Without its end, which inside of an open string would be named instead of the string.
    text = _text_of(line)
    if text is None or isinstance(text, RowError):
        return text
    try:
        value = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        return json_problem(error, f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else "")
    return value if isinstance(value, dict) else not_an_object(value)


def text_fields(line: bytes) -> Fields | RowError | None:
    """Take a line as a text, under the field "text"."""
    text = _text_of(line)
    return {"text": text} if isinstance(text, str) else text


def _text_of(line: bytes) -> str | RowError | None:
    """Decode a line, without its end; None where it is blank."""
    try:
        text = line.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        return line_not_utf8(line)
    if "\0" in text:
        return RowError("nul-bytes", _HAS_NUL, f"the first at column {text.index(chr(0)) + 1}")
    return text if text.strip() else None


def read_separated(path: Path, delimiter: str) -> Iterator[RawRow]:
    """Read the records after the header, in the quoting of spreadsheets; blank lines are none.

    Raises:
        MegatuneError: the header is faulty, the file is not UTF-8, or a quoted field is not closed (exit code 65).
    """
    csv.field_size_limit(MOST_ROW_BYTES)  # a quote that nothing closes takes in the rest of the file
    taken: list[str] = []  # the lines of the record that is being read
    records = csv.reader(_decoded_lines(path, taken), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    number, line = 0, 1
    try:
        for values in records:
            where, raw = f"{path}:{line}", "".join(taken).rstrip("\r\n")
            line = records.line_num + 1
            taken.clear()
            if not values:
                continue
            if header is None:
                header = values
                _check_header(where, header)
                continue
            number += 1
            if len(values) != len(header):
                detail = f"{len(values)} fields, the header has {len(header)}"
                problem = RowError("wrong-field-count", "wrong number of fields", detail)
            elif "\0" in raw:
                column = next(name for name, value in zip(header, values, strict=True) if "\0" in value)
                problem = RowError("nul-bytes", _HAS_NUL, f"in {column!r}")
            else:
                yield RawRow(where, dict(zip(header, values, strict=True)), None, "", Position(number))
                continue
            yield RawRow(where, {}, problem, raw, Position(number))
    except csv.Error as error:
        why = "a quoted field is not closed" if str(error) == "unexpected end of data" else str(error)
        raise unreadable(f"{path}:{line}", f"invalid CSV: {why}") from error


def _check_header(where: str, header: list[str]) -> None:
    """Refuse a header whose names are missing, repeated, or separated by something else."""
    other = next((sign for sign in (";", "\t", "|") if len(header) == 1 and sign in header[0]), None)
    if other is not None:
        what = f"the header has one column, {header[0]!r:.60}"
        fix = "separate the columns by commas, or name the file .tsv if tabs separate them"
        raise unreadable(where, what, f"columns seem to be separated by {other!r}", fix)
    for number, name in enumerate(header, start=1):
        if not name.strip():
            fix = "name it, or leave it out (pandas: to_csv(index=False))"
            raise unreadable(where, f"column {number} of the header has no name", fix=fix)
        if name in header[: number - 1]:
            raise unreadable(where, f"the header has {name!r} twice", fix="give each column its own name")


def _decoded_lines(path: Path, taken: list[str]) -> Iterator[str]:
    """Decode lines with their ends; each is added to `taken` too."""
    with open_bytes(path) as stream:
        for number, raw in enumerate(lines_of(stream, path), start=1):
            line = raw.removeprefix(UTF8_BOM) if number == 1 else raw
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                raise file_not_utf8(path, line, number) from error
            # CR alone ends a line too.
            for part in io.StringIO(text, newline="") if "\r" in text.removesuffix("\r\n") else (text,):
                taken.append(part)
                yield part
