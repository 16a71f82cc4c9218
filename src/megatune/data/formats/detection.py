"""Which form the rows of a data set have, told by the fields of one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatune.data.formats.pairs import REJECTED_NAMES
from megatune.data.formats.query_response import QUERY_NAMES, RESPONSE_NAMES, SYSTEM_NAMES
from megatune.data.formats.text import TEXT_NAMES
from megatune.data.sources import Columns, Formatting, Tags

# In order of precedence.
MESSAGES_NAMES = ("messages", "conversations", "conversation")
_MEDIA_NAMES = (("images", "image"), ("videos", "video"), ("audios", "audio"))


@dataclass(frozen=True, slots=True)
class Form:
    """How the rows of a data set read.

    Attributes:
        formatting: one of `megatune.data.sources.FORMATTINGS`.
        ranking: whether rows are preference pairs.
    """

    formatting: Formatting
    columns: Columns
    tags: Tags
    ranking: bool = False


def detect(fields: Mapping[str, object]) -> Form | None:
    """The form of a row, None where no rule knows its fields.

    A field that is null does not count, unless nothing is found without it. The first rule that fits decides:

    1. messages, conversations or conversation: sharegpt or openai. Tags are told by the first message's keys (role or
       from, content or value) and by the roles of the row (human and gpt, or user and assistant).
    2. A rejected answer, and `chosen` or `prompt` a list of messages: the same, with `prompt` as messages if it is such
       a list; else each answer is a whole conversation, and a `prompt` beside it only repeats its beginning.
    3. instruction, and not query or prompt without input and output: alpaca, its response under the first of output and
       `RESPONSE_NAMES`.
    4. A query and a response (or a rejected answer) under one of their names: query_response.
    5. text or content: text.
    6. A query or a response alone under one of their names: query_response.

    The row is a preference pair where it has rejected, rejected_response or rejected_messages.
    """
    present = {name: value for name, value in fields.items() if value is not None}
    return _form(present) or _form(fields)


def _form(fields: Mapping[str, Any]) -> Form | None:
    ranking = any(name in fields for name in ("rejected", *REJECTED_NAMES))
    if (messages := _first(fields, MESSAGES_NAMES)) is not None:
        return _chat(fields, messages, fields[messages], ranking)
    if ranking and _is_messages(fields.get("prompt")):
        return _chat(fields, "prompt", fields["prompt"], ranking)
    if ranking and _is_messages(fields.get("chosen"), at_least=2):
        return _chat(fields, None, fields["chosen"], ranking)
    answers = (fields.get(name) for name in ("chosen", "rejected", *REJECTED_NAMES))
    listed = next((answer for answer in answers if isinstance(answer, (list, dict))), None)
    tags = Tags() if listed is None else _tags(listed, "messages")
    if "instruction" in fields and (fields.keys() & {"input", "output"} or not fields.keys() & {"query", "prompt"}):
        output = _first(fields, ("output", *RESPONSE_NAMES)) or "output"
        return Form("alpaca", _columns(fields, response=output), tags, ranking)
    query, response = _first(fields, QUERY_NAMES), _first(fields, RESPONSE_NAMES)
    # Which of the names a row uses is looked up in each row.
    by_name = Form("query_response", _columns(fields, prompt=None, query=None, response=None), tags, ranking)
    if query and (response or ranking):
        return by_name
    if (text := _first(fields, TEXT_NAMES)) is not None:
        return Form("text", _columns(fields, prompt=text), tags)
    return by_name if query or response else None


def _chat(fields: Mapping[str, Any], column: str | None, messages: object, ranking: bool) -> Form:
    tags = _tags(messages, column or "messages")
    formatting: Formatting = "openai" if (tags.role_tag, tags.user_tag) == ("role", "user") else "sharegpt"
    return Form(formatting, _columns(fields, messages=column), tags, ranking)


def _columns(fields: Mapping[str, Any], **named: str | None) -> Columns:
    media = {plural: singular for plural, singular in _MEDIA_NAMES if singular in fields and plural not in fields}
    # What this row lacks keeps its usual name, for the rows that have it.
    system = _first(fields, SYSTEM_NAMES) or "system"
    rejected = _first(fields, ("rejected", *REJECTED_NAMES)) or "rejected"
    return Columns(**media, system=system, rejected=rejected, **named)


def _tags(messages: object, column: str) -> Tags:
    """Tags of the messages of a row; those that are usual for the column where the messages do not tell."""
    found = [messages] if isinstance(messages, dict) else messages if isinstance(messages, list) else []
    items = [item for item in found if isinstance(item, dict)]
    first = items[0] if items else {}
    openai = column not in ("conversations", "conversation")
    role = "role" if "role" in first else "from" if "from" in first else "role" if openai else "from"
    content = "content" if "content" in first else "value" if "value" in first else "content" if openai else "value"
    roles = [item.get(role) for item in items]
    if any(word in roles for word in ("human", "gpt")):
        words = ("human", "gpt", "observation")
    elif any(word in roles for word in ("user", "assistant")) or role == "role":
        words = ("user", "assistant", "tool")
    else:
        words = ("human", "gpt", "observation")
    user, assistant, usual = words
    observation = next((word for word in ("observation", "tool") if word in roles), usual)
    return Tags(role, content, user, assistant, observation, "function_call", "system")


def _is_messages(value: object, at_least: int = 1) -> bool:
    return isinstance(value, list) and len(value) >= at_least and all(isinstance(item, dict) for item in value)


def _first(fields: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in fields), None)
