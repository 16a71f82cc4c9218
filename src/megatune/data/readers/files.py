"""Data files and their rows: kinds by name, bytes (compressed or not), places, and what can be wrong with them."""

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
MOST_ROW_BYTES = 2**29  # 512 MiB, pictures and videos in it included
COMPRESSIONS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd", ".lz4": "lz4"}

_RUNS_CODE = frozenset((".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt", ".joblib", ".npy", ".npz"))
_ARCHIVES = frozenset((".zip", ".tar", ".tgz", ".tbz2", ".txz", ".7z", ".rar"))

_OPENERS: dict[str, Callable[[Path], object]] = {".gz": gzip.GzipFile, ".bz2": bz2.BZ2File, ".xz": lzma.LZMAFile}

_CONTENTS = {  # name and first bytes of kinds that can be detected by them; no text begins so
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

# Long runs are of other encodings (GBK, Shift-JIS), a leading byte and its follower of UTF-8 that was cut.
_NOT_WESTERN = re.compile(rb"[\x80-\xff]{4}|[\xc2-\xf4][\x80-\xbf]")
_CP1252_ONLY = re.compile(rb"[\x80-\x9f]")
_JSON_NAMES = {bool: "a boolean", str: "a string", int: "a number", float: "a number", list: "a list",
               dict: "an object"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a file from which reading can continue.

    Attributes:
        row: number of rows before it.
        offset: bytes before it in a file of lines (of the decompressed text where the file is compressed); 0 elsewhere.
        line: lines before it in a file of lines; 0 elsewhere.
    """

    row: int
    offset: int = 0
    line: int = 0


@dataclass(slots=True)  # not frozen: that would double the time to make one
class RawRow:
    """One row of a file as it was read.

    Attributes:
        where: "FILE:LINE" for files of lines and CSV (the line it begins on), "FILE:row N" (from 1) for others.
        fields: the row's columns; empty where there is an `error`.
        error: why the row cannot be read, None where it can.
        raw: the text of a row that cannot be read, with bytes that are no UTF-8 as \\xNN; "" where it can.
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
    """Return the error that ends the reading of a file (exit code 65)."""
    return MegatuneError(Finding(what, str(where), why, fix), ExitCode.DATA)


class DuplicateKeyError(ValueError):
    """A JSON object has a key twice, so that one of the two values would be lost silently."""


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build an object, as json's `object_pairs_hook`; a DuplicateKeyError where a key occurs twice."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        keys = [key for key, _ in pairs]
        raise DuplicateKeyError(next(key for key in keys if keys.count(key) > 1))
    return fields


DECODER = json.JSONDecoder(object_pairs_hook=unique_keys)


def json_error(error: Exception) -> str:
    """Return the cause of one of json's errors, without its place: "unterminated string"."""
    if isinstance(error, json.JSONDecodeError):
        cause = error.msg.removesuffix(" at").removesuffix(" starting").rstrip(": ")
        cause = cause.replace("Expecting", "expected")
        return cause[:1].lower() + cause[1:]
    return "nested too deep" if isinstance(error, RecursionError) else "a number with too many digits"


def json_problem(error: Exception, place: str = "") -> RowError:
    """Return the problem of a row whose JSON raised an error of json's or a DuplicateKeyError."""
    if isinstance(error, DuplicateKeyError):
        return RowError("duplicate-key", "a key appears twice", repr(str(error)))
    return RowError("invalid-json", "invalid JSON", json_error(error) + place)


def not_an_object(value: object) -> RowError:
    """Return the problem of a row that is another JSON value."""
    detail = f"expected an object with the row's fields, got {json_type(value)}"
    return RowError("not-an-object", "not a JSON object", detail)


def line_not_utf8(error: UnicodeDecodeError) -> RowError:
    """Return the problem of a row whose line is not UTF-8."""
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
    """Return ".gz" for "x.jsonl.gz", None where the file is not compressed."""
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSIONS else None


def _content_suffix(path: Path) -> str:
    """Return the extension, without that of a compression: ".jsonl" for "x.jsonl.gz"."""
    return (Path(path.stem) if compression_suffix(path) else path).suffix.lower()


def data_suffix(path: Path) -> str | None:
    """Return the kind of a data file, ".jsonl" for "x.jsonl" and "x.jsonl.gz"; None where the name says it is none."""
    suffix = _content_suffix(path)
    return suffix if suffix in DATA_SUFFIXES else None


def refused(path: Path) -> MegatuneError:
    """Return the reason why a file that is no data file by its name is not read (exit code 66)."""
    suffix = _content_suffix(path)
    if suffix in _RUNS_CODE:
        what, why = f"{suffix} files are not read", "loading one may run code that it contains"
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
        what, why = "not a supported kind of data file", ""
        fix = f"one of {', '.join(DATA_SUFFIXES)}; but for .parquet and .arrow also with {', '.join(COMPRESSIONS)}"
    return MegatuneError(Finding(what, str(path), why, fix), ExitCode.INPUT)


@contextmanager
def open_bytes(path: Path, offset: int = 0) -> Iterator[BinaryIO]:
    """Open the decompressed bytes of a file from `offset` on; in a compressed file those before are read and dropped.

    Raises:
        MegatuneError: while reading too: the file cannot be read (exit code 66), is damaged or truncated (65).
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
    """Yield lines with their ends, of which the first is the file's line `number` + 1.

    Raises:
        MegatuneError: one is longer than any row, as the little that is compressed can be (exit code 65).
    """
    while line := stream.readline(MOST_ROW_BYTES + 1):
        number += 1
        if len(line) > MOST_ROW_BYTES:
            raise too_long(f"{path}:{number}")
        yield line


def too_long(where: str) -> MegatuneError:
    """Return the error of a row that is longer than any."""
    return unreadable(where, f"a row of more than {MOST_ROW_BYTES >> 20} MiB", fix="check that the file has rows")


def check_content(path: Path) -> None:
    """Compare the first bytes of a file with what its name says.

    Raises:
        MegatuneError: the file cannot be read (exit code 66), is empty, or holds something else (65).
    """
    try:
        with open(path, "rb") as file:
            head = file.read(64)
    except OSError as error:
        raise _cannot_read(path, error) from error
    if not head:
        raise unreadable(path, "the file is empty", fix="write rows into it, or remove it from the data")
    expected = compression_suffix(path) or _content_suffix(path)
    found = next((suffix for suffix, (_, start) in _CONTENTS.items() if re.match(start, head)), None)
    # A truncated parquet or arrow file is for their reader to name.
    known = expected in COMPRESSIONS or (expected == ".parquet" and not head.startswith(b"PAR1"))
    if found != expected and (found is not None or known):
        raise _something_else(path, expected, found)
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


def _something_else(path: Path, expected: str, found: str | None) -> MegatuneError:
    said = COMPRESSIONS.get(expected, expected)
    base = path.with_suffix("") if expected in COMPRESSIONS else path
    if found is None:
        fix = f"name it {base.name} if it is not compressed" if expected in COMPRESSIONS else ""
        return unreadable(path, f"the name says {said}, the content is something else", fix=fix)
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
    return unreadable(path, f"the name says {said}, the content is {_CONTENTS[found][0]}", fix=fix)


def _cannot_read(path: Path, error: OSError) -> MegatuneError:
    return MegatuneError(Finding(f"cannot read: {error.strerror or error}", str(path)), ExitCode.INPUT)
