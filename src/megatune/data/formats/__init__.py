"""Convert rows of every supported format to examples: a text, a conversation or a preference pair.

`messages` reads messages; rows of strings are read here: alpaca (instruction, input, output), query_response and text.
The column that `columns` names takes precedence; for a query, response or text, otherwise the first of its known names
that the row has with a value other than null. docs/data-formats.md lists the errors of rows.

A preference pair has one prompt, in the row's format: alpaca's instruction, input and history, a query, or messages.
Each answer is a string, a message, a list of one message, or a whole conversation that ends with it; whole
conversations must agree in everything else. If the row has no chosen answer, its response is used, or its last message
if that is the assistant's (ms-swift's format).

An unpaired preference (kto) is a conversation with a boolean. The answer may be in a response column instead of the
messages (TRL's prompt and completion).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megatune.config.groups.run import PAIR_STAGES
from megatune.data.bad_rows import RowError, UnsupportedRow
from megatune.data.conversation import Conversation, Example, Message, PreferencePair, texts
from megatune.data.formats import messages
from megatune.data.formats.fields import (
    check_no_tags,
    encodable,
    extract_media,
    field_names,
    first_present,
    margin,
    optional_string,
    short,
    string,
    tools,
)
from megatune.data.formats.form import QUERY_NAMES, REJECTED_NAMES, RESPONSE_NAMES, SYSTEM_NAMES, TEXT_NAMES, Form
from megatune.data.formats.labels import Labels
from megatune.data.formats.messages import Messages, answer_message, check_turns, is_empty, messages_of
from megatune.data.formats.swift import to_swift_example
from megatune.data.readers import json_type

# ms-swift's tags for objects in an image and their boxes, which its `objects` field lists.
_GROUNDING = ("<bbox>", "<ref-object>")
_NO_ANSWER = Message("assistant", "-")


def to_example(
    row: Mapping[str, Any], form: Form, stage: str, *, media: bool = False, labels: Labels | None = None
) -> Example:
    """Convert one row to the example that the stage trains.

    Args:
        stage: "pt" gives a text, "sft" a conversation, "kto" one with a boolean, "cls" one with a label, "dpo" and "rm"
            a preference pair.
        media: whether the model takes images and videos.
        labels: for stage cls.

    Raises:
        RowError: the row does not have its declared format.
        UnsupportedRow: the row has audio or bounding boxes, images or videos for a text model, or a format without
            rows for this stage.
    """
    example = _example(row, form, stage, media, labels)
    if row.get("objects") and any(tag in text for text in texts(example) for tag in _GROUNDING):
        raise UnsupportedRow("its texts have <bbox> or <ref-object>, and training on bounding boxes is not supported")
    return example


def _example(row: Mapping[str, Any], form: Form, stage: str, media: bool, labels: Labels | None) -> Example:
    columns = form.columns
    if form.formatting == "ms_swift":
        return to_swift_example(row, form, stage, media=media, labels=labels)
    if columns.audios is not None and row.get(columns.audios):
        raise UnsupportedRow(f"field {columns.audios!r}: training on audio is not supported")
    if stage == "pt":
        for column in (columns.images, columns.videos):
            if column is not None and row.get(column):
                raise UnsupportedRow(
                    f"stage pt trains text, and field {column!r} has images or videos", "write stage: sft"
                )
        return _text(row, form)
    if labels is not None:
        chat = _labelled(row, form, media)
        return replace(chat, label=labels.read(row, columns.label))
    if form.formatting == "text":
        what = f"its rows are texts, which stage pt trains; stage {stage} trains conversations"
        raise UnsupportedRow(what, "write stage: pt")
    if stage in PAIR_STAGES:
        pair = _preference_pair(row, form, media)
        return replace(pair, margin=margin(row, columns.margin)) if stage == "rm" else pair
    desirable = _tag(row, columns.kto_tag or "label") if stage == "kto" else None
    if form.formatting in ("sharegpt", "openai"):
        answer = None
        if stage == "kto" and (name := first_present(row, (columns.response,))) is not None:
            answer = _pair_answer(row, name, form).message
        return replace(messages.conversation(row, form, answer, media=media), desirable=desirable)
    # The answers in the history are trained, too.
    turns = (*_prompt(row, form), _answer(row, _response_column(row, form)))
    turns, found = extract_media(row, columns, turns, {}, wanted=media)
    return Conversation(turns, _system(row, form), tools(row, columns.tools), found, desirable)


def _labelled(row: Mapping[str, Any], form: Form, media: bool) -> Conversation:
    """Read the input to classify: a text, which becomes the user's message, a question, or a whole conversation."""
    if form.formatting == "text":
        return Conversation((Message("user", _text(row, form)),))
    if form.formatting in ("sharegpt", "openai"):
        chat = messages.conversation(row, form, _NO_ANSWER, media=media)
        return replace(chat, messages=chat.messages[:-1]) if chat.messages[-1] is _NO_ANSWER else chat
    return to_question(row, form, media=media)


