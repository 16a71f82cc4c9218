"""Read lists of messages, ShareGPT's or OpenAI's, which differ only in their tags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from megatune.data.bad_rows import RowError, UnsupportedRow
from megatune.data.conversation import Message, Role
from megatune.data.formats.columns import Tags
from megatune.data.formats.fields import (
    PARTS,
    Inline,
    encodable,
    function_call,
    missing_field,
    part_value,
    short,
    string,
    tags_of,
    tool_calls,
)
from megatune.data.readers import json_type

Kind = Literal["system", "user", "assistant", "call", "tool"]

_TEXT_PARTS = ("text", "input_text")
_AUDIO_PARTS = ("audio", "audio_url", "input_audio")
# Roles of ms-swift and OpenAI that are valid in addition to the tags, which take precedence.
_ROLES: dict[str, Kind] = {
    "tool_call": "call",
    "function_call": "call",
    "tool": "tool",
    "tool_response": "tool",
    "function_response": "tool",
    "observation": "tool",
    "developer": "system",
}
# Keys of a turn that is one object: {"human": "...", "assistant": "..."}.
_USER_KEYS, _ASSISTANT_KEYS = ("user", "human"), ("assistant", "gpt", "bot")
_ANTHROPIC_PARTS = ("tool_use", "tool_result", "thinking", "redacted_thinking")


class Messages(NamedTuple):
    """A list of messages: the text of its leading system message (or None), the others, and their images and videos."""

    system: str | None
    messages: tuple[Message, ...]
    inline: Inline


def messages_of(row: Mapping[str, Any], column: str, tags: Tags) -> Messages:
    """Read the list of messages in a column; `check_turns` checks that the roles alternate."""
    if column not in row:
        raise missing_field(row, column)
    raw = row[column]
    if not isinstance(raw, list):
        raise RowError("messages-not-a-list", f"field {column!r}: expected a list of messages, got {json_type(raw)}")
    raw = _split_pairs(raw, tags)
    system: str | None = None
    messages: list[Message] = []
    inline: Inline = {}
    for number, item in enumerate(raw, start=1):
        if not isinstance(item, dict):
            detail = f"message {number} is {json_type(item)}"
            raise RowError("message-not-an-object", f"field {column!r}: a message is not an object", detail)
        kind = _kind(item, tags, column, number)
        if kind == "system":
            if number != 1:
                if _kind(raw[0], tags, column, 1) == "system":
                    raise RowError("two-system-messages", "two system messages", f"messages 1 and {number}")
                raise RowError("system-not-first", "the system message is not the first", f"message {number}")
            system = content_of(item, tags.content_tag, column, number, None)
        else:
            values: list[object] = []
            message = _message(kind, item, tags, column, number, values)
            if kind == "call" and messages and messages[-1].role == "assistant":
                said, calls = messages[-1].content + message.content, messages[-1].tool_calls + message.tool_calls
                messages[-1] = replace(messages[-1], content=said, tool_calls=calls)
            else:
                messages.append(message)
            if values:
                inline[len(messages) - 1] = values
    if not messages:
        detail = "a system message only" if system is not None else ""
        raise RowError("no-messages", f"field {column!r}: no messages", detail)
    return Messages(system, tuple(messages), inline)


def _split_pairs(raw: list[Any], tags: Tags) -> list[Any]:
    """Split turns that are one object, with question and answer, into two messages."""
    if all(isinstance(item, dict) and tags.role_tag in item for item in raw):
        return raw
    messages: list[Any] = []
    for item in raw:
        keys = item if isinstance(item, dict) and tags.role_tag not in item else ()
        user, answer = (next((key for key in known if key in keys), "") for known in (_USER_KEYS, _ASSISTANT_KEYS))
        if user and answer:
            messages.append({tags.role_tag: tags.user_tag, tags.content_tag: item[user]})
            rest = {key: value for key, value in item.items() if key not in (user, answer)}
            messages.append({**rest, tags.role_tag: tags.assistant_tag, tags.content_tag: item[answer]})
        else:
            messages.append(item)
    return messages


def answer_message(item: Mapping[str, Any], column: str, number: int, tags: Tags) -> Message:
    """Read an answer of a preference pair: message `number` of the column's list, or 0 if the column has no list."""
    kind = _kind(item, tags, column, number)
    if kind not in ("assistant", "call"):
        detail = f"field {column!r} has role {item[tags.role_tag]!r}, expected {tags.assistant_tag!r}"
        raise RowError("answer-not-assistant", "an answer is not the assistant's", detail)
    return _message(kind, item, tags, column, number, None)


