"""ShareGPT conversations and OpenAI messages: lists of messages, the same but for their tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from megatune.data.bad_rows import RowError, UnsupportedRow
from megatune.data.conversation import Conversation, Message, Role
from megatune.data.formats.fields import encodable, listed, optional_string, short, string
from megatune.data.formats.tool_calls import function_call, tool_calls, tools
from megatune.data.readers import json_type
from megatune.data.sources import DatasetSource, Tags

Kind = Literal["system", "user", "assistant", "call", "tool"]

_MEDIA_PARTS = ("image", "image_url", "input_image", "video", "video_url", "audio", "audio_url", "input_audio")
_ANTHROPIC_PARTS = ("tool_use", "tool_result", "thinking", "redacted_thinking")


@dataclass(frozen=True, slots=True)
class Chat:
    """A list of messages, read.

    Attributes:
        system: of its leading system message; None where it has none.
        messages: the others.
    """

    system: str | None
    messages: tuple[Message, ...]


def conversation(row: Mapping[str, Any], source: DatasetSource) -> Conversation:
    """The messages of a row, in turns that end with the assistant's.

    Raises:
        RowError: they are not messages, or do not take turns.
        UnsupportedRow: one of them has an image, a video or audio.
    """
    columns = source.columns
    column = columns.messages or "messages"
    chat = messages_of(row, column, source)
    check_turns(chat, source.tags)
    if chat.messages[-1].role != "assistant":
        detail = f"message {_number(chat, -1)} is {_word(chat.messages[-1].role, source.tags)!r}"
        raise RowError("no-answer", "the last message is not the assistant's", detail)
    # A system message among the messages overrides the system column.
    system = optional_string(row, columns.system) if chat.system is None else chat.system
    return Conversation(chat.messages, system, tools(row, columns.tools))


def messages_of(row: Mapping[str, Any], column: str, source: DatasetSource) -> Chat:
    """The list of messages in a column; that they take turns is `check_turns`'s to say."""
    if column not in row:
        raise RowError("missing-field", f"field {column!r} is missing", f"the row has {listed(row)}")
    raw = row[column]
    if not isinstance(raw, list):
        raise RowError("messages-not-a-list", f"field {column!r}: expected a list of messages, got {json_type(raw)}")
    tags = source.tags
    kinds = _kinds(tags, source.formatting == "openai")
    system: str | None = None
    messages: list[Message] = []
    for number, item in enumerate(raw, start=1):
        if not isinstance(item, dict):
            detail = f"message {number} is {json_type(item)}"
            raise RowError("message-not-an-object", f"field {column!r}: a message is not an object", detail)
        kind = _kind(item, kinds, tags, column, number)
        if kind == "system":
            if number != 1:
                raise _misplaced_system(raw, number, kinds, tags)
            system = _content(item, tags.content_tag, column, number)
        else:
            messages.append(_message(kind, item, tags, column, number))
    if not messages:
        detail = "a system message only" if system is not None else ""
        raise RowError("no-messages", f"field {column!r}: no messages", detail)
    return Chat(system, tuple(messages))


def one_message(item: Mapping[str, Any], column: str, number: int, source: DatasetSource) -> Message:
    """A message outside of a list of turns: an answer of a preference pair.

    Args:
        number: its number in the column's list, 0 where the column has no list.

    Raises:
        RowError: it is not the assistant's, or not well-formed.
    """
    kind = _kind(item, _kinds(source.tags, source.formatting == "openai"), source.tags, column, number)
    if kind not in ("assistant", "call"):
        detail = f"field {column!r} has role {item[source.tags.role_tag]!r}, expected {source.tags.assistant_tag!r}"
        raise RowError("answer-not-assistant", "an answer is not the assistant's", detail)
    return _message(kind, item, source.tags, column, number)


# What may follow what: several tools may answer one message with parallel calls.
_MAY_FOLLOW: dict[Role | None, tuple[Role, ...]] = {
    None: ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}


def check_turns(chat: Chat, tags: Tags) -> None:
    """Users, or tools, and the assistant take turns, and none of them says nothing; tools may.

    Raises:
        RowError: they do not, in the words of the row's tags.
    """
    previous: Role | None = None
    for index, message in enumerate(chat.messages):
        role = message.role
        if role not in _MAY_FOLLOW[previous]:
            expected = " or ".join(repr(_word(role, tags)) for role in _MAY_FOLLOW[previous])
            detail = f"message {_number(chat, index)} is {_word(role, tags)!r}, expected {expected}"
            raise RowError("roles-out-of-order", "roles out of order", detail)
        if is_empty(message):
            raise RowError("empty-message", f"an empty {role} message", f"message {_number(chat, index)}")
        previous = role