def to_question(row: Mapping[str, Any], form: Form, *, media: bool = False) -> Conversation:
    """Read one row as a prompt: a conversation that ends with the row's answer only if the row has one.

    Raises:
        RowError, UnsupportedRow: as in `to_example`, for stage sft.
    """
    if form.formatting == "text":
        raise UnsupportedRow("its rows are plain texts without questions", "name a data set of conversations")
    columns = form.columns
    if columns.audios is not None and row.get(columns.audios):
        raise UnsupportedRow(f"field {columns.audios!r}: audio is not supported")
    if form.formatting in ("sharegpt", "openai"):
        # A conversation without an answer is read with a placeholder.
        chat = messages.conversation(row, form, _NO_ANSWER, media=media)
        *prompt, last = chat.messages
        answer = "" if last is _NO_ANSWER else last.content  # a tool call has no text
        return replace(chat, messages=(*prompt, *_answered(answer)))
    turns = tuple(_prompt(row, form))
    is_alpaca = form.formatting == "alpaca"
    name = columns.response or "output" if is_alpaca else first_present(row, (columns.response, *RESPONSE_NAMES))
    answer = optional_string(row, name)
    turns, found = extract_media(row, columns, turns, {}, wanted=media)
    return Conversation((*turns, *_answered(answer)), _system(row, form), tools(row, columns.tools), found)


def _answered(answer: str) -> tuple[Message, ...]:
    return (Message("assistant", answer),) if answer else ()


def _tag(row: Mapping[str, Any], column: str) -> bool:
    """Read whether the row's answer is desirable."""
    if column not in row:
        raise RowError("missing-field", f"field {column!r} is missing", f"the row has {field_names(row)}")
    if not isinstance(row[column], bool):
        raise RowError("bad-tag", f"field {column!r}: expected true or false", f"got {short(row[column])}")
    return bool(row[column])


def _prompt(row: Mapping[str, Any], form: Form) -> list[Message]:
    """Read the history, then the user's message: the query, or instruction and input joined by a line break."""
    columns = form.columns
    messages = _history(row, columns.history)
    is_alpaca = form.formatting == "alpaca"
    name = (columns.prompt or "instruction") if is_alpaca else _find_column(row, columns.prompt, QUERY_NAMES)
    content, fields = string(row, name), f"field {name!r}"
    if is_alpaca and columns.query is not None and columns.query in row:
        fields = f"fields {name!r} and {columns.query!r}"
        if query := optional_string(row, columns.query):
            content = f"{content}\n{query}" if content else query
    if not content or content.isspace():
        raise RowError("empty-message", "an empty user message", fields)
    messages.append(Message("user", content))
    return messages


def _answer(row: Mapping[str, Any], name: str) -> Message:
    content = string(row, name)
    if not content or content.isspace():
        raise RowError("empty-message", "an empty assistant message", f"field {name!r}")
    return Message("assistant", content)


def _system(row: Mapping[str, Any], form: Form) -> str | None:
    """Read the system message; None if it is empty."""
    names = SYSTEM_NAMES if form.formatting == "query_response" else ()
    return optional_string(row, first_present(row, (form.columns.system, *names))) or None


def _text(row: Mapping[str, Any], form: Form) -> str:
    """Read the text of a row of stage pt: a text column, alpaca's prompt column, a response without a query, or the
    only message, if it is the assistant's (ms-swift's format)."""
    columns = form.columns
    if form.formatting == "alpaca":
        name = columns.prompt or "instruction"
    elif form.formatting == "text":
        names = [name for name in (columns.prompt, *TEXT_NAMES) if name is not None]
        # Without a text, use one whose value is null, or the first expected name, so that `string` rejects it.
        name = first_present(row, names) or next((name for name in names if name in row), names[0])
    elif form.formatting == "query_response":
        query = first_present(row, (columns.prompt, *QUERY_NAMES))
        if query is not None and row[query] != "":
            what = f"stage pt trains text, and field {query!r} is the query of a conversation"
            raise UnsupportedRow(what, "write stage: sft")
        name = _response_column(row, form)
    else:
        chat = messages_of(row, columns.messages or "messages", form)
        if chat.system is not None or [message.role for message in chat.messages] != ["assistant"]:
            raise UnsupportedRow("stage pt trains text, and its rows are conversations", "write stage: sft")
        return _not_empty(chat.messages[0].content, columns.messages or "messages")
    return _not_empty(string(row, name), name)


def _not_empty(text: str, name: str) -> str:
    if not text or text.isspace():
        raise RowError("empty-text", "the text is empty", f"field {name!r}")
    return text


