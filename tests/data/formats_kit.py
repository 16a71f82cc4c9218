"""Forms, and rows of them."""

from __future__ import annotations

from typing import Any

from megatune.data.conversation import Conversation, Message, PreferencePair
from megatune.data.formats import FORMATS

ALPACA, SHAREGPT, OPENAI, QUERY, TEXT = FORMATS.values()


def sharegpt(*turns: tuple[Any, Any], **fields: Any) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": value} for role, value in turns], **fields}


def openai(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages), **fields}


def said(role: str, content: Any = "x", **keys: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **keys}


def pair_of(
    prompt: tuple[Message, ...], chosen: Message, rejected: Message, system: str | None = None, *common: Any
) -> PreferencePair:
    """The pair of two answers to one prompt."""
    one, other = (Conversation((*prompt, answer), system, *common) for answer in (chosen, rejected))
    return PreferencePair(one, other)
