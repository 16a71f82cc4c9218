"""Kinds of data files by their names, and their bytes: compressed or not, and whether they are what the name says."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from megatune.data.readers.row import unreadable
from megatune.errors import ExitCode, Finding, MegatuneError

BUFFER_BYTES = 1 << 20

DATA_SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
COLUMNAR = (".parquet", ".arrow")
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
        fix = f"one of {', '.join(DATA_SUFFIXES)}; but for .parquet and .arrow also with {', '.join(COMPRESSIONS)}"
    return MegatuneError(Finding(what, str(path), why, fix), ExitCode.INPUT)


@contextmanager
def open_bytes(path: Path, offset: int = 0) -> Iterator[BinaryIO]:
    """Open the decompressed bytes of a file from `offset` on; in a compressed file those before are read and dropped.

    Raises:
        MegatuneError: while reading too: the file cannot be read (exit code 66), is damaged or breaks off (65).
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
    except OSError as error:
        if error.errno is not None or compression is None:
            raise _cannot_read(path, error) from error
        raise _damaged(path, compression, error) from error
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise _damaged(path, compression or "", error) from error


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
        raise unreadable(path, "the file is empty")
    expected = compression_suffix(path) or _content_suffix(path)
    found = next((suffix for suffix, (_, start) in _CONTENTS.items() if re.match(start, head)), None)
    # A truncated parquet or arrow file is for their reader to name.
    known = expected in COMPRESSIONS or (expected == ".parquet" and not head.startswith(b"PAR1"))
    if found != expected and (found is not None or known):
        raise _something_else(path, expected, found)
    if expected in COMPRESSIONS:
        with open_bytes(path) as stream:
            if not stream.read(1):
                raise unreadable(path, "the file is empty")


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


def _damaged(path: Path, compression: str, error: Exception) -> MegatuneError:
    name = COMPRESSIONS.get(compression, compression)
    return unreadable(path, f"the {name} file is damaged or breaks off", str(error), "fetch or compress it again")