# Which role may follow which: several tools may answer the parallel calls of one message.
_ALLOWED_NEXT: dict[Role | None, tuple[Role, ...]] = {
    None: ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}


def check_turns(chat: Messages, tags: Tags) -> None:
    """Check that users (or tools) and the assistant take turns, and that only tool results are empty."""
    previous: Role | None = None
    for index, message in enumerate(chat.messages):
        role = message.role
        if role not in _ALLOWED_NEXT[previous]:
            expected = " or ".join(repr(_tag(role, tags)) for role in _ALLOWED_NEXT[previous])
            raise RowError(
                "roles-out-of-order", "roles out of order", f"{described(chat, index, tags)}, expected {expected}"
            )
        if is_empty(message):
            raise RowError("empty-message", f"an empty {role} message", f"message {_number(chat, index)}")
        previous = role


def is_empty(message: Message) -> bool:
    """Return whether a message has neither text nor calls; a tool may return nothing."""
    content = message.content
    return (not content or content.isspace()) and message.role != "tool" and not message.tool_calls


@lru_cache(maxsize=64)
def _kinds(tags: Tags) -> dict[str, Kind]:
    """Map each role to its kind; if two tags are equal, the later one in this list wins."""
    return {
        **_ROLES,
        tags.function_tag: "call",
        tags.observation_tag: "tool",
        tags.system_tag: "system",
        tags.assistant_tag: "assistant",
        tags.user_tag: "user",
    }


def _kind(item: Mapping[str, Any], tags: Tags, column: str, number: int) -> Kind:
    role = string(item, tags.role_tag, column, number)
    kind = _kinds(tags).get(role)
    if kind is None:
        known = (tags.system_tag, tags.user_tag, tags.assistant_tag, tags.observation_tag, tags.function_tag)
        place = f"message {number}" if number else f"field {column!r}"
        detail = f"{place} has role {short(role)}, expected one of {', '.join(known)}"
        raise RowError("unknown-role", "unknown role", detail)
    return kind


def _message(
    kind: Kind, item: Mapping[str, Any], tags: Tags, column: str, number: int, values: list[object] | None
) -> Message:
    if kind == "user" or kind == "tool":
        return Message(kind, content_of(item, tags.content_tag, column, number, values))
    place = f"message {number}" if number else ""
    if kind == "call":
        owner, given = f"{column}[].{tags.content_tag}", item.get(tags.content_tag)
        if isinstance(given, dict):  # an object instead of JSON
            return Message("assistant", "", tool_calls([given], owner, place), _trained(item, place))
        content, calls = function_call(string(item, tags.content_tag, column, number), owner, place)
        return Message("assistant", content, calls, _trained(item, place))
    raw_calls = item.get("tool_calls")
    calls = tool_calls(raw_calls, f"{column}[].tool_calls", place) if raw_calls else ()
    # OpenAI's API writes null as the text of a message that only calls tools.
    is_bare = calls and item.get(tags.content_tag) is None
    content = "" if is_bare else content_of(item, tags.content_tag, column, number, values)
    if item.get("reasoning_content") is not None:
        reasoning = string(item, "reasoning_content", column, number).strip()
        content = f"<think>\n{reasoning}\n</think>\n\n{content}" if reasoning else content
    return Message("assistant", content, calls, _trained(item, place))


