"""Rows of every supported form to one: a conversation, in the words of Transformers' chat templates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatune.data.readers import json_type
from megatune.data.sources import Columns, DatasetSource, Tags

Role = Literal["user", "assistant", "tool"]


class RowError(Exception):
    """A row that cannot be trained on.

    Args:
        reason: what is wrong, in words that are the same for all such rows (they are counted by it).
        detail: what is special about this row.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


class UnsupportedRow(Exception):  # noqa: N818 - not an error of the row
    """A row that asks for what is not built; its data set is refused, since dropping it would hide that."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function the assistant calls."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """One message; a tool's answer has the role "tool"."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of (user or tools, assistant), ending with the assistant.

    Attributes:
        system: "" where the row has none.
        tools: JSON schemas of the tools on offer, as the row has them.
    """

    messages: tuple[Message, ...]
    system: str = ""
    tools: tuple[dict[str, Any], ...] = ()


Example = Conversation | str  # a conversation to fine-tune on, or a text to pretrain on


def to_example(row: Mapping[str, Any], source: DatasetSource, stage: str) -> Example:
    """One row as the stage trains it.

    Args:
        stage: "pt" takes the prompt column as text; "sft" makes a conversation.

    Raises:
        RowError: the row is not what its data set's form says.
        UnsupportedRow: the row has images, videos or audio.
    """
    columns = source.columns
    for media in (columns.images, columns.videos, columns.audios):
        if media is not None and row.get(media):
            raise UnsupportedRow(f"field {media!r}: training on {media} is not built")
    if stage == "pt":
        return _text(row, columns)
    example = _alpaca(row, columns) if source.formatting == "alpaca" else _chat(row, columns, source.tags)
    _check_turns(example.messages)
    return example


def _text(row: Mapping[str, Any], columns: Columns) -> str:
    text = _string(row, columns.prompt or "instruction")
    if not text.strip():
        raise RowError(f"field {columns.prompt!r} is empty")
    return text


def _alpaca(row: Mapping[str, Any], columns: Columns) -> Conversation:
    messages: list[Message] = []
    for question, answer in _history(row, columns.history):
        messages += [Message("user", question), Message("assistant", answer)]
    parts = (_string(row, columns.prompt or "instruction"), _optional_string(row, columns.query))
    messages.append(Message("user", "\n".join(part for part in parts if part)))
    messages.append(Message("assistant", _string(row, columns.response or "output")))
    return Conversation(tuple(messages), _optional_string(row, columns.system), _tools(row, columns.tools))


def _history(row: Mapping[str, Any], column: str | None) -> list[tuple[str, str]]:
    history = row.get(column) if column else None
    if not history:
        return []
    well_formed = isinstance(history, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in history
    )
    if not well_formed:
        raise RowError(f"field {column!r}: expected a list of [question, answer] pairs", f"got {_short(history)}")
    return [(_encodable(question, column), _encodable(answer, column)) for question, answer in history]


def _chat(row: Mapping[str, Any], columns: Columns, tags: Tags) -> Conversation:
    """ShareGPT conversations and OpenAI messages: the same but for their tags."""
    column = columns.messages or "conversations"
    raw = _field(row, column)
    if not isinstance(raw, list):
        raise RowError(f"field {column!r}: expected a list of messages, got {json_type(raw)}")
    system = _optional_string(row, columns.system)
    messages: list[Message] = []
    for number, item in enumerate(raw, start=1):
        place = f"{column}[{number}]"
        if not isinstance(item, dict):
            raise RowError(f"field {column!r}: a message is not an object", f"message {number} is {json_type(item)}")
        role = _string(item, tags.role_tag, column, number)
        if role == tags.system_tag:
            if number != 1:
                twice = any(m.get(tags.role_tag) == tags.system_tag for m in raw[: number - 1] if isinstance(m, dict))
                raise RowError("two system messages" if twice else "a system message that is not the first", place)
            system = _string(item, tags.content_tag, column, number)
        else:
            messages.append(_message(role, item, tags, column, number))
    if not messages:
        raise RowError(f"field {column!r}: no messages")
    return Conversation(tuple(messages), system, _tools(row, columns.tools))


def _message(role: str, item: Mapping[str, Any], tags: Tags, column: str, number: int) -> Message:
    if role == tags.user_tag:
        return Message("user", _content(item, tags.content_tag, column, number))
    if role == tags.observation_tag:
        return Message("tool", _content(item, tags.content_tag, column, number))
    if role == tags.function_tag:
        return _function_call(_string(item, tags.content_tag, column, number), number)
    if role != tags.assistant_tag:
        known = (tags.system_tag, tags.user_tag, tags.assistant_tag, tags.observation_tag, tags.function_tag)
        raise RowError("unknown role", f"message {number} has role {role!r}, expected one of {', '.join(known)}")
    calls = _tool_calls(item["tool_calls"], number) if item.get("tool_calls") else ()
    # OpenAI's API writes null for the text of a message that only calls tools.
    content = "" if calls and item.get(tags.content_tag) is None else _content(item, tags.content_tag, column, number)
    if isinstance(thought := item.get("reasoning_content"), str) and thought:
        content = f"<think>\n{_encodable(thought, 'reasoning_content').strip()}\n</think>\n\n{content}"
    return Message("assistant", content, calls)


def _content(item: Mapping[str, Any], tag: str, column: str, number: int) -> str:
    """A message's text; OpenAI's list of parts is joined where all of them are text."""
    content = item.get(tag)
    if not isinstance(content, list):
        return _string(item, tag, column, number)
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image", "image_url", "video", "video_url", "audio", "input_audio"):
            raise UnsupportedRow(f"message {number} has a part of type {kind!r}: training on it is not built")
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RowError("a part of a message is not text", f"message {number} has the part {_short(part)}")
    return _encodable("".join(part["text"] for part in content), column)


def _function_call(value: str, number: int) -> Message:
    """ShareGPT's function_call: JSON {"name", "arguments"} or a list of them, after an optional thought."""
    thought = ""
    if value.lstrip().startswith("<think>") and "</think>" in value:
        thought, _, value = value.partition("</think>")
        thought += "</think>\n\n"
    try:
        calls = json.loads(value)
    except json.JSONDecodeError as error:
        raise RowError("a function call is not JSON", f"message {number}: {error.msg} in {_short(value)}") from error
    return Message("assistant", thought, _tool_calls(calls if isinstance(calls, list) else [calls], number))


