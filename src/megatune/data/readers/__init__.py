"""Strict readers: every row comes with its place in its file, and what is wrong with it where something is."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from megatune.data.readers.columnar import read_columnar
from megatune.data.readers.files import (
    COLUMNAR,
    DATA_SUFFIXES,
    Position,
    RawRow,
    check_content,
    compression_suffix,
    data_suffix,
    json_error,
    json_type,
    open_bytes,
    refused,
    unreadable,
)
from megatune.data.readers.json_array import is_json_array, read_json_array
from megatune.data.readers.lines import json_fields, read_lines, read_separated, text_fields
from megatune.errors import ExitCode, Finding, MegatuneError

__all__ = ["DATA_SUFFIXES", "Position", "RawRow", "data_suffix", "json_error", "json_type", "read_rows"]


def read_rows(path: Path, after: Position | None = None) -> Iterator[RawRow]:
    """Read the rows of one file, by its extension. Blank lines are no rows.

    Args:
        path: .json (an array of objects, or JSON Lines), .jsonl, .ndjson, .csv, .tsv, .parquet, .arrow (IPC file or
            stream) or .txt (a row a line); all but .parquet and .arrow also compressed (.gz, .bz2, .xz, .zst, .lz4).
        after: where to continue: `next` of a row of the same file. Files of lines continue from its byte, parquet from
            its row group, arrow from its record batch. Of JSON arrays and CSV the rows before are read and dropped; of
            compressed files of lines the bytes before are decompressed and dropped.

    Raises:
        MegatuneError: at once: the file is missing, of an unknown kind or refused by its name (exit code 66), empty
            or not of the kind that its name says (65); while rows are read: it cannot be read as a whole, as a JSON
            array or CSV that breaks off (65).
    """
    kind = data_suffix(path)
    if kind is None:
        raise refused(path)
    if compression_suffix(path) is not None and kind in COLUMNAR:
        what, why = f"a {kind} file that is compressed as a whole is not read", f"{kind} files compress what they hold"
        raise MegatuneError(Finding(what, str(path), why, "decompress it"), ExitCode.INPUT)
    check_content(path)
    after = after or Position(0)
    if kind in COLUMNAR:
        return read_columnar(path, kind, after)
    with open_bytes(path) as stream:
        if stream.read(2) in (b"\xff\xfe", b"\xfe\xff"):  # byte order marks
            raise unreadable(path, "the file is UTF-16", fix="save it as UTF-8")
    if kind == ".txt":
        return read_lines(path, after, text_fields)
    if kind in (".csv", ".tsv"):
        return islice(read_separated(path, "\t" if kind == ".tsv" else ","), after.row, None)
    if is_json_array(path, may_be_lines=kind != ".json"):
        return islice(read_json_array(path), after.row, None)
    return read_lines(path, after, json_fields)
