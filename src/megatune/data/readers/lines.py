"""Files of lines: whatever is wrong with one line is that row's problem, never the file's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

from megatune.data.readers.compressed import open_bytes
from megatune.data.readers.row import Position, RawRow
from megatune.data.readers.text import (
    DECODER,
    UTF8_BOM,
    DuplicateKeyError,
    has_nul,
    json_error,
    key_twice,
    line_not_utf8,
    not_an_object,
    unique_keys,
)
from megatune.data.row_error import RowError

_LINE_ENDS = frozenset(("\n", "", "\r\n"))

Fields = dict[str, object]


def read_json_lines(path: Path, after: Position) -> Iterator[RawRow]:
    """One JSON object a line."""
    return _read_lines(path, after, _json_fields)


def read_text_lines(path: Path, after: Position) -> Iterator[RawRow]:
    """One text a line, under the field "text"."""
    return _read_lines(path, after, _text_fields)


def _read_lines(
    path: Path, after: Position, fields_of: Callable[[bytes], Fields | RowError | None]
) -> Iterator[RawRow]:
    """The rows that `fields_of` makes of lines; a line that it makes None of is no row."""
    name, row, offset, number = f"{path}:", after.row, after.offset, after.line
    with open_bytes(path, offset) as stream:
        lines: Iterable[bytes] = stream
        if offset == 0:
            first = stream.readline()
            offset = len(UTF8_BOM) if first.startswith(UTF8_BOM) else 0
            lines = chain((first[offset:],), stream)
        for line in lines:
            number += 1
            offset += len(line)
            fields = fields_of(line)
            if fields is None:
                continue
            row += 1
            place = Position(row, offset, number)
            if isinstance(fields, RowError):
                raw = line.decode("utf-8", "backslashreplace").rstrip("\r\n")
                yield RawRow(f"{name}{number}", {}, fields, raw, place)
            else:
                yield RawRow(f"{name}{number}", fields, None, "", place)


def _json_fields(line: bytes) -> Fields | RowError | None:
    try:
        text = line.decode()
        value, end = DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return _careful_json_fields(line)
    if type(value) is dict and text[end:] in _LINE_ENDS:
        return value
    return _careful_json_fields(line)


def _careful_json_fields(line: bytes) -> Fields | RowError | None:
    """For the few lines that are not a JSON object from the first byte to the last."""
    try:
        text = line.decode().rstrip("\r\n")  # an end inside of an open string would be named instead of the string
    except UnicodeDecodeError:
        return line_not_utf8(line)
    if not text.strip():
        return None
    if "\0" in text:
        return has_nul(text)
    try:
        value = json.loads(text, object_pairs_hook=unique_keys)
    except DuplicateKeyError as error:
        return key_twice(error)
    except json.JSONDecodeError as error:
        return RowError("invalid-json", "invalid JSON", f"{json_error(error)} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        return RowError("invalid-json", "invalid JSON", json_error(error))
    return value if isinstance(value, dict) else not_an_object(value)


def _text_fields(line: bytes) -> Fields | RowError | None:
    try:
        text = line.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        return line_not_utf8(line)
    if "\0" in text:
        return has_nul(text)
    return {"text": text} if text.strip() else None
