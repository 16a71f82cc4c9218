"""Text to pretrain on: a column of text, alpaca's prompt column, or an answer to nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatune.data.bad_rows import RowError, UnsupportedRow
from megatune.data.formats.fields import first_present, string
from megatune.data.formats.query_response import query_column, response_column
from megatune.data.sources import DatasetSource

# In order of precedence, after the prompt column that `columns` names.
TEXT_NAMES = ("text", "content")


def text(row: Mapping[str, Any], source: DatasetSource) -> str:
    """The text of a row, of stage pt.

    Raises:
        RowError: it is missing, of the wrong type or empty.
        UnsupportedRow: the row is a conversation.
    """
    name = _column(row, source)
    content = string(row, name)
    if not content or content.isspace():
        raise RowError("empty-text", "the text is empty", f"field {name!r}")
    return content


def _column(row: Mapping[str, Any], source: DatasetSource) -> str:
    columns = source.columns
    if source.formatting == "alpaca":
        return columns.prompt or "instruction"
    if source.formatting == "text":
        return first_present(row, (columns.prompt, *TEXT_NAMES)) or _unfound(row, columns.prompt)
    if source.formatting == "query_response":
        query = query_column(row, columns)
        if query is not None and row[query] != "":
            what = f"stage pt trains text, and field {query!r} is the query of a conversation"
            raise UnsupportedRow(what, "write stage: sft")
        return response_column(row, columns)
    raise UnsupportedRow("stage pt trains text, and its rows are conversations", "write stage: sft")


def _unfound(row: Mapping[str, Any], column: str | None) -> str:
    """The name to complain about: one whose value is null, or the one that is expected first."""
    names = [name for name in (column, *TEXT_NAMES) if name is not None]
    return next((name for name in names if name in row), names[0])
