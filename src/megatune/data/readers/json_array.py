"""Files of one JSON array of objects, as opposed to JSON Lines."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megatune.data.bad_rows import RowError
from megatune.data.readers.files import (
    DECODER,
    MOST_ROW_BYTES,
    UTF8_BOM,
    DuplicateKeyError,
    Position,
    RawRow,
    file_not_utf8,
    json_error,
    json_problem,
    lines_of,
    not_an_object,
    open_bytes,
    too_long,
    unreadable,
)
from megatune.errors import MegatuneError

HEAD_BYTES = 4096
CHUNK_BYTES = 1 << 20
LONGEST_TOKEN = 16  # characters of a word or escape that an error may be placed before

_MOST_OBJECT_BYTES = 2**26  # of a file that is looked at for being one object
_PLAIN_DECODER = json.JSONDecoder()  # for the end of an element that has a key twice
_NOT_SPACE = re.compile(r"[^ \t\r\n]")
_ARRAY = re.compile(rb"\s*\[")
_ARRAY_OF_OBJECTS = re.compile(rb"\s*\[\s*[\]{]")


def is_json_array(path: Path, *, may_be_lines: bool) -> bool:
    """Tell whether a file is one JSON array; else it is JSON Lines.

    Args:
        may_be_lines: the name says JSON Lines, so that a "[" at the start may be a row that is wrong.

    Raises:
        MegatuneError: it is neither: one object over several lines (exit code 65).
    """
    with open_bytes(path) as stream:
        head = stream.read(HEAD_BYTES).removeprefix(UTF8_BOM)
    if not may_be_lines and _ARRAY.match(head):
        return True
    with open_bytes(path) as stream:
        lines = (line.removeprefix(UTF8_BOM) for line in lines_of(stream, path) if line.strip())
        first, second = next(lines, b""), next(lines, b"")
    if _ARRAY_OF_OBJECTS.match(head):
        return not _is_object(second)
    if not _is_object(first) and not _is_object(second):
        _refuse_object_over_lines(path)
    return False


def read_json_array(path: Path) -> Iterator[RawRow]:
    """Decode element by element, with some of the text in memory; a fault in the file is named by line and column."""
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
    """The text of a JSON array, of which the part before `position` is dropped when more of it is read."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.position = 0
        self._path, self._stream = path, stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._whole = "", False
        self._line, self._column = 1, 1  # of the first character of `_text`

    def next_mark(self) -> str:
        """Skip white space and return the character after it, "" at the end of the file."""
        while True:
            self.position = _space_end(self._text, self.position)
            if self.position < len(self._text):
                return self._text[self.position]
            if not self._read_more():
                return ""

    def element(self, number: int) -> RawRow:
        """Read the row of the array's `number`-th element, which is at `position`, and move to its end."""
        while True:
            try:
                value, problem, end = self._decode()
            except (ValueError, RecursionError) as error:
                if not self._may_be_cut(error) or not self._read_more():
                    raise self.broken(number, json_error(error), getattr(error, "pos", None)) from error
            else:
                # A number that is cut is a number: "-12." is read as -12.
                if end <= len(self._text) - LONGEST_TOKEN or not self._read_more():
                    break
        raw = "" if problem is None else self._text[self.position : end]
        self.position = end
        return RawRow(f"{self._path}:row {number}", value, problem, raw, Position(number))

    def broken(self, row: int, why: str, place: int | None = None) -> MegatuneError:
        """Return the error that ends the reading at `place`, else at `position`."""
        line, column = self._place(self.position if place is None else place)
        fix = "correct it there; of a .jsonl file, single rows that cannot be read may be left out (on_bad_row)"
        return unreadable(f"{self._path}:{line}", f"invalid JSON in row {row}: {why} at column {column}", fix=fix)

    def _decode(self) -> tuple[dict[str, object], RowError | None, int]:
        """Return fields, problem and end of the element at `position`."""
        try:
            value, end = DECODER.raw_decode(self._text, self.position)
        except DuplicateKeyError as error:
            _, end = _PLAIN_DECODER.raw_decode(self._text, self.position)
            return {}, json_problem(error), end
        return (value, None, end) if isinstance(value, dict) else ({}, not_an_object(value), end)

    def _may_be_cut(self, error: Exception) -> bool:
        """Tell whether more text may fix the error: an open string, or any token that ends with the text."""
        if not isinstance(error, json.JSONDecodeError):
            return False
        return error.msg.startswith("Unterminated string") or error.pos > len(self._text) - LONGEST_TOKEN

    def _read_more(self) -> bool:
        """Read at least as much as is kept, so that a long element is not decoded again and again; False at the end."""
        if self._whole:
            return False
        if len(self._text) - self.position > MOST_ROW_BYTES:
            raise too_long(f"{self._path}:{self._place(self.position)[0]}")
        raw = self._stream.read(max(CHUNK_BYTES, len(self._text) - self.position))
        self._whole = not raw
        try:
            more = self._decoder.decode(raw, final=self._whole)
        except UnicodeDecodeError as error:
            raise _not_utf8(self._path) from error
        self._line, self._column = self._place(self.position)
        self._text, self.position = self._text[self.position :] + more, 0
        return True

    def _place(self, position: int) -> tuple[int, int]:
        """Return line and column in the file, from 1."""
        newline = self._text.rfind("\n", 0, position)
        if newline < 0:
            return self._line, self._column + position
        return self._line + self._text.count("\n", 0, position), position - newline


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _refuse_object_over_lines(path: Path) -> None:
    """Refuse a first line that begins an object over several lines; any other one that is no row is a bad row."""
    with open_bytes(path) as stream:
        text = stream.read(_MOST_OBJECT_BYTES).decode("utf-8-sig", "replace")
    start = _space_end(text, 0)
    try:
        value, end = _PLAIN_DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return
    following = text[end:].lstrip().partition("\n")[0]
    if isinstance(value, dict) and "\n" in text[start:end] and not _is_object(following.encode()):
        inside = [key for key, rows in value.items() if isinstance(rows, list) and len(value) == 1]
        fix = f"keep the list of {inside[0]!r} only" if inside else "one object a line, or an array of objects in .json"
        line = text.count("\n", 0, start) + 1
        raise unreadable(f"{path}:{line}", "one JSON object over several lines is not a row", fix=fix)


def _not_utf8(path: Path) -> MegatuneError:
    with open_bytes(path) as stream:
        for number, line in enumerate(lines_of(stream, path), start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return file_not_utf8(path, line.removeprefix(UTF8_BOM) if number == 1 else line, number)
    return unreadable(path, "the file changed while it was read")


def _space_end(text: str, position: int) -> int:
    match = _NOT_SPACE.search(text, position)
    return match.start() if match else len(text)
