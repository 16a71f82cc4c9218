"""Text files: JSON arrays; files of lines, where an error in a line affects only that row; and CSV and TSV."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from megatune.data.bad_rows import RowError
from megatune.data.readers.files import (
    DECODER,
    MAX_ROW_BYTES,
    UTF8_BOM,
    DuplicateKeyError,
    Position,
    RawRow,
    file_not_utf8,
    json_error,
    json_problem,
    line_not_utf8,
    lines_of,
    not_an_object,
    open_bytes,
    row_too_long,
    unique_keys,
    unreadable,
)
from megatune.errors import MegatuneError

HEAD_BYTES = 4096
CHUNK_BYTES = 1 << 20
MAX_TOKEN_CHARS = 16  # of a word or escape sequence, at whose start an error may be reported

_MAX_OBJECT_BYTES = 2**26  # that are read to check whether a file is one object
_PLAIN_DECODER = json.JSONDecoder()  # finds the end of an element with a duplicate key
_NOT_SPACE = re.compile(r"[^ \t\r\n]")
_ARRAY = re.compile(rb"\s*\[")
_ARRAY_OF_OBJECTS = re.compile(rb"\s*\[\s*[\]{]")
_LINE_ENDS = frozenset(("\n", "", "\r\n"))
_NUL_BYTES = "the row has NUL bytes"

Fields = dict[str, object]


def is_json_array(path: Path, *, may_be_lines: bool) -> bool:
    """Return whether a file is one JSON array; otherwise it is JSON Lines.

    Args:
        may_be_lines: the extension is that of JSON Lines, so that a "[" at the start may be an invalid row.

    Raises:
        MegatuneError: it is neither: one object over several lines (exit code 65).
    """
    with open_bytes(path) as stream:
        head = stream.read(HEAD_BYTES).removeprefix(UTF8_BOM)
    if not may_be_lines and _ARRAY.match(head):
        return True
    with open_bytes(path) as stream:
        lines = (line for line in _without_bom(lines_of(stream, path)) if line.strip())
        first, second = next(lines, b""), next(lines, b"")
    if _ARRAY_OF_OBJECTS.match(head):
        return not _is_object(second)
    if not _is_object(first) and not _is_object(second):
        _reject_multiline_object(path)
    return False


def read_json_array(path: Path) -> Iterator[RawRow]:
    """Decode the array element by element, with part of the text in memory; errors state line and column."""
    with open_bytes(path) as stream:
        text = _Text(path, stream)
        text.next_mark()
        text.position += 1  # the opening bracket
        number = 0
        while text.next_mark() != "]":
            number += 1
            yield text.element(number)
            mark = text.next_mark()
            if mark == ",":
                text.position += 1
                if text.next_mark() == "]":
                    raise text.broken(number, "a comma before the closing bracket")
            elif mark != "]":
                raise text.broken(number, "expected a comma or the closing bracket")
        text.position += 1
        if text.next_mark():
            raise text.broken(number, "text after the closing bracket")


class _Text:
    """The text of a JSON array; the part before `position` is dropped when more is read."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.position = 0
        self._path, self._stream = path, stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._whole = "", False
        self._line, self._column = 1, 1  # of the first character of `_text`

    def next_mark(self) -> str:
        """Skip whitespace and return the next character, "" at the end of the file."""
        while True:
            self.position = _space_end(self._text, self.position)
            if self.position < len(self._text):
                return self._text[self.position]
            if not self._read_more():
                return ""

    def element(self, number: int) -> RawRow:
        """Read the row of the array's `number`-th element, at `position`, and move to its end."""
        while True:
            try:
                value, problem, end = self._decode()
            except (ValueError, RecursionError) as error:
                if not self._may_be_cut(error) or not self._read_more():
                    raise self.broken(number, json_error(error), getattr(error, "pos", None)) from error
            else:
                # A truncated number is a number, too: "-12." is read as -12.
                if end <= len(self._text) - MAX_TOKEN_CHARS or not self._read_more():
                    break
        raw = "" if problem is None else self._text[self.position : end]
        self.position = end
        return RawRow(f"{self._path}:row {number}", value, problem, raw, Position(number))

    def broken(self, row: int, why: str, place: int | None = None) -> MegatuneError:
        """Return the error that ends the reading, at `place` or at `position`."""
        line, column = self._place(self.position if place is None else place)
        fix = "correct it there; in a .jsonl file, on_bad_row can skip single rows that cannot be read"
        return unreadable(f"{self._path}:{line}", f"invalid JSON in row {row}: {why} at column {column}", fix=fix)

    def _decode(self) -> tuple[dict[str, object], RowError | None, int]:
        """Return fields, error and end of the element at `position`."""
        try:
            value, end = DECODER.raw_decode(self._text, self.position)
        except DuplicateKeyError as error:
            _, end = _PLAIN_DECODER.raw_decode(self._text, self.position)
            return {}, json_problem(error), end
        return (value, None, end) if isinstance(value, dict) else ({}, not_an_object(value), end)

    def _may_be_cut(self, error: Exception) -> bool:
        """Return whether more text may fix the error: an open string, or any token at the end of the text."""
        if not isinstance(error, json.JSONDecodeError):
            return False
        return error.msg.startswith("Unterminated string") or error.pos > len(self._text) - MAX_TOKEN_CHARS

    def _read_more(self) -> bool:
        """Read at least as much as is kept, so that long elements are decoded few times; return False at the end."""
        if self._whole:
            return False
        if len(self._text) - self.position > MAX_ROW_BYTES:
            raise row_too_long(f"{self._path}:{self._place(self.position)[0]}")
        raw = self._stream.read(max(CHUNK_BYTES, len(self._text) - self.position))
        self._whole = not raw
        try:
            more = self._decoder.decode(raw, final=self._whole)
        except UnicodeDecodeError as error:
            raise self._not_utf8() from error
        self._line, self._column = self._place(self.position)
        self._text, self.position = self._text[self.position :] + more, 0
        return True

    def _not_utf8(self) -> MegatuneError:
        with open_bytes(self._path) as stream:
            for number, line in enumerate(_without_bom(lines_of(stream, self._path)), start=1):
                try:
                    line.decode()
                except UnicodeDecodeError as error:
                    return file_not_utf8(self._path, error, number)
        return unreadable(self._path, "the file changed while it was read")

    def _place(self, position: int) -> tuple[int, int]:
        """Return line and column in the file, both from 1."""
        newline = self._text.rfind("\n", 0, position)
        if newline < 0:
            return self._line, self._column + position
        return self._line + self._text.count("\n", 0, position), position - newline


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _reject_multiline_object(path: Path) -> None:
    """Reject a first line that begins an object over several lines; any other invalid line is a bad row."""
    with open_bytes(path) as stream:
        text = stream.read(_MAX_OBJECT_BYTES).decode("utf-8-sig", "replace")
    start = _space_end(text, 0)
    try:
        value, end = _PLAIN_DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return
    following = text[end:].lstrip().partition("\n")[0]
    if isinstance(value, dict) and "\n" in text[start:end] and not _is_object(following.encode()):
        inside = [key for key, rows in value.items() if isinstance(rows, list) and len(value) == 1]
        fix = f"keep only the list of {inside[0]!r}" if inside else "one object per line, or an array in a .json file"
        line = text.count("\n", 0, start) + 1
        raise unreadable(f"{path}:{line}", "one JSON object over several lines is not a row", fix=fix)


