"""Data files and their rows: file types by name, decompression, positions, and errors."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from megatune.data.bad_rows import RowError
from megatune.errors import ExitCode, Finding, MegatuneError

BUFFER_BYTES = 1 << 20

DATA_SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
COLUMNAR = (".parquet", ".arrow")
MAX_ROW_BYTES = 2**29  # 512 MiB, including images and videos
COMPRESSIONS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd", ".lz4": "lz4"}

_RUNS_CODE = frozenset((".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt", ".joblib", ".npy", ".npz"))
_ARCHIVES = frozenset((".zip", ".tar", ".tgz", ".tbz2", ".txz", ".7z", ".rar"))

_OPENERS: dict[str, Callable[[Path], object]] = {".gz": gzip.GzipFile, ".bz2": bz2.BZ2File, ".xz": lzma.LZMAFile}

_SIGNATURES = {  # name and first bytes of file types that can be detected by them; no text begins like this
    ".gz": ("gzip", rb"\x1f\x8b"),
    ".bz2": ("bzip2", rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
    ".xz": ("xz", rb"\xfd7zXZ\x00"),
    ".zst": ("zstd", rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
    ".lz4": ("lz4", rb"\x04\x22\x4d\x18"),
    ".parquet": ("parquet", rb"PAR1[\x00-\x1f]"),
    ".arrow": ("arrow", rb"ARROW1\x00\x00"),
    ".zip": ("a zip archive", rb"PK\x03\x04"),
    "": ("a pointer of Git LFS", rb"version https://git-lfs"),
}
UTF8_BOM = b"\xef\xbb\xbf"

# Long runs occur in other encodings (GBK, Shift-JIS); a leading byte and its continuation in UTF-8 that was cut.
_NOT_WESTERN = re.compile(rb"[\x80-\xff]{4}|[\xc2-\xf4][\x80-\xbf]")
_CP1252_ONLY = re.compile(rb"[\x80-\x9f]")
_JSON_NAMES = {bool: "a boolean", str: "a string", int: "a number", float: "a number", list: "a list",
               dict: "an object"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Position:
    """A position in a file from which reading can continue.

    Attributes:
        row: number of rows before it.
        offset: bytes before it in a file of lines (decompressed bytes if the file is compressed); 0 for other files.
        line: lines before it in a file of lines; 0 for other files.
    """

    row: int
    offset: int = 0
    line: int = 0


@dataclass(slots=True)  # not frozen, which would double the time to construct one
class RawRow:
    """One row of a file.

    Attributes:
        where: "FILE:LINE" for files of lines and CSV (the row's first line), "FILE:row N" (from 1) for others.
        fields: the row's columns; empty if there is an `error`.
        error: why the row cannot be read; None if it can.
        raw: the text of a row that cannot be read, with bytes that are not UTF-8 as \\xNN; otherwise "".
        next: the position after this row.
    """

    where: str
    fields: dict[str, object]
    error: RowError | None = None
    raw: str = ""
    next: Position = Position(0)


def json_type(value: object) -> str:
    """Return the JSON name of a value's type, for messages."""
    return "null" if value is None else _JSON_NAMES.get(type(value), type(value).__name__)


def unreadable(where: Path | str, what: str, why: str = "", fix: str = "") -> MegatuneError:
    """Return an error that ends the reading of a file (exit code 65)."""
    return MegatuneError(Finding(what, str(where), why, fix), ExitCode.DATA)


class DuplicateKeyError(ValueError):
    """Raised for a key that occurs twice in a JSON object: one of its values would be lost silently."""


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build an object, as json's `object_pairs_hook`; raise a DuplicateKeyError if a key occurs twice."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        keys = [key for key, _ in pairs]
        raise DuplicateKeyError(next(key for key in keys if keys.count(key) > 1))
    return fields


DECODER = json.JSONDecoder(object_pairs_hook=unique_keys)


def json_error(error: Exception) -> str:
    """Return the cause of an error of `json`, without its position: "unterminated string"."""
    if isinstance(error, json.JSONDecodeError):
        cause = error.msg.removesuffix(" at").removesuffix(" starting").rstrip(": ")
        cause = cause.replace("Expecting", "expected")
        return cause[:1].lower() + cause[1:]
    return "nested too deeply" if isinstance(error, RecursionError) else "a number with too many digits"


def json_problem(error: Exception, place: str = "") -> RowError:
    """Return the error of a row whose JSON raised an error of `json` or a DuplicateKeyError."""
    if isinstance(error, DuplicateKeyError):
        return RowError("duplicate-key", "a key appears twice", repr(str(error)))
    return RowError("invalid-json", "invalid JSON", json_error(error) + place)


def not_an_object(value: object) -> RowError:
    """Return the error of a row that is a JSON value other than an object."""
    detail = f"expected an object with the row's fields, got {json_type(value)}"
    return RowError("not-an-object", "not a JSON object", detail)


def line_not_utf8(error: UnicodeDecodeError) -> RowError:
    """Return the error of a row whose line is not UTF-8."""
    looks = _looks_like(error.object)
    guess = f"; the file looks like {looks}: save it as UTF-8" if looks else "; save the file as UTF-8"
    return RowError("not-utf8", "not UTF-8", _bad_byte(error) + guess)


def file_not_utf8(path: Path, error: UnicodeDecodeError, number: int) -> MegatuneError:
    """Return the error of a file whose `number`-th line (from 1) is not UTF-8."""
    why = f"the file looks like {looks}" if (looks := _looks_like(error.object)) else ""
    return unreadable(f"{path}:{number}", f"not UTF-8: {_bad_byte(error)}", why, "save the file as UTF-8")


def _bad_byte(error: UnicodeDecodeError) -> str:
    line, start = error.object, error.start
    return f"byte 0x{line[start]:02x} at column {len(line[:start].decode()) + 1}"


def _looks_like(line: bytes) -> str:
    if _NOT_WESTERN.search(line):
        return ""
    if not _CP1252_ONLY.search(line):
        return "latin-1"
    try:
        line.decode("cp1252")
    except UnicodeDecodeError:
        return ""
    return "cp1252"


def compression_suffix(path: Path) -> str | None:
    """Return ".gz" for "x.jsonl.gz"; None if the file is not compressed."""
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSIONS else None


def _content_suffix(path: Path) -> str:
    """Return the extension without that of a compression: ".jsonl" for "x.jsonl.gz"."""
    return (Path(path.stem) if compression_suffix(path) else path).suffix.lower()


def data_suffix(path: Path) -> str | None:
    """Return the type of a data file, ".jsonl" for "x.jsonl" and "x.jsonl.gz"; None for other extensions."""
    suffix = _content_suffix(path)
    return suffix if suffix in DATA_SUFFIXES else None


def unsupported_file(path: Path) -> MegatuneError:
    """Return the error for a file whose extension is not supported (exit code 66)."""
    suffix = _content_suffix(path)
    if suffix in _RUNS_CODE:
        what, why = f"{suffix} files are not supported", "loading one may run code that it contains"
        fix = "save the rows as .jsonl or .parquet"
    elif suffix == ".py":
        what, why = "scripts are not run", "reading data must not run code"
        fix = "run it yourself to write .jsonl or .parquet"
    elif suffix in _ARCHIVES:
        what, why, fix = "archives are not supported", "", "unpack it first"
    elif not suffix and compression_suffix(path):
        what, why = "the name does not state what is compressed", ""
        fix = f"add the type of its content, for example {path.stem}.jsonl{path.suffix}"
    else:
        what, why = "not a supported kind of data file", ""
        fix = f"one of {', '.join(DATA_SUFFIXES)}; all but .parquet and .arrow also with {', '.join(COMPRESSIONS)}"
    return MegatuneError(Finding(what, str(path), why, fix), ExitCode.INPUT)


@contextmanager
def open_bytes(path: Path, offset: int = 0) -> Iterator[BinaryIO]:
    """Open the decompressed bytes of a file from `offset` on; a compressed file is decompressed from its start.

    Raises:
        MegatuneError: also while reading: the file cannot be read (exit code 66), or is damaged or truncated (65).
    """
    compression = compression_suffix(path)
    try:
        with _stream(path, compression) as stream:
            if compression is None:
                stream.seek(offset)
            else:
                while offset:
                    offset -= len(stream.read(min(offset, BUFFER_BYTES))) or offset
            yield stream
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and (error.errno is not None or compression is None):
            raise _cannot_read(path, error) from error
        what = f"the {COMPRESSIONS.get(compression or '', '')} file is damaged or truncated"
        raise unreadable(path, what, str(error), "fetch or compress it again") from error


def lines_of(stream: BinaryIO, path: Path, number: int = 0) -> Iterator[bytes]:
    """Yield lines with their line ends; the first is line `number` + 1 of the file.

    Raises:
        MegatuneError: a line is longer than any row, which a small compressed file can contain (exit code 65).
    """
    while line := stream.readline(MAX_ROW_BYTES + 1):
        number += 1
        if len(line) > MAX_ROW_BYTES:
            raise row_too_long(f"{path}:{number}")
        yield line


def row_too_long(where: str) -> MegatuneError:
    """Return the error of a row that is too long."""
    return unreadable(where, f"a row of more than {MAX_ROW_BYTES >> 20} MiB", fix="check that the file has rows")


def check_content(path: Path) -> None:
    """Compare the first bytes of a file with its extension.

    Raises:
        MegatuneError: the file cannot be read (exit code 66), is empty, or has another type (65).
    """
    try:
        with open(path, "rb") as file:
            head = file.read(64)
    except OSError as error:
        raise _cannot_read(path, error) from error
    if not head:
        raise unreadable(path, "the file is empty", fix="write rows into it, or remove it from the data")
    expected = compression_suffix(path) or _content_suffix(path)
    found = next((suffix for suffix, (_, start) in _SIGNATURES.items() if re.match(start, head)), None)
    # A truncated parquet or arrow file is reported by its reader.
    known = expected in COMPRESSIONS or (expected == ".parquet" and not head.startswith(b"PAR1"))
    if found != expected and (found is not None or known):
        raise _wrong_content(path, expected, found)
    if expected in COMPRESSIONS:
        with open_bytes(path) as stream:
            if not stream.read(1):
                raise unreadable(path, "the file is empty", fix="write rows into it, or remove it from the data")


def _stream(path: Path, compression: str | None) -> BinaryIO:
    if compression is None:
        return open(path, "rb", BUFFER_BYTES)
    if compression in _OPENERS:
        raw = _OPENERS[compression](path)
    else:
        import pyarrow

        raw = pyarrow.input_stream(str(path), compression=COMPRESSIONS[compression])
    return io.BufferedReader(cast(io.RawIOBase, raw), BUFFER_BYTES)


def _wrong_content(path: Path, expected: str, found: str | None) -> MegatuneError:
    stated = COMPRESSIONS.get(expected, expected)
    base = path.with_suffix("") if expected in COMPRESSIONS else path
    if found is None:
        fix = f"name it {base.name} if it is not compressed" if expected in COMPRESSIONS else ""
        return unreadable(path, f"the name says {stated}, but the content is something else", fix=fix)
    if found == "":
        fix = "fetch the file itself: git lfs pull"
    elif found == ".zip":
        fix = "unpack it first"
    elif found not in COMPRESSIONS:
        fix = f"name it {base.with_suffix(found).name}"
    elif base.suffix.lower() in (".parquet", ".arrow"):
        fix = "decompress it first"
    else:
        fix = f"name it {base.name}{found}"
    return unreadable(path, f"the name says {stated}, but the content is {_SIGNATURES[found][0]}", fix=fix)


def _cannot_read(path: Path, error: OSError) -> MegatuneError:
    return MegatuneError(Finding(f"cannot read: {error.strerror or error}", str(path)), ExitCode.INPUT)
