"""The alpaca form: instruction, input, output, and optionally history, system and tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatune.data.bad_rows import RowError
from megatune.data.conversation import Conversation, Message
from megatune.data.formats.fields import encodable, optional_string, short, string
from megatune.data.formats.tool_calls import tools
from megatune.data.sources import Columns


def conversation(row: Mapping[str, Any], columns: Columns) -> Conversation:
    """History, the prompt and its answer; the answers of the history are trained, too.

    Raises:
        RowError: a field is missing, of the wrong type or empty.
    """
    messages = prompt(row, columns)
    messages.append(answer(row, columns.response or "output"))
    return Conversation(tuple(messages), optional_string(row, columns.system), tools(row, columns.tools))


def prompt(row: Mapping[str, Any], columns: Columns) -> list[Message]:
    """History, then instruction and input as one user's message, a line break between them."""
    messages = history(row, columns.history)
    name = columns.prompt or "instruction"
    content = string(row, name)
    if query := optional_string(row, columns.query):
        content = f"{content}\n{query}" if content else query
    if not content or content.isspace():
        both = columns.query is not None and columns.query in row
        fields = f"fields {name!r} and {columns.query!r}" if both else f"field {name!r}"
        raise RowError("empty-message", "an empty user message", fields)
    messages.append(Message("user", content))
    return messages


def answer(row: Mapping[str, Any], name: str) -> Message:
    """The assistant's message of a column of strings."""
    content = string(row, name)
    if not content or content.isspace():
        raise RowError("empty-message", "an empty assistant message", f"field {name!r}")
    return Message("assistant", content)


def history(row: Mapping[str, Any], column: str | None) -> list[Message]:
    """Earlier turns: a list of [question, answer] pairs."""
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
