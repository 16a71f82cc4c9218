"""What is wrong with bytes that are no UTF-8, and with text that is no JSON, in words for users."""

from __future__ import annotations

import json
import re
from pathlib import Path

from megatune.data.readers.row import json_type, unreadable
from megatune.data.row_error import RowError
from megatune.errors import MegatuneError

UTF8_BOM = b"\xef\xbb\xbf"
UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")

# Long runs are of other encodings (GBK, Shift-JIS), a leading byte and its follower of UTF-8 that was cut.
_NOT_WESTERN = re.compile(rb"[\x80-\xff]{4}|[\xc2-\xf4][\x80-\xbf]")
_CP1252_ONLY = re.compile(rb"[\x80-\x9f]")


class DuplicateKeyError(ValueError):
    """A JSON object has a key twice, so that one of the two values would be lost without a word."""


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """For json's `object_pairs_hook`.

    Raises:
        DuplicateKeyError: a key occurs twice.
    """
    fields = dict(pairs)
    if len(fields) != len(pairs):
        keys = [key for key, _ in pairs]
        raise DuplicateKeyError(next(key for key in keys if keys.count(key) > 1))
    return fields


DECODER = json.JSONDecoder(object_pairs_hook=unique_keys)


def json_error(error: Exception) -> str:
    """The cause of an error of json's, without its place: "unterminated string"."""
    if isinstance(error, json.JSONDecodeError):
        cause = error.msg.removesuffix(" at").removesuffix(" starting").rstrip(": ")
        cause = cause.replace("Expecting", "expected")
        return cause[:1].lower() + cause[1:]
    return "nested too deep" if isinstance(error, RecursionError) else "a number of too many digits"


def key_twice(error: DuplicateKeyError) -> RowError:
    return RowError("duplicate-key", "a key twice", repr(str(error)))


def not_an_object(value: object) -> RowError:
    detail = f"expected an object with the row's fields, got {json_type(value)}"
    return RowError("not-an-object", "not a JSON object", detail)


def has_nul(text: str) -> RowError:
    return RowError("nul-bytes", "the row has NUL bytes", f"the first at column {text.index(chr(0)) + 1}")


def line_not_utf8(line: bytes) -> RowError:
    looks = _looks_like(line)
    guess = f"; the file looks like {looks}: save it as UTF-8" if looks else "; save the file as UTF-8"
    return RowError("not-utf8", "not UTF-8", _bad_byte(line) + guess)


def file_not_utf8(path: Path, line: bytes, number: int) -> MegatuneError:
    """Ends the reading of a file whose `line`, the `number`-th (from 1), is no UTF-8."""
    looks = _looks_like(line)
    return unreadable(
        f"{path}:{number}",
        f"not UTF-8: {_bad_byte(line)}",
        f"the file looks like {looks}" if looks else "",
        "save the file as UTF-8",
    )


def _bad_byte(line: bytes) -> str:
    try:
        line.decode()
    except UnicodeDecodeError as error:
        return f"byte 0x{line[error.start]:02x} at column {len(line[: error.start].decode()) + 1}"
    raise ValueError("the line is UTF-8")


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
