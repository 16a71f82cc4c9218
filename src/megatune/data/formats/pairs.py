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
from megatune.data.conversation import Message, PreferencePair
from megatune.data.formats import strings
from megatune.data.formats.fields import first_present, listed, string, tools
from megatune.data.formats.form import REJECTED_NAMES, RESPONSE_NAMES, Form
from megatune.data.formats.messages import Messages, check_turns, is_empty, messages_of, one_message
from megatune.data.readers import json_type


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer of a pair, and the field it is from.

    Attributes:
        before: the conversation that it answers, where the row has both in one field.
    """

    message: Message
    before: Messages | None
    column: str


def preference_pair(row: Mapping[str, Any], form: Form) -> PreferencePair:
    """Read a row as prompt, chosen and rejected answer.

    Raises:
        RowError: one of them is missing or malformed, or the answers are the same.
        UnsupportedRow: a message has an image, a video or audio.
    """
    columns = form.columns
    name = first_present(row, (columns.rejected, *REJECTED_NAMES))
    if name is None:
        raise _missing(columns.rejected or REJECTED_NAMES[0], row)
    rejected = _answer(row, name, form)
    name = first_present(row, (columns.chosen,))
    chosen = None if name is None else _answer(row, name, form)
    if form.formatting in ("sharegpt", "openai"):
        name = first_present(row, (columns.messages,))
        own = None if name is None else messages_of(row, name, form)
        if chosen is None:
            own, chosen = _own_answer(own, row, form)
        stated = [chat for chat in (own, chosen.before, rejected.before) if chat is not None]
    else:
        chosen = chosen or _own_response(row, form)
        # A string next to whole conversations repeats what they begin with.
        stated = [chat for chat in (chosen.before, rejected.before) if chat is not None]
        stated = stated or [Messages(None, tuple(strings.prompt(row, form)))]
    if not stated:
        name = columns.messages or "messages"
        raise RowError("missing-field", f"field {name!r} is missing", f"the row has {listed(row)}")
    prompt = _agreed(stated, form)
    for answer in (chosen, rejected):
        if is_empty(answer.message):
            raise RowError("empty-message", "an empty assistant message", f"field {answer.column!r}")
    if (chosen.message.content, chosen.message.tool_calls) == (rejected.message.content, rejected.message.tool_calls):
        raise RowError("same-answers", "chosen and rejected are the same")
    system = strings.system(row, form) if prompt.system is None else prompt.system
    return PreferencePair(prompt.messages, chosen.message, rejected.message, system, tools(row, columns.tools))


def _missing(name: str, row: Mapping[str, Any]) -> RowError:
    if name in row:
        return RowError("null-content", f"field {name!r} is null")
    return RowError("missing-field", f"field {name!r} is missing", f"the row has {listed(row)}")


def _answer(row: Mapping[str, Any], column: str, form: Form) -> _Answer:
    value = row[column]
    if isinstance(value, str):
        return _Answer(Message("assistant", string(row, column)), None, column)
    if isinstance(value, dict):
        return _Answer(one_message(value, column, 0, form), None, column)
    if not isinstance(value, list):
        reason = f"field {column!r}: expected a string, a message or a list of messages, got {json_type(value)}"
        raise RowError("wrong-type", reason)
    if len(value) == 1 and isinstance(value[0], dict):
        return _Answer(one_message(value[0], column, 1, form), None, column)
    chat = messages_of(row, column, form)
    if len(chat.messages) == 1:
        raise RowError("answer-without-prompt", f"field {column!r}: a system message and an answer, and no question")
    *before, last = chat.messages
    if last.role != "assistant":
        detail = f"field {column!r}: message {len(value)} has role {value[-1][form.tags.role_tag]!r}"
        raise RowError("answer-not-assistant", "an answer is not the assistant's", detail)
    return _Answer(last, Messages(chat.system, tuple(before)), column)


def _own_answer(chat: Messages | None, row: Mapping[str, Any], form: Form) -> tuple[Messages, _Answer]:
    """Take the row's last message as the chosen answer; return what is before it, and the answer."""
    if chat is None or len(chat.messages) < 2 or chat.messages[-1].role != "assistant":
        column = form.columns.chosen or "chosen"
        raise RowError("missing-field", f"field {column!r} is missing", f"the row has {listed(row)}")
    *before, last = chat.messages
    return Messages(chat.system, tuple(before)), _Answer(last, None, form.columns.messages or "messages")


def _own_response(row: Mapping[str, Any], form: Form) -> _Answer:
    names = () if form.formatting == "alpaca" else RESPONSE_NAMES
    column = first_present(row, (form.columns.response, *names))
    if column is None:
        raise _missing(form.columns.chosen or form.columns.response or "chosen", row)
    return _Answer(strings.answer(row, column), None, column)


def _agreed(stated: list[Messages], form: Form) -> Messages:
    """Return the one prompt that all of the row's fields give."""
    first = stated[0]
    check_turns(first, form.tags)
    if first.messages[-1].role == "assistant":
        number = len(first.messages) + (first.system is not None)
        reason = "the prompt ends with the assistant's message"
        raise RowError("prompt-ends-with-answer", reason, f"message {number} is {form.tags.assistant_tag!r}")
    for other in stated[1:]:
        if other != first:
            reason = "chosen and rejected answer different prompts"
            raise RowError("different-prompts", reason, _difference(first, other))
    return first


def _difference(one: Messages, other: Messages) -> str:
    if one.system != other.system:
        return "the system messages differ"
    offset = 1 if one.system is None else 2
    for index, (left, right) in enumerate(zip(one.messages, other.messages, strict=False)):
        if left != right:
            return f"message {index + offset} differs"
    return f"{len(one.messages)} and {len(other.messages)} messages before the answers"