def _tool_calls(calls: object, number: int) -> tuple[ToolCall, ...]:
    if not isinstance(calls, list):
        raise RowError("tool calls are not a list", f"message {number} has {json_type(calls)}")
    result = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        arguments = function.get("arguments", {}) if isinstance(function, dict) else None
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except json.JSONDecodeError:
                arguments = None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise RowError(
                "a function call needs a name and an object of arguments", f"message {number}: {_short(call)}"
            )
        result.append(ToolCall(name, arguments))
    return tuple(result)


def _tools(row: Mapping[str, Any], column: str | None) -> tuple[dict[str, Any], ...]:
    """Tool schemas: a list, or JSON of one."""
    tools = row.get(column) if column else None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError as error:
            raise RowError(f"field {column!r} is not JSON", f"{error.msg} at column {error.colno}") from error
    if not tools:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(f"field {column!r}: expected a list of tool schemas", f"got {_short(tools)}")
    return tuple(tools)


# What may follow what: several tools may answer one message with parallel calls.
_MAY_FOLLOW: dict[Role | None, tuple[Role, ...]] = {
    None: ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}


def _check_turns(messages: tuple[Message, ...]) -> None:
    previous: Role | None = None
    for number, message in enumerate(messages, start=1):
        if message.role not in _MAY_FOLLOW[previous]:
            expected = " or ".join(_MAY_FOLLOW[previous])
            raise RowError("roles out of order", f"turn {number}: expected {expected}, got {message.role}")
        if message.role != "tool" and not message.tool_calls and not message.content.strip():
            raise RowError(f"an empty {message.role} message", f"turn {number}")
        previous = message.role
    if previous != "assistant":
        raise RowError("the last message is not the assistant's", f"it is the {previous}'s")


def _field(row: Mapping[str, Any], name: str) -> Any:
    if name not in row:
        raise RowError(f"field {name!r} is missing", f"the row has {', '.join(map(repr, row)) or 'no fields'}")
    return row[name]


def _string(row: Mapping[str, Any], name: str, column: str = "", number: int = 0) -> str:
    """A required string; `column` and `number` say which message of which column it is in."""
    owner = f"{column}[].{name}" if column else name
    place = f"message {number}" if column else ""
    if name not in row:
        raise RowError(
            f"field {owner!r} is missing", place or f"the row has {', '.join(map(repr, row)) or 'no fields'}"
        )
    if not isinstance(row[name], str):
        raise RowError(f"field {owner!r}: expected a string, got {json_type(row[name])}", place)
    return _encodable(row[name], owner)


def _optional_string(row: Mapping[str, Any], name: str | None) -> str:
    if name is None or row.get(name) is None:
        return ""
    return _string(row, name)


def _encodable(text: str, field: str | None) -> str:
    """JSON can spell half of a surrogate pair, which no tokenizer can encode."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RowError(f"field {field!r}: half of a surrogate pair", f"at character {error.start + 1}") from error
    return text


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


# Self-cognition data sets write the model's name and maker so; the setting that fills each.
PLACEHOLDERS = {"{{name}}": "model_name", "{{author}}": "model_author"}


def fill_placeholders(example: Example, values: Mapping[str, str | None]) -> tuple[Example, list[str]]:
    """Replace {{name}} and {{author}} in every text of an example.

    Args:
        values: placeholder to replacement; None leaves it as it is.

    Returns:
        The example, and the placeholders it has for which there is no replacement.
    """
    missing = [p for p in PLACEHOLDERS if values.get(p) is None and any(p in text for text in _texts(example))]

    def filled(text: str) -> str:
        for placeholder, value in values.items():
            if value is not None:
                text = text.replace(placeholder, value)
        return text

    if isinstance(example, str):
        return filled(example), missing
    messages = tuple(replace(message, content=filled(message.content)) for message in example.messages)
    return replace(example, messages=messages, system=filled(example.system)), missing


def _texts(example: Example) -> Iterable[str]:
    return (example,) if isinstance(example, str) else (example.system, *(m.content for m in example.messages))