def is_empty(message: Message) -> bool:
    """Whether there is nothing to say or to learn; a tool may well return nothing."""
    content = message.content
    return (not content or content.isspace()) and message.role != "tool" and not message.tool_calls


@lru_cache(maxsize=64)
def _kinds(tags: Tags, openai: bool) -> dict[str, Kind]:
    """What each role is; where two tags are the same, the one that is listed last here wins."""
    kinds: dict[str, Kind] = {"developer": "system"} if openai else {}
    return kinds | {
        tags.function_tag: "call",
        tags.observation_tag: "tool",
        tags.system_tag: "system",
        tags.assistant_tag: "assistant",
        tags.user_tag: "user",
    }


def _kind(item: Mapping[str, Any], kinds: Mapping[str, Kind], tags: Tags, column: str, number: int) -> Kind:
    role = string(item, tags.role_tag, column, number)
    kind = kinds.get(role)
    if kind is None:
        known = (tags.system_tag, tags.user_tag, tags.assistant_tag, tags.observation_tag, tags.function_tag)
        place = f"message {number}" if number else f"field {column!r}"
        raise RowError(
            "unknown-role", "unknown role", f"{place} has role {short(role)}, expected one of {', '.join(known)}"
        )
    return kind


def _misplaced_system(raw: Sequence[Any], number: int, kinds: Mapping[str, Kind], tags: Tags) -> RowError:
    if kinds.get(raw[0][tags.role_tag]) == "system":
        return RowError("two-system-messages", "two system messages", f"messages 1 and {number}")
    return RowError("system-not-first", "the system message is not the first", f"message {number}")


def _message(kind: Kind, item: Mapping[str, Any], tags: Tags, column: str, number: int) -> Message:
    if kind == "user":
        return Message("user", _content(item, tags.content_tag, column, number))
    if kind == "tool":
        return Message("tool", _content(item, tags.content_tag, column, number))
    place = f"message {number}" if number else ""
    if kind == "call":
        owner = f"{column}[].{tags.content_tag}"
        content, calls = function_call(string(item, tags.content_tag, column, number), owner, place)
        return Message("assistant", content, calls, _trained(item, place))
    raw_calls = item.get("tool_calls")
    calls = tool_calls(raw_calls, f"{column}[].tool_calls", place) if raw_calls else ()
    # OpenAI's API writes null for the text of a message that only calls tools.
    content = "" if calls and item.get(tags.content_tag) is None else _content(item, tags.content_tag, column, number)
    if item.get("reasoning_content") is not None:
        thought = string(item, "reasoning_content", column, number).strip()
        content = f"<think>\n{thought}\n</think>\n\n{content}" if thought else content
    return Message("assistant", content, calls, _trained(item, place))


def _content(item: Mapping[str, Any], tag: str, column: str, number: int) -> str:
    """A message's text; OpenAI's list of parts is joined where all of them are text."""
    content = item.get(tag)
    if not isinstance(content, list):
        return string(item, tag, column, number)
    place = f"message {number}" if number else f"field {column!r}"
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _MEDIA_PARTS:
            raise UnsupportedRow(f"{place} has a part of type {kind!r}: training on it is not built")
        if kind in _ANTHROPIC_PARTS:
            detail = (
                f"{place} has a part of type {kind!r}; OpenAI's tool_calls, role tool and reasoning_content are read"
            )
            raise RowError("anthropic-blocks", "Anthropic's content blocks are not read", detail)
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RowError("bad-content-part", "a part of a message is not text", f"{place} has {short(part)}")
    return "".join(encodable(part["text"], f"{column}[].{tag}", place) for part in content)


def _trained(item: Mapping[str, Any], place: str) -> bool:
    """Whether an answer is trained: `loss` (ms-swift) or, where it is not given, `weight` (OpenAI)."""
    for key in ("loss", "weight"):
        value = item.get(key)
        if value is not None:
            if not isinstance(value, (bool, int, float)) or value not in (0, 1):
                detail = f"{place} has {short(value)}" if place else f"got {short(value)}"
                raise RowError("bad-loss", f"{key!r} of a message: expected true or false, 1 or 0", detail)
            return bool(value)
    return True


def _number(chat: Chat, index: int) -> int:
    """The number of a message in the row's list, from 1; the system message is counted there."""
    return index % len(chat.messages) + (1 if chat.system is None else 2)


def _word(role: Role, tags: Tags) -> str:
    return {"user": tags.user_tag, "assistant": tags.assistant_tag, "tool": tags.observation_tag}[role]
