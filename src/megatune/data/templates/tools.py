"""How tools are offered in the system message, and how calls are written: one pair of functions for each format."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatune.data.bad_rows import RowError
from megatune.data.conversation import ToolCall

Tool = dict[str, Any]


def call_id(number: int) -> str:
    """Return the id of a conversation's call `number` (from 0), and of the answer to it, in formats that write ids.

    Mistral's takes nine letters or digits. Counted, not random: a random one would be text that nobody can learn.
    """
    return f"call{number:05d}"


def _answer_plain(content: str, number: int) -> str:
    return content  # not a lambda: formats are sent to worker processes


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A way of writing tools.

    Attributes:
        offer: the text that describes the tools.
        calls: the text of an assistant's calls, of which the first is the conversation's call `number`.
        answer: what replaces {content} where a tool answers the conversation's call `number`.
        offer_before_question: the offer is written before the last message of the user, not after the system message.
        offer_before_system: the offer is written before the system message's text, not after it.
        joiner: between what the assistant says and its calls.
    """

    name: str
    offer: Callable[[Sequence[Tool]], str]
    calls: Callable[[Sequence[ToolCall], int], str]
    answer: Callable[[str, int], str] = _answer_plain
    offer_before_question: bool = False
    offer_before_system: bool = False
    joiner: str = "\n"


def tool_schema(tool: Tool) -> Tool:
    """Return the schema as OpenAI's API has it: {"type": "function", "function": {...}}.

    Raises:
        RowError: it names no function.
    """
    is_whole = isinstance(tool, dict) and tool.get("type") == "function"
    schema = tool if is_whole else {"type": "function", "function": tool}
    function = schema.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError("bad-tools", "a tool without a name")
    return schema


def _json(value: object, indent: int | None = None) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, indent=indent)
    except (TypeError, ValueError) as error:
        raise RowError("bad-tools", "a tool or a call of one that JSON cannot hold", str(error)) from error


def _offer_qwen(tools: Sequence[Tool]) -> str:
    schemas = "".join(f"\n{_json(tool_schema(tool))}" for tool in tools)
    return (
        "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>{schemas}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within <tool_call></tool_call> "
        'XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def _calls_qwen(calls: Sequence[ToolCall], number: int) -> str:
    objects = ({"name": call.name, "arguments": call.arguments} for call in calls)
    return "\n".join(f"<tool_call>\n{_json(each)}\n</tool_call>" for each in objects)


# Llama 3's tool prompt states the day. This is the one its own chat template falls back to; the true day would make the
# same data other tokens tomorrow.
LLAMA3_DATE = "26 Jul 2024"


def _offer_llama3(tools: Sequence[Tool]) -> str:
    schemas = "".join(f"{_json(tool_schema(tool), indent=4)}\n\n" for tool in tools)
    return (
        f"Cutting Knowledge Date: December 2023\nToday Date: {LLAMA3_DATE}\n\n"
        "You have access to the following functions. To call a function, please respond with JSON for a function call. "
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}. '
        f"Do not use variables.\n\n{schemas}"
    )


def _calls_llama3(calls: Sequence[ToolCall], number: int) -> str:
    objects = [{"name": call.name, "parameters": call.arguments} for call in calls]
    return _json(objects[0] if len(objects) == 1 else objects)


def _offer_plain(tools: Sequence[Tool]) -> str:
    functions = [tool_schema(tool)["function"] for tool in tools]
    try:
        described = "".join(map(_describe_plain, functions))
        names = ", ".join(function["name"] for function in functions)
    except (KeyError, TypeError, AttributeError) as error:
        detail = f"{type(error).__name__}: {error}"
        raise RowError("bad-tools", "a tool whose parameters are not a JSON schema", detail) from error
    return (
        f"You have access to the following tools:\n{described}Use the following format if using a tool:\n```\n"
        f"Action: tool name (one of [{names}])\n"
        "Action Input: the input to the tool, in a JSON format representing the kwargs "
        '(e.g. ```{"input": "hello world", "num_beams": 5}```)\n```\n'
    )


def _describe_plain(function: Tool) -> str:
    schema = function.get("parameters") or {}
    lines = []
    for name, parameter in (schema.get("properties") or {}).items():
        required = ", required" if name in schema.get("required", ()) else ""
        choices = f", should be one of [{', '.join(map(str, parameter['enum']))}]" if parameter.get("enum") else ""
        items = f", where each item should be {parameter['items'].get('type', '')}" if parameter.get("items") else ""
        kind, description = parameter.get("type", ""), parameter.get("description", "")
        lines.append(f"  - {name} ({kind}{required}): {description}{choices}{items}\n")
    return (
        f"> Tool Name: {function['name']}\nTool Description: {function.get('description', '')}\n"
        f"Tool Args:\n{''.join(lines)}\n"
    )


def _calls_plain(calls: Sequence[ToolCall], number: int) -> str:
    return "\n".join(f"Action: {call.name}\nAction Input: {_json(call.arguments)}" for call in calls)


def _offer_mistral(tools: Sequence[Tool]) -> str:
    schemas = [{"type": "function", "function": tool_schema(tool)["function"]} for tool in tools]
    return f"[AVAILABLE_TOOLS] {_json(schemas)}[/AVAILABLE_TOOLS]"


def _calls_mistral(calls: Sequence[ToolCall], number: int) -> str:
    numbered = enumerate(calls, start=number)
    objects = [{"name": call.name, "arguments": call.arguments, "id": call_id(index)} for index, call in numbered]
    return f"[TOOL_CALLS] {_json(objects)}"


def _answer_mistral(content: str, number: int) -> str:
    # What the tool returns is written as it is, as in the published chat template: JSON where it is JSON.
    return f'{{"content": {content}, "call_id": "{call_id(number)}"}}'


QWEN_TOOLS = ToolFormat(name="qwen", offer=_offer_qwen, calls=_calls_qwen)
LLAMA3_TOOLS = ToolFormat(name="llama3", offer=_offer_llama3, calls=_calls_llama3)
MISTRAL_TOOLS = ToolFormat(
    name="mistral", offer=_offer_mistral, calls=_calls_mistral, answer=_answer_mistral, offer_before_question=True,
    joiner="",
)  # fmt: skip
PLAIN_TOOLS = ToolFormat(name="plain", offer=_offer_plain, calls=_calls_plain)

TOOL_FORMATS = {tool_format.name: tool_format for tool_format in (QWEN_TOOLS, LLAMA3_TOOLS, MISTRAL_TOOLS, PLAIN_TOOLS)}
