"""The query/response form: one string asks, one answers, under any of the names that data sets give them.

A column that `columns` names comes first; else the first of the names below that the row has, and that is not null.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatune.data.bad_rows import RowError
from megatune.data.conversation import Conversation, Message
from megatune.data.formats.alpaca import answer, history
from megatune.data.formats.fields import first_present, listed, optional_string, string
from megatune.data.formats.tool_calls import tools
from megatune.data.sources import Columns

# In order of precedence.
QUERY_NAMES = ("query", "prompt", "input", "instruction", "question", "problem")
RESPONSE_NAMES = ("response", "answer", "output", "target", "solution", "completion")
SYSTEM_NAMES = ("system", "system_prompt")


def conversation(row: Mapping[str, Any], columns: Columns) -> Conversation:
    """History, the query and the response.

    Raises:
        RowError: a field is missing, of the wrong type or empty.
    """
    messages = prompt(row, columns)
    messages.append(answer(row, response_column(row, columns)))
    return Conversation(tuple(messages), system(row, columns), tools(row, columns.tools))


def prompt(row: Mapping[str, Any], columns: Columns) -> list[Message]:
    """History, then the query."""
    messages = history(row, columns.history)
    name = _named(row, columns.prompt, QUERY_NAMES)
    content = string(row, name)
    if not content or content.isspace():
        raise RowError("empty-message", "an empty user message", f"field {name!r}")
    messages.append(Message("user", content))
    return messages


def system(row: Mapping[str, Any], columns: Columns) -> str:
    """The system message, "" where there is none."""
    return optional_string(row, first_present(row, (columns.system, *SYSTEM_NAMES)))


def query_column(row: Mapping[str, Any], columns: Columns) -> str | None:
    """The column of the query, None where the row has none."""
    return first_present(row, (columns.prompt, *QUERY_NAMES))


def response_column(row: Mapping[str, Any], columns: Columns) -> str:
    """The column of the response.

    Raises:
        RowError: the row has none.
    """
    return _named(row, columns.response, RESPONSE_NAMES)


def _named(row: Mapping[str, Any], column: str | None, names: tuple[str, ...]) -> str:
    if (found := first_present(row, (column, *names))) is not None:
        return found
    # Null is all there is: `string` says so, naming the field.
    for name in (column, *names):
        if name is not None and name in row:
            return name
    expected = ", ".join(names)
    detail = f"expected one of {expected}; the row has {listed(row)}"
    raise RowError("missing-field", f"field {names[0]!r} is missing", detail)
