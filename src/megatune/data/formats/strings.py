"""Rows of strings: alpaca (instruction, input, output), query_response (a query, a response), and text.

A column that `columns` names comes first; of a query, response or text else the first of its usual names that the row
has and that is not null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatune.data.bad_rows import RowError, UnsupportedRow
from megatune.data.conversation import Conversation, Message
from megatune.data.formats.fields import encodable, first_present, listed, optional_string, short, string, tools
from megatune.data.formats.form import QUERY_NAMES, RESPONSE_NAMES, SYSTEM_NAMES, TEXT_NAMES, Form


def conversation(row: Mapping[str, Any], form: Form) -> Conversation:
    """Read history, prompt and answer of an alpaca or query_response row; the history's answers are trained, too.

    Raises:
        RowError: a field is missing, of the wrong type or empty.
    """
    messages = prompt(row, form)
    messages.append(answer(row, _response_column(row, form)))
    return Conversation(tuple(messages), system(row, form), tools(row, form.columns.tools))


def prompt(row: Mapping[str, Any], form: Form) -> list[Message]:
    """Read the history, then the user's message: the query, or instruction and input with a line break between."""
    columns = form.columns
    messages = _history(row, columns.history)
    is_alpaca = form.formatting == "alpaca"
    name = (columns.prompt or "instruction") if is_alpaca else _named(row, columns.prompt, QUERY_NAMES)
    content, fields = string(row, name), f"field {name!r}"
    if is_alpaca and columns.query is not None and columns.query in row:
        fields = f"fields {name!r} and {columns.query!r}"
        if query := optional_string(row, columns.query):
            content = f"{content}\n{query}" if content else query
    if not content or content.isspace():
        raise RowError("empty-message", "an empty user message", fields)
    messages.append(Message("user", content))
    return messages


def answer(row: Mapping[str, Any], name: str) -> Message:
    """Read the assistant's message from a column of strings."""
    content = string(row, name)
    if not content or content.isspace():
        raise RowError("empty-message", "an empty assistant message", f"field {name!r}")
    return Message("assistant", content)


def system(row: Mapping[str, Any], form: Form) -> str:
    """Read the system message, "" where there is none."""
    names = SYSTEM_NAMES if form.formatting == "query_response" else ()
    return optional_string(row, first_present(row, (form.columns.system, *names)))


def text(row: Mapping[str, Any], form: Form) -> str:
    """Read the text of a row of stage pt: a column of text, alpaca's prompt column, or a response without a query.

    Raises:
        RowError: it is missing, of the wrong type or empty.
        UnsupportedRow: the row is a conversation.
    """
    columns = form.columns
    if form.formatting == "alpaca":
        name = columns.prompt or "instruction"
    elif form.formatting == "text":
        names = [name for name in (columns.prompt, *TEXT_NAMES) if name is not None]
        # Where there is none: one whose value is null, or the one that is expected first, for `string` to refuse.
        name = first_present(row, names) or next((name for name in names if name in row), names[0])
    elif form.formatting == "query_response":
        query = first_present(row, (columns.prompt, *QUERY_NAMES))
        if query is not None and row[query] != "":
            what = f"stage pt trains text, and field {query!r} is the query of a conversation"
            raise UnsupportedRow(what, "write stage: sft")
        name = _response_column(row, form)
    else:
        raise UnsupportedRow("stage pt trains text, and its rows are conversations", "write stage: sft")
    content = string(row, name)
    if not content or content.isspace():
        raise RowError("empty-text", "the text is empty", f"field {name!r}")
    return content


def _history(row: Mapping[str, Any], column: str | None) -> list[Message]:
    """Read earlier turns: a list of [question, answer] pairs."""
    pairs = row.get(column) if column else None
    if not pairs or column is None:
        return []
    if not isinstance(pairs, list):
        raise _bad_history(column, f"got {short(pairs)}")
    messages: list[Message] = []
    for number, pair in enumerate(pairs, start=1):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise _bad_history(column, f"pair {number} is {short(pair)}")
        question, answer = (encodable(text, column, f"pair {number}") for text in pair)
        for role, text in (("user", question), ("assistant", answer)):
            if not text.strip():
                raise RowError("empty-message", f"an empty {role} message", f"field {column!r}, pair {number}")
        messages += [Message("user", question), Message("assistant", answer)]
    return messages


def _bad_history(column: str, detail: str) -> RowError:
    return RowError("bad-history", f"field {column!r}: expected a list of [question, answer] pairs", detail)


def _response_column(row: Mapping[str, Any], form: Form) -> str:
    if form.formatting == "alpaca":
        return form.columns.response or "output"
    return _named(row, form.columns.response, RESPONSE_NAMES)


def _named(row: Mapping[str, Any], column: str | None, names: Sequence[str]) -> str:
    if (found := first_present(row, (column, *names))) is not None:
        return found
    # Null is all there is: `string` says so, naming the field.
    for name in (column, *names):
        if name is not None and name in row:
            return name
    detail = f"expected one of {', '.join(names)}; the row has {listed(row)}"
    raise RowError("missing-field", f"field {names[0]!r} is missing", detail)
