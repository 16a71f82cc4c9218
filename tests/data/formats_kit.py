"""Forms, and rows of them."""

from __future__ import annotations

from typing import Any

from megatune.data.formats.form import Columns, Form, Tags

OPENAI_TAGS = Tags("role", "content", "user", "assistant", "tool", "function_call", "system")
ALPACA = Form()
SHAREGPT = Form("sharegpt")
OPENAI = Form("openai", Columns(messages="messages"), OPENAI_TAGS)
QUERY = Form("query_response", Columns(prompt=None, query=None, response=None))
TEXT = Form("text", Columns(prompt="text"))


def sharegpt(*turns: tuple[Any, Any], **fields: Any) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": value} for role, value in turns], **fields}


def openai(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages), **fields}


def said(role: str, content: Any = "x", **keys: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **keys}
