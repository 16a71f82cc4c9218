"""Tools on offer, and calls of them, as ShareGPT and as OpenAI write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megatune.data.bad_rows import RowError
from megatune.data.conversation import ToolCall
from megatune.data.formats.fields import encodable_json, short
from megatune.data.readers import json_type


def tools(row: Mapping[str, Any], column: str | None) -> tuple[dict[str, Any], ...]:
    """Tool schemas: a list, or JSON of one; () where the column is off, missing, null or empty.

    Raises:
        RowError: it is neither.
    """
    schemas = row.get(column) if column else None
    if not schemas or column is None:
        return ()
    if isinstance(schemas, str):
        try:
            schemas = json.loads(schemas) if schemas.strip() else None
        except json.JSONDecodeError as error:
            raise RowError("bad-tools", f"field {column!r} is not JSON", _where(error)) from error
        except (ValueError, RecursionError) as error:
            raise RowError("bad-tools", f"field {column!r} is not JSON", str(error)) from error
        if not schemas:
            return ()
    if not isinstance(schemas, list) or not all(isinstance(schema, dict) for schema in schemas):
        raise RowError("bad-tools", f"field {column!r}: expected a list of tool schemas", f"got {short(schemas)}")
    encodable_json(schemas, column)
    return tuple(schemas)


def function_call(value: str, owner: str, place: str) -> tuple[str, tuple[ToolCall, ...]]:
    """ShareGPT's function_call: JSON {"name", "arguments"} or a list of them, after an optional thought.

    Returns:
        The thought with its tags, "" where there is none, and the calls.
    """
    thought = ""
    if value.lstrip().startswith("<think>") and "</think>" in value:
        thought, _, value = value.partition("</think>")
        thought += "</think>\n\n"
    try:
        calls = json.loads(value)
    except json.JSONDecodeError as error:
        detail = _placed(place, f"{_where(error)} of {short(value)}")
        raise RowError("bad-tool-call", "a function call is not JSON", detail) from error
    except (ValueError, RecursionError) as error:
        raise RowError("bad-tool-call", "a function call is not JSON", _placed(place, str(error))) from error
    if calls == []:
        raise RowError("bad-tool-call", "a function call without a call", place)
    return thought, tool_calls(calls if isinstance(calls, list) else [calls], owner, place)


def tool_calls(calls: object, owner: str, place: str) -> tuple[ToolCall, ...]:
    """Calls as OpenAI writes them, {"function": {"name", "arguments"}}, or without "function" around.

    Arguments are an object, or JSON of one; without arguments they are {}.
    """
    if not isinstance(calls, list):
        raise RowError("bad-tool-call", "tool calls are not a list", _placed(place, f"got {json_type(calls)}"))
    return tuple(_tool_call(call, owner, place) for call in calls)


def _tool_call(call: object, owner: str, place: str) -> ToolCall:
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    arguments = function.get("arguments", {}) if isinstance(function, dict) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            detail = _placed(place, short(call))
            raise RowError("bad-tool-call", "the arguments of a tool call are not JSON", detail) from error
    if not (isinstance(name, str) and name) or not isinstance(arguments, dict):
        reason = "a tool call needs a name and an object of arguments"
        raise RowError("bad-tool-call", reason, _placed(place, short(call)))
    encodable_json([name, arguments], owner, place)
    return ToolCall(name, arguments)


def _where(error: json.JSONDecodeError) -> str:
    return f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"


def _placed(place: str, what: str) -> str:
    return f"{place}: {what}" if place else what
