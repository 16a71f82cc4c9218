"""Strict readers of data files: every row comes with its location in the file and with its error, if it has one.

No code in Parquet and Arrow files is run: values of extension types are read as their storage type.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from megatune.data.readers.files import (
    COLUMNAR,
    DATA_SUFFIXES,
    Position,
    RawRow,
    check_content,
    compression_suffix,
    data_suffix,
    json_error,
    json_problem,
    json_type,
    open_bytes,
    unique_keys,
    unreadable,
    unsupported_file,
)
from megatune.data.readers.text import (
    is_json_array,
    json_fields,
    read_json_array,
    read_lines,
    read_separated,
    text_fields,
)
from megatune.errors import ExitCode, Finding, MegatuneError

__all__ = ["DATA_SUFFIXES", "Position", "RawRow", "data_suffix", "json_error", "json_type", "read_rows"]

BATCH_ROWS = 1024
BATCH_BYTES = 2**24  # of rows that are built at once, unless a single row is larger
_READ_BYTES = 2**20  # of a column at once: otherwise the whole column of a row group is read
Decoder = Callable[[Any], Any]


def read_rows(path: Path, after: Position | None = None) -> Iterator[RawRow]:
    """Read the rows of one file, by its extension. Blank lines are skipped.

    Args:
        path: .json (an array of objects, or JSON Lines), .jsonl, .ndjson, .csv, .tsv, .parquet, .arrow (IPC file or
            stream) or .txt (a row per line); all but .parquet and .arrow also compressed (.gz, .bz2, .xz, .zst, .lz4).
        after: where to continue: `next` of a row of the same file. Files of lines continue at its byte, parquet at its
            row group, arrow at its record batch. JSON arrays and CSV are read from the start; compressed files of
            lines are decompressed from the start.

    Raises:
        MegatuneError: immediately: the file is missing or its extension is not supported (exit code 66), or it is empty
            or does not match its extension (65); while reading: it cannot be read as a whole, such as a truncated JSON
            array or CSV (65).
    """
    kind = data_suffix(path)
    if kind is None:
        raise unsupported_file(path)
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


def read_columnar(path: Path, kind: str, after: Position) -> Iterator[RawRow]:
    """Read Parquet, or Arrow's IPC format, file or stream (`kind` is ".parquet" or ".arrow").

    Row groups of Parquet before the position are skipped; of Arrow's record batches only the sizes are read.
    """
    import pyarrow

    number = after.row
    try:
        batches = _parquet_batches(path, number) if kind == ".parquet" else _from_row(_arrow_batches(path), number)
        for batch in batches:
            decoders = {field.name: decode for field in batch.schema if (decode := decoder(field.type))}
            size = _rows_at_once(batch.nbytes, batch.num_rows)
            for start in range(0, batch.num_rows, size):
                for fields in batch.slice(start, size).to_pylist():
                    number += 1
                    yield _row(f"{path}:row {number}", fields, decoders, Position(number))
    except UnicodeDecodeError as error:
        raise unreadable(path, f"a text after row {number} is not UTF-8", str(error)) from error
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # the last: outside Python's types
        place = f"{path}:row {number + 1}" if number else str(path)
        raise unreadable(place, f"not a complete {kind[1:]} file: {error}") from error


def _rows_at_once(num_bytes: int, num_rows: int) -> int:
    return max(1, min(BATCH_ROWS, BATCH_BYTES * num_rows // max(num_bytes, 1)))


def _row(where: str, fields: dict[str, Any], decoders: dict[str, Decoder], after: Position) -> RawRow:
    for column, decode in decoders.items():
        try:
            fields[column] = decode(fields[column])
        except (ValueError, RecursionError) as error:
            return RawRow(where, {}, json_problem(error, f" in {column!r}"), str(fields[column]), after)
    return RawRow(where, fields, None, "", after)


def decoder(kind: Any) -> Decoder | None:
    """Return the decoder of an Arrow type's values; None if they need none.

    All structs of a column have the same fields, with null for those that a row lacked: nulls in structs are dropped.
    `datasets` writes JSON text if the values of the rows have no common type.
    """
    import pyarrow.types

    if getattr(kind, "extension_name", "") == "arrow.json":
        return lambda text: None if text is None else json.loads(text, object_pairs_hook=unique_keys)
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        inner = decoder(kind.value_type)
        return inner and (lambda values: None if values is None else [inner(value) for value in values])
    if pyarrow.types.is_struct(kind):
        parts = {field.name: decoder(field.type) or (lambda part: part) for field in kind}
        return lambda value: value and {name: parts[name](v) for name, v in value.items() if v is not None}
    return None


def _parquet_batches(path: Path, skip: int) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=_READ_BYTES) as file:
        _check_names(path, file.schema_arrow.names)
        groups = file.num_row_groups
        ends = list(accumulate(file.metadata.row_group(group).num_rows for group in range(groups)))
        first = next((group for group in range(groups) if ends[group] > skip), groups)
        before = ends[first - 1] if first else 0
        skip -= before
        for group in range(first, groups):
            sizes = file.metadata.row_group(group)
            size = _rows_at_once(sizes.total_byte_size, sizes.num_rows)
            yield from _from_row(file.iter_batches(batch_size=size, row_groups=[group]), skip)
            skip = 0


def _arrow_batches(path: Path) -> Iterator[Any]:
    """Memory-map record batches: only the parts that are used are read."""
    import pyarrow.ipc

    with open(path, "rb") as head:
        is_file = head.read(6) == b"ARROW1"
    with pyarrow.memory_map(str(path)) as source:
        reader = pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)
        _check_names(path, reader.schema.names)
        yield from map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader


def _from_row(batches: Iterator[Any], skip: int) -> Iterator[Any]:
    for batch in batches:
        if skip < batch.num_rows:
            yield batch.slice(skip)
        skip = max(0, skip - batch.num_rows)


def _check_names(path: Path, names: list[str]) -> None:
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise unreadable(path, f"two columns are named {duplicate!r}", fix="give each column a unique name")
