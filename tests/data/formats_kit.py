"""Data sets of each form, and rows for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatune.data.sources import Columns, DatasetSource, Tags

OPENAI_TAGS = Tags("role", "content", "user", "assistant", "tool", "function_call", "system")
ALPACA = DatasetSource("a", (Path("a.json"),))
SHAREGPT = DatasetSource("s", (Path("s.json"),), "sharegpt")
OPENAI = DatasetSource("o", (Path("o.json"),), "openai", Columns(messages="messages"), OPENAI_TAGS)
QUERY = DatasetSource("q", (Path("q.json"),), "query_response", Columns(prompt=None, query=None, response=None))
TEXT = DatasetSource("t", (Path("t.txt"),), "text", Columns(prompt="text"))


def sharegpt(*turns: tuple[Any, Any], **fields: Any) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": value} for role, value in turns], **fields}


def openai(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages), **fields}


def said(role: str, content: Any = "x", **keys: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **keys}
