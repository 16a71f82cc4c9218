"""Fields of a row: what is there, of the right type, and can be encoded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatune.data.bad_rows import RowError, UnsupportedRow
from megatune.data.readers import json_type
from megatune.data.sources import Columns


def refuse_media(row: Mapping[str, Any], columns: Columns) -> None:
    """A row with pictures, films or sound cannot be trained on without them.

    Raises:
        UnsupportedRow: it has some.
    """
    for kind, column in (("images", columns.images), ("videos", columns.videos), ("audio", columns.audios)):
        if column is not None and row.get(column):
            raise UnsupportedRow(f"field {column!r}: training on {kind} is not built")


def string(row: Mapping[str, Any], name: str, column: str = "", number: int = 0) -> str:
    """A required string.

    Args:
        column, number: the column of the message that `row` is, and its number in it from 1; 0 where the column has
            one message and no list.

    Raises:
        RowError: it is missing, null, not a string, or has characters that cannot be encoded.
    """
    value = row.get(name)
    # Almost every string of almost every file passes here.
    if type(value) is str and value.isascii() and "\0" not in value:
        return value
    owner = f"{column}[].{name}" if number else f"{column}.{name}" if column else name
    place = f"message {number}" if number else ""
    if name not in row:
        raise RowError("missing-field", f"field {owner!r} is missing", f"{place or 'the row'} has {listed(row)}")
    if value is None:
        raise RowError("null-content", f"field {owner!r} is null", place)
    if not isinstance(value, str):
        raise RowError("wrong-type", f"field {owner!r}: expected a string, got {json_type(value)}", place)
    return encodable(value, owner, place)


def optional_string(row: Mapping[str, Any], name: str | None) -> str:
    """A string, "" where the column is off, missing or null."""
    if name is None or row.get(name) is None:
        return ""
    return string(row, name)


def encodable(text: str, owner: str, place: str = "") -> str:
    """The text itself, if a tokenizer can take it: JSON can spell half of a surrogate pair.

    Args:
        owner: the field it is in, for the error.
        place: where in that field, "" where there is nothing to say.

    Raises:
        RowError: it has half of a surrogate pair, or a NUL character.
    """
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            detail = _at_character(place, error.start)
            raise RowError("lone-surrogate", f"field {owner!r}: half of a surrogate pair", detail) from error
    if "\0" in text:
        detail = _at_character(place, text.index("\0"))
        raise RowError("nul-character", f"field {owner!r}: a NUL character", detail)
    return text


def encodable_json(value: object, owner: str, place: str = "") -> None:
    """Check every string of a JSON value. NUL is none of the problems: templates write such values as JSON, escaped.

    Raises:
        RowError: a string has half of a surrogate pair, or objects are nested too deep to be written.
    """
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError("lone-surrogate", f"field {owner!r}: half of a surrogate pair", place) from error
    except RecursionError as error:
        raise RowError("wrong-type", f"field {owner!r}: objects in objects without end", place) from error


def first_present(row: Mapping[str, Any], names: Sequence[str | None]) -> str | None:
    """The first of the names whose field is there and not null."""
    return next((name for name in names if name is not None and row.get(name) is not None), None)


def listed(row: Mapping[str, Any]) -> str:
    """The names of a row's fields, for messages."""
    return ", ".join(map(repr, row)) or "no fields"


def short(value: object) -> str:
    """A value as JSON, cut to fit a message."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):
        text = repr(value)
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= 80 else f"{text[:77]}..."


def _at_character(place: str, index: int) -> str:
    return f"{place}, character {index + 1}" if place else f"character {index + 1}"
