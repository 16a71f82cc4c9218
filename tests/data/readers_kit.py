"""Files of rows for the tests of their readers, and short forms of what was read."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from megatune.data.readers import RawRow, read_rows
from megatune.errors import MegatuneError


def arrow_compressed(codec: str) -> Callable[[bytes], bytes]:
    def compress(content: bytes) -> bytes:
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, codec) as stream:
            stream.write(content)
        return sink.getvalue().to_pybytes()

    return compress


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": arrow_compressed("zstd"),
    ".lz4": arrow_compressed("lz4"),
}


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def write_arrow(path: Path, table: pyarrow.Table, batch_rows: int, *, stream: bool) -> Path:
    new = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    return path


def rows_of(path: Path) -> list[tuple[str, Any]]:
    """Place (without the folder) and fields of each row, or its error."""
    return [
        (row.where.removeprefix(f"{path.parent}/"), str(row.error) if row.error else row.fields)
        for row in read_rows(path)
    ]


def parts(rows: Iterator[RawRow]) -> list[tuple[object, ...]]:
    return [(row.where, row.fields, str(row.error), row.raw, row.next) for row in rows]


def refusal(path: Path) -> tuple[str, int]:
    with pytest.raises(MegatuneError) as caught:
        list(read_rows(path))
    return str(caught.value).replace(f"{path.parent}/", ""), int(caught.value.exit_code)
