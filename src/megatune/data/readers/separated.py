"""CSV and TSV: a header, then a record a row, in the quoting of spreadsheets."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator
from pathlib import Path

from megatune.data.readers.compressed import open_bytes
from megatune.data.readers.row import Position, RawRow, unreadable
from megatune.data.readers.text import UTF8_BOM, file_not_utf8
from megatune.data.row_error import RowError


def read_separated(path: Path, delimiter: str) -> Iterator[RawRow]:
    """The records after the header; blank lines are none."""
    csv.field_size_limit(sys.maxsize)
    taken: list[str] = []  # the lines of the record that is being read
    records = csv.reader(_lines(path, taken), delimiter=delimiter, strict=True)
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
            if len(values) == len(header) and "\0" not in raw:
                yield RawRow(where, dict(zip(header, values, strict=True)), None, "", Position(number))
            else:
                yield RawRow(where, {}, _record_error(values, header), raw, Position(number))
    except csv.Error as error:
        why = "a quoted field has no end" if str(error) == "unexpected end of data" else str(error)
        raise unreadable(f"{path}:{line}", f"invalid CSV: {why}") from error


def _record_error(values: list[str], header: list[str]) -> RowError:
    if len(values) != len(header):
        detail = f"{len(values)} fields, the header has {len(header)}"
        return RowError("wrong-field-count", "wrong number of fields", detail)
    column = next(name for name, value in zip(header, values, strict=True) if "\0" in value)
    return RowError("nul-bytes", "the row has NUL bytes", f"in {column!r}")


def _check_header(where: str, header: list[str]) -> None:
    for number, name in enumerate(header, start=1):
        if not name.strip():
            fix = "name it, or leave it out (pandas: to_csv(index=False))"
            raise unreadable(where, f"column {number} of the header has no name", fix=fix)
        if name in header[: number - 1]:
            raise unreadable(where, f"the header has {name!r} twice", fix="give each column its own name")


def _lines(path: Path, taken: list[str]) -> Iterator[str]:
    """Lines with their ends; each is added to `taken` too."""
    with open_bytes(path) as stream:
        for number, raw in enumerate(stream, start=1):
            line = raw.removeprefix(UTF8_BOM) if number == 1 else raw
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                raise file_not_utf8(path, line, number) from error
            # CR alone ends a line too.
            for part in io.StringIO(text, newline="") if "\r" in text.removesuffix("\r\n") else (text,):
                taken.append(part)
                yield part