def _history(row: Mapping[str, Any], column: str | None) -> list[Message]:
    """Read earlier turns from a list of [question, answer] pairs."""
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
    return _find_column(row, form.columns.response, RESPONSE_NAMES)


def _find_column(row: Mapping[str, Any], column: str | None, names: Sequence[str]) -> str:
    present = [name for name in (column, *names) if name is not None and name in row]
    if not present:
        detail = f"expected one of {', '.join(names)}; the row has {field_names(row)}"
        raise RowError("missing-field", f"field {names[0]!r} is missing", detail)
    return first_present(row, present) or present[0]  # if all are null, `string` reports the field


class _PairAnswer(NamedTuple):
    """An answer of a pair, the conversation before it if the row has both in one field, and the field's name."""

    message: Message
    before: Messages | None
    column: str


def _preference_pair(row: Mapping[str, Any], form: Form, media: bool) -> PreferencePair:
    columns = form.columns
    name = first_present(row, (columns.rejected, *REJECTED_NAMES))
    rejected = _pair_answer(row, name or columns.rejected or REJECTED_NAMES[0], form)
    name = first_present(row, (columns.chosen,))
    chosen = None if name is None else _pair_answer(row, name, form)
    if form.formatting in ("sharegpt", "openai"):
        name = first_present(row, (columns.messages,))
        own = None if name is None else messages_of(row, name, form)
        if chosen is None:
            if own is None or len(own.messages) < 2 or own.messages[-1].role != "assistant":
                name = columns.chosen or "chosen"
                raise RowError("missing-field", f"field {name!r} is missing", f"the row has {field_names(row)}")
            own, chosen = _without_last(own), _PairAnswer(own.messages[-1], None, columns.messages or "messages")
        stated = [chat for chat in (own, chosen.before, rejected.before) if chat is not None]
    else:
        if chosen is None:
            names = () if form.formatting == "alpaca" else RESPONSE_NAMES
            name = first_present(row, (columns.response, *names)) or columns.chosen or columns.response or "chosen"
            chosen = _PairAnswer(_answer(row, name), None, name)
        # A string next to whole conversations only repeats their beginning.
        stated = [chat for chat in (chosen.before, rejected.before) if chat is not None]
        stated = stated or [Messages(None, tuple(_prompt(row, form)), {})]
    if not stated:
        name = columns.messages or "messages"
        raise RowError("missing-field", f"field {name!r} is missing", f"the row has {field_names(row)}")
    prompt = _common_prompt(stated, form)
    for answer in (chosen, rejected):
        if is_empty(answer.message):
            raise RowError("empty-message", "an empty assistant message", f"field {answer.column!r}")
    if (chosen.message.content, chosen.message.tool_calls) == (rejected.message.content, rejected.message.tool_calls):
        raise RowError("same-answers", "chosen and rejected are the same")
    system = _system(row, form) if prompt.system is None else prompt.system or None
    answers = (chosen.message, rejected.message)
    prompt_messages, found = extract_media(row, columns, prompt.messages, prompt.inline, wanted=media)
    if found:
        check_no_tags(answers)
    return PreferencePair.of_answers(prompt_messages, *answers, system, tools(row, columns.tools), found)


def _pair_answer(row: Mapping[str, Any], column: str, form: Form) -> _PairAnswer:
    value = row.get(column)
    if value is None or isinstance(value, str):  # `string` rejects None
        return _PairAnswer(Message("assistant", string(row, column)), None, column)
    if isinstance(value, dict):
        return _PairAnswer(answer_message(value, column, 0, form), None, column)
    if not isinstance(value, list):
        reason = f"field {column!r}: expected a string, a message or a list of messages, got {json_type(value)}"
        raise RowError("wrong-type", reason)
    if len(value) == 1 and isinstance(value[0], dict):
        return _PairAnswer(answer_message(value[0], column, 1, form), None, column)
    chat = messages_of(row, column, form)
    if len(chat.messages) == 1:
        raise RowError("answer-without-prompt", f"field {column!r}: a system message and an answer, but no question")
    last = chat.messages[-1]
    if last.role != "assistant":
        detail = f"field {column!r}: message {len(value)} has role {value[-1][form.tags.role_tag]!r}"
        raise RowError("answer-not-assistant", "an answer is not the assistant's", detail)
    return _PairAnswer(last, _without_last(chat), column)


def _without_last(chat: Messages) -> Messages:
    """Return all messages but the last."""
    last = len(chat.messages) - 1
    inline = {index: values for index, values in chat.inline.items() if index < last}
    return Messages(chat.system, chat.messages[:last], inline)


def _common_prompt(stated: list[Messages], form: Form) -> Messages:
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