def content_of(item: Mapping[str, Any], tag: str, column: str, number: int, values: list[object] | None) -> str:
    """Read a message's text; images and videos in OpenAI's list of content parts become tags in it.

    Args:
        values: receives the value of each tag if there are images or videos (see `Inline`); None forbids them.

    Raises:
        RowError: it is neither text nor such a list.
        UnsupportedRow: it has audio.
    """
    content = item.get(tag)
    if not isinstance(content, list):
        return string(item, tag, column, number)
    place = f"message {number}" if number else f"field {column!r}"
    texts: list[str] = []
    given: list[object] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        kind = kind if isinstance(kind, str) else None
        has = f"{place} has a part of type {kind!r}"
        if kind in _AUDIO_PARTS:
            raise UnsupportedRow(f"{has}: training on audio is not supported")
        if kind in _ANTHROPIC_PARTS:
            detail = f"{has}; use OpenAI's tool_calls, role tool and reasoning_content"
            raise RowError("anthropic-blocks", "Anthropic's content blocks are not supported", detail)
        if kind in PARTS and values is not None:
            texts.append(PARTS[kind])
            given.append(part_value(part))
        elif kind in _TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(encodable(part["text"], f"{column}[].{tag}", place))
            given += [None] * len(tags_of(part["text"]))
        else:
            expected = "text" if values is None else "text, an image or a video"
            raise RowError("bad-content-part", f"a part of a message is not {expected}", f"{place} has {short(part)}")
    if values is not None and any(part["type"] in PARTS for part in content):
        values += given
    return "".join(texts)


def _trained(item: Mapping[str, Any], place: str) -> bool | None:
    """Return whether an answer is trained: `loss` or `loss_scale` (ms-swift), or `weight` if both are missing."""
    for key in ("loss", "loss_scale", "weight"):
        value = item.get(key)
        if value is not None:
            if not isinstance(value, (bool, int, float)) or value not in (0, 1):
                detail = f"{place} has {short(value)}" if place else f"got {short(value)}"
                raise RowError("bad-loss", f"{key!r} of a message: expected true or false, 1 or 0", detail)
            return bool(value)
    return None


def described(chat: Messages, index: int, tags: Tags) -> str:
    """Return which message of the row an index is, and its role."""
    return f"message {_number(chat, index)} is {_tag(chat.messages[index].role, tags)!r}"


def _number(chat: Messages, index: int) -> int:
    """Return the number of a message in the row's list, from 1, including the system message."""
    return index % len(chat.messages) + (1 if chat.system is None else 2)


def _tag(role: Role, tags: Tags) -> str:
    return {"user": tags.user_tag, "assistant": tags.assistant_tag, "tool": tags.observation_tag}[role]


def tags_of_messages(messages: object, column: str) -> Tags:
    """Detect the tags of a row's messages; use the usual tags of the column if they cannot be detected."""
    found = [messages] if isinstance(messages, dict) else messages if isinstance(messages, list) else []
    items = [item for item in found if isinstance(item, dict)]
    first = items[0] if items else {}
    openai = column not in ("conversations", "conversation")
    role = "role" if "role" in first else "from" if "from" in first else "role" if openai else "from"
    content = "content" if "content" in first else "value" if "value" in first else "content" if openai else "value"
    roles = [item.get(role) for item in items]
    is_sharegpt = any(word in roles for word in ("human", "gpt"))
    is_openai = not is_sharegpt and (role == "role" or any(word in roles for word in ("user", "assistant")))
    user, assistant, usual = ("user", "assistant", "tool") if is_openai else ("human", "gpt", "observation")
    observation = next((word for word in ("observation", "tool") if word in roles), usual)
    return Tags(role, content, user, assistant, observation, "function_call", "system")
