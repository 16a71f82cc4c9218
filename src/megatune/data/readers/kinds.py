"""Which reader reads a file, by its name, and why a file is refused by its name."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from megatune.data.readers.columnar import read_arrow, read_parquet
from megatune.data.readers.compressed import (
    COMPRESSIONS,
    check_content,
    compression_suffix,
    content_suffix,
    open_bytes,
)
from megatune.data.readers.json_array import is_json_array, read_json_array
from megatune.data.readers.lines import read_json_lines, read_text_lines
from megatune.data.readers.row import Position, RawRow, unreadable
from megatune.data.readers.separated import read_separated
from megatune.data.readers.text import UTF16_BOMS
from megatune.errors import ExitCode, Finding, MegatuneError

_SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
_COLUMNAR = (".parquet", ".arrow")

_RUNS_CODE = frozenset((".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt", ".joblib", ".npy", ".npz"))
_ARCHIVES = frozenset((".zip", ".tar", ".tgz", ".tbz2", ".txz", ".7z", ".rar"))


def supported_suffixes() -> tuple[str, ...]:
    """Extensions of the kinds of files that `read_rows` reads, without those of compressions."""
    return _SUFFIXES


def data_suffix(path: Path) -> str | None:
    """The kind of a data file: ".jsonl" for "x.jsonl" and "x.jsonl.gz"; None for what is no data file by its name."""
    suffix = content_suffix(path)
    return suffix if suffix in _SUFFIXES else None


def read_rows(path: Path, after: Position | None = None) -> Iterator[RawRow]:
    """The rows of one file, chosen by its extension. Blank lines are no rows.

    Args:
        path: .json (an array of objects, or JSON Lines), .jsonl, .ndjson, .csv, .tsv, .parquet, .arrow (IPC file or
            stream) or .txt (a row a line); all but .parquet and .arrow also compressed (.gz, .bz2, .xz, .zst, .lz4).
        after: go on there: `next` of a row of the same file. Files of lines go on from its byte, parquet from its row
            group, arrow from its record batch. Of JSON arrays and CSV the rows before are read and dropped; of
            compressed files of lines the bytes before are decompressed and dropped.

    Raises:
        MegatuneError: at once: the file is missing, of an unknown kind or refused by its name (exit code 66), empty
            or not of the kind that its name says (65); while rows are read: it cannot be read as a whole, as a JSON
            array or CSV that breaks off (65).
    """
    kind = data_suffix(path)
    if kind is None:
        raise _refused(path)
    compression = compression_suffix(path)
    if compression is not None and kind in _COLUMNAR:
        finding = Finding(
            f"a {kind} file that is compressed as a whole is not read",
            str(path),
            f"{kind} files compress what they hold",
            "decompress it",
        )
        raise MegatuneError(finding, ExitCode.INPUT)
    check_content(path)
    after = after or Position(0)
    if kind == ".parquet":
        return read_parquet(path, after)
    if kind == ".arrow":
        return read_arrow(path, after)
    _refuse_utf16(path)
    if kind == ".txt":
        return read_text_lines(path, after)
    if kind in (".csv", ".tsv"):
        return islice(read_separated(path, "\t" if kind == ".tsv" else ","), after.row, None)
    if is_json_array(path, may_be_lines=kind != ".json"):
        return islice(read_json_array(path), after.row, None)
    return read_json_lines(path, after)


def _refuse_utf16(path: Path) -> None:
    with open_bytes(path) as stream:
        if stream.read(2) in UTF16_BOMS:
            raise unreadable(path, "the file is UTF-16", fix="save it as UTF-8")


def _refused(path: Path) -> MegatuneError:
    suffix = content_suffix(path)
    if suffix in _RUNS_CODE:
        what, why = f"{suffix} files are not read", "loading one would run code that it may hold"
        fix = "save the rows as .jsonl or .parquet"
    elif suffix == ".py":
        what, why = "scripts are not run", "reading data must not run code"
        fix = "run it yourself, and have it write .jsonl or .parquet"
    elif suffix in _ARCHIVES:
        what, why, fix = "archives are not read", "", "unpack it first"
    elif not suffix and compression_suffix(path):
        what, why = "the name does not say what is compressed", ""
        fix = f"name it by its content, as {path.stem}.jsonl{path.suffix}"
    else:
        what, why = "not a kind of data file that is read", ""
        fix = f"one of {', '.join(_SUFFIXES)}; but for .parquet and .arrow also with {', '.join(COMPRESSIONS)}"
    return MegatuneError(Finding(what, str(path), why, fix), ExitCode.INPUT)
