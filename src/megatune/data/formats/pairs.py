"""Preference pairs: one prompt, the answer that is preferred and the one that is not.

The prompt is that of the row's form: alpaca's instruction, input and history, a query, or messages. Each answer is a
string, a message, a list of one message, or a whole conversation whose last message it is; whole conversations must
agree in all but that. Where the row has no chosen answer, the row's own is: the response, or the last message if it is
the assistant's (ms-swift's form).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatune.data.bad_rows import RowError
from megatune.data.conversation import Message, Pair
from megatune.data.formats import alpaca, query_response
from megatune.data.formats.chat import Chat, check_turns, is_empty, messages_of, one_message
from megatune.data.formats.fields import first_present, listed, optional_string, string
from megatune.data.formats.tool_calls import tools
from megatune.data.readers import json_type
from megatune.data.sources import DatasetSource

# ms-swift's names, after the column that `columns` names.
REJECTED_NAMES = ("rejected_response", "rejected_messages")


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer of a pair.

    Attributes:
        before: what it answers, where the row says it with the answer.
        column: the field it is from.
    """

    message: Message
    before: Chat | None
    column: str


def pair(row: Mapping[str, Any], source: DatasetSource) -> Pair:
    """A row as prompt, chosen and rejected answer.

    Raises:
        RowError: one of them is missing or malformed, or the answers are the same.
        UnsupportedRow: a message has an image, a video or audio.
    """
    rejected = _rejected(row, source)
    chosen = _chosen(row, source)
    if source.formatting in ("sharegpt", "openai"):
        own = _own_messages(row, source)
        if chosen is None:
            own, chosen = _own_answer(own, row, source)
        stated = [chat for chat in (own, chosen.before, rejected.before) if chat is not None]
    else:
        chosen = chosen or _own_response(row, source)
        # A string next to whole conversations repeats what they begin with.
        stated = [chat for chat in (chosen.before, rejected.before) if chat is not None] or [_own_prompt(row, source)]
    if not stated:
        column = source.columns.messages or "messages"
        raise RowError("missing-field", f"field {column!r} is missing", f"the row has {listed(row)}")
    prompt = _agreed(stated, source)
    for answer in (chosen, rejected):
        if is_empty(answer.message):
            raise RowError("empty-message", "an empty assistant message", f"field {answer.column!r}")
    if (chosen.message.content, chosen.message.tool_calls) == (rejected.message.content, rejected.message.tool_calls):
        raise RowError("same-answers", "chosen and rejected are the same")
    system = _system(row, source) if prompt.system is None else prompt.system
    return Pair(prompt.messages, chosen.message, rejected.message, system, tools(row, source.columns.tools))


def _chosen(row: Mapping[str, Any], source: DatasetSource) -> _Answer | None:
    column = source.columns.chosen
    return None if column is None or row.get(column) is None else _answer(row, column, source)


def _rejected(row: Mapping[str, Any], source: DatasetSource) -> _Answer:
    column = first_present(row, (source.columns.rejected, *REJECTED_NAMES))
    if column is None:
        name = source.columns.rejected or REJECTED_NAMES[0]
        if name in row:
            raise RowError("null-content", f"field {name!r} is null")
        raise RowError("missing-field", f"field {name!r} is missing", f"the row has {listed(row)}")
    return _answer(row, column, source)


def _answer(row: Mapping[str, Any], column: str, source: DatasetSource) -> _Answer:
    value = row[column]
    if isinstance(value, str):
        return _Answer(Message("assistant", string(row, column)), None, column)
    if isinstance(value, dict):
        return _Answer(one_message(value, column, 0, source), None, column)
    if not isinstance(value, list):
        reason = f"field {column!r}: expected a string, a message or a list of messages, got {json_type(value)}"
        raise RowError("wrong-type", reason)
    if len(value) == 1 and isinstance(value[0], dict):
        return _Answer(one_message(value[0], column, 1, source), None, column)
    chat = messages_of(row, column, source)
    if len(chat.messages) == 1:
        raise RowError("answer-without-prompt", f"field {column!r}: a system message and an answer, and no question")
    *before, last = chat.messages
    if last.role != "assistant":
        detail = f"field {column!r}: message {len(value)} has role {value[-1][source.tags.role_tag]!r}"
        raise RowError("answer-not-assistant", "an answer is not the assistant's", detail)
    return _Answer(last, Chat(chat.system, tuple(before)), column)


def _own_messages(row: Mapping[str, Any], source: DatasetSource) -> Chat | None:
    """The messages beside the answers; None where the answers are whole conversations and there are none."""
    column = source.columns.messages
    return messages_of(row, column, source) if column is not None and row.get(column) is not None else None


def _own_answer(chat: Chat | None, row: Mapping[str, Any], source: DatasetSource) -> tuple[Chat, _Answer]:
    """The last message as the chosen answer, and what is before it."""
    if chat is None or len(chat.messages) < 2 or chat.messages[-1].role != "assistant":
        column = source.columns.chosen or "chosen"
        raise RowError("missing-field", f"field {column!r} is missing", f"the row has {listed(row)}")
    *before, last = chat.messages
    return Chat(chat.system, tuple(before)), _Answer(last, None, source.columns.messages or "messages")


def _own_prompt(row: Mapping[str, Any], source: DatasetSource) -> Chat:
    prompt = alpaca.prompt if source.formatting == "alpaca" else query_response.prompt
    return Chat(None, tuple(prompt(row, source.columns)))


def _own_response(row: Mapping[str, Any], source: DatasetSource) -> _Answer:
    columns = source.columns
    names = (columns.response, *(() if source.formatting == "alpaca" else query_response.RESPONSE_NAMES))
    column = first_present(row, names)
    if column is None:
        name = columns.chosen or columns.response or "chosen"
        if name in row:
            raise RowError("null-content", f"field {name!r} is null")
        raise RowError("missing-field", f"field {name!r} is missing", f"the row has {listed(row)}")
    return _Answer(alpaca.answer(row, column), None, column)


def _agreed(stated: list[Chat], source: DatasetSource) -> Chat:
    """The one prompt that all of the row's fields give."""
    first = stated[0]
    check_turns(first, source.tags)
    if first.messages[-1].role == "assistant":
        reason = "the prompt ends with the assistant's message"
        number = len(first.messages) + (first.system is not None)
        raise RowError("prompt-ends-with-answer", reason, f"message {number} is {source.tags.assistant_tag!r}")
    for other in stated[1:]:
        if other != first:
            raise RowError(
                "different-prompts", "chosen and rejected answer different prompts", _difference(first, other)
            )
    return first


def _difference(one: Chat, other: Chat) -> str:
    if (one.system or "") != (other.system or "") or (one.system is None) != (other.system is None):
        return "the system messages differ"
    offset = 1 if one.system is None else 2
    for index, (left, right) in enumerate(zip(one.messages, other.messages, strict=False)):
        if left != right:
            return f"message {index + offset} differs"
    return f"{len(one.messages)} and {len(other.messages)} messages before the answers"


def _system(row: Mapping[str, Any], source: DatasetSource) -> str:
    if source.formatting == "query_response":
        return query_response.system(row, source.columns)
    return optional_string(row, source.columns.system)