def _without_bom(lines: Iterator[bytes]) -> Iterator[bytes]:
    """Remove the byte order mark at the start of a file."""
    yield next(lines, b"").removeprefix(UTF8_BOM)
    yield from lines


def _space_end(text: str, position: int) -> int:
    match = _NOT_SPACE.search(text, position)
    return match.start() if match else len(text)


def read_lines(path: Path, after: Position, fields_of: Callable[[bytes], Fields | RowError | None]) -> Iterator[RawRow]:
    """Read the rows that `fields_of` returns for lines; a line for which it returns None is skipped."""
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
    # Without the line end, which would be reported instead of an open string.
    text = _text_of(line)
    if text is None or isinstance(text, RowError):
        return text
    try:
        value = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        return json_problem(error, f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else "")
    return value if isinstance(value, dict) else not_an_object(value)


def text_fields(line: bytes) -> Fields | RowError | None:
    """Return a line as a text, in the field "text"."""
    text = _text_of(line)
    return {"text": text} if isinstance(text, str) else text


def _text_of(line: bytes) -> str | RowError | None:
    """Decode a line without its line end; return None if it is blank."""
    try:
        text = line.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        return line_not_utf8(error)
    if "\0" in text:
        return RowError("nul-bytes", _NUL_BYTES, f"the first at column {text.index(chr(0)) + 1}")
    return text if text.strip() else None


def read_separated(path: Path, delimiter: str) -> Iterator[RawRow]:
    """Read the records after the header, with the quoting of spreadsheets; blank lines are skipped.

    Raises:
        MegatuneError: the header is invalid, the file is not UTF-8, or a quoted field is not closed (exit code 65).
    """
    csv.field_size_limit(MAX_ROW_BYTES)  # an unclosed quote includes the rest of the file
    taken: list[str] = []  # the lines of the current record
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
                problem = RowError("nul-bytes", _NUL_BYTES, f"in {column!r}")
            else:
                yield RawRow(where, dict(zip(header, values, strict=True)), None, "", Position(number))
                continue
            yield RawRow(where, {}, problem, raw, Position(number))
    except csv.Error as error:
        why = "a quoted field is not closed" if str(error) == "unexpected end of data" else str(error)
        raise unreadable(f"{path}:{line}", f"invalid CSV: {why}") from error


def _check_header(where: str, header: list[str]) -> None:
    """Reject a header with missing or duplicate names, or with another separator."""
    other = next((sign for sign in (";", "\t", "|") if len(header) == 1 and sign in header[0]), None)
    if other is not None:
        what = f"the header has one column, {header[0]!r:.60}"
        fix = "separate the columns by commas, or name the file .tsv if tabs separate them"
        raise unreadable(where, what, f"columns seem to be separated by {other!r}", fix)
    for number, name in enumerate(header, start=1):
        if not name.strip():
            fix = "name it, or remove the column (pandas: to_csv(index=False))"
            raise unreadable(where, f"column {number} of the header has no name", fix=fix)
        if name in header[: number - 1]:
            raise unreadable(where, f"the header has {name!r} twice", fix="give each column a unique name")


def _decoded_lines(path: Path, taken: list[str]) -> Iterator[str]:
    """Decode lines with their line ends; each is also appended to `taken`."""
    with open_bytes(path) as stream:
        for number, line in enumerate(_without_bom(lines_of(stream, path)), start=1):
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                raise file_not_utf8(path, error, number) from error
            # A single CR ends a line, too.
            for part in io.StringIO(text, newline="") if "\r" in text.removesuffix("\r\n") else (text,):
                taken.append(part)
                yield part
