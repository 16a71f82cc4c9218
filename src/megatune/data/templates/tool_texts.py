"""Render tools and tool calls with placeholders in braces, for tool formats and agent templates."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatune.data.bad_rows import RowError
from megatune.data.conversation import ToolCall

Tool = dict[str, Any]
_GEMMA4_QUOTE = '<|"|>'
_PLACEHOLDER = re.compile(r"\{(\w+)\}")

# Keys of a JSON schema: those with a dict of schemas, those whose value may be null, and those with lists that may
# contain null.
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_NULLABLE = ("default", "const")
_LISTS_WITH_NULL = ("enum", "examples")


def compact(value: object, indent: int | None = None) -> str:
    """Return JSON on one line (or indented), without escapes for non-ASCII characters."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def wrapped(tool: Mapping[str, Any], version: int) -> Tool:
    """Return a tool wrapped as {"type": "function", "function": ...}, as agent templates expect it. From ms-swift 4 on,
    without the null fields that Arrow adds to tools that share a table with others."""
    kept = dict(tool) if version < 4 else drop_null_fields(dict(tool))
    return kept if "type" in kept or "function" in kept else {"type": "function", "function": kept}


def drop_null_fields(schema: Any) -> Any:
    """Return a schema without its null fields, except where null has a meaning."""
    if isinstance(schema, list):
        return [drop_null_fields(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept: Tool = {}
    for key, value in schema.items():
        if key in _NULLABLE or key.startswith("x-"):
            kept[key] = value
        elif value is None:
            continue
        elif key in _LISTS_WITH_NULL:
            kept[key] = value
        elif key in _NAMED_SCHEMAS and isinstance(value, dict):
            kept[key] = {name: drop_null_fields(item) for name, item in value.items() if item is not None}
        else:
            kept[key] = drop_null_fields(value)
    return kept


def _function(tool: Tool) -> Tool:
    function: Tool = tool["function"] if "type" in tool and "function" in tool else tool
    return function


def _name(tool: Tool) -> Any:
    function = _function(tool)
    return function.get("name_for_model") or function.get("name")


def tool_name(tool: Tool) -> str:
    """Return the name by which the model calls a tool.

    Raises:
        KeyError: it has none.
    """
    name = _name(tool)
    if not isinstance(name, str):
        raise KeyError("name")
    return name


def _description(tool: Tool) -> str:
    function = _function(tool)
    description = function.get("description")
    description = function.get("description_for_model") if description is None else description
    if description is None:
        raise KeyError("description")
    return str(description)


def _parameters(tool: Tool) -> str:
    parameters = _function(tool).get("parameters") or {}
    return parameters if isinstance(parameters, str) else compact(parameters)


def _xml(tool: Tool) -> str:
    function = tool.get("function", tool)
    parameters = function.get("parameters", {})
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    lines = [f"<function>\n<name>{function['name']}</name>"]
    if "description" in function:
        lines.append(f"<description>{function['description'].strip()}</description>")
    lines.append("<parameters>")
    for name, schema in (properties if isinstance(properties, dict) else {}).items():
        lines += _xml_parameter(name, schema)
    lines += _xml_others(parameters, ("type", "properties"))
    lines.append("</parameters>")
    lines += _xml_others(function, ("type", "name", "description", "parameters"))
    lines.append("</function>")
    return "\n".join(lines)


def _xml_parameter(name: str, schema: Tool) -> Iterable[str]:
    yield f"<parameter>\n<name>{name}</name>"
    if "type" in schema:
        yield f"<type>{schema['type']}</type>"
    if "description" in schema:
        yield f"<description>{schema['description'].strip()}</description>"
    yield from _xml_others(schema, ("name", "type", "description"))
    yield "</parameter>"


def _xml_others(schema: Any, known: Iterable[str]) -> Iterable[str]:
    if isinstance(schema, dict):
        return [f"<{key}>{compact(value)}</{key}>" for key, value in schema.items() if key not in known]
    return []


def _plain(tool: Tool) -> str:
    """Describe a tool in LLaMA-Factory's default format."""
    function = _function(tool)
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


def _gemma4(tool: Tool) -> str:
    function = _function(tool)
    parts = [f"description:{_quoted(function.get('description', ''))}"]
    if schema := function.get("parameters"):
        inner = []
        if properties := schema.get("properties"):
            described = (f"{name}:{{{_described(each)}}}" for name, each in properties.items())
            inner.append(f"properties:{{{','.join(described)}}}")
        if required := schema.get("required"):
            inner.append(f"required:[{','.join(map(_quoted, required))}]")
        inner += _type_of(schema)
        parts.append(f"parameters:{{{','.join(inner)}}}")
    if response := function.get("response"):
        said = [f"description:{_quoted(response['description'])}"] if response.get("description") else []
        said += [each for each in _type_of(response) if "OBJECT" in each]
        parts.append(f"response:{{{','.join(said)}}}")
    return f"declaration:{function['name']}{{{','.join(parts)}}}"


def _described(schema: Mapping[str, Any]) -> str:
    said = [f"description:{_quoted(schema['description'])}"] if schema.get("description") else []
    return ",".join([*said, *_type_of(schema)])


def _type_of(schema: Mapping[str, Any]) -> list[str]:
    return [f"type:{_quoted(str(schema['type']).upper())}"] if schema.get("type") else []


def _quoted(text: str) -> str:
    return f"{_GEMMA4_QUOTE}{text}{_GEMMA4_QUOTE}"


def _gemma4_value(value: Any) -> str:
    """Format a value as Gemma 4 does: keys sorted and without quotes."""
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_gemma4_value(value[key])}' for key in sorted(value))}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_gemma4_value, value))}]"
    return compact(value) if value is None or isinstance(value, bool) else str(value)


def _gemma4_arguments(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments
    written = _gemma4_value(arguments)
    return written[1:-1] if isinstance(arguments, Mapping) else written


# The placeholders of a tool's text.
TOOL_FIELDS: dict[str, Callable[[Tool], str]] = {
    "tool": compact,
    "tool_indented": lambda tool: compact(tool, indent=4),
    "function": lambda tool: compact(_function(tool)),
    "function_indented": lambda tool: compact(_function(tool), indent=4),
    "name": lambda tool: str(_name(tool)),
    "human": lambda tool: str(_function(tool).get("name_for_human") or _name(tool)),
    "description": _description,
    "parameters": _parameters,
    "summary": lambda tool: str(_function(tool).get("description", "")),
    "schema": lambda tool: compact(_function(tool).get("parameters", {})),
    "xml": _xml,
    "plain": _plain,
    "function_name": lambda tool: str(_function(tool)["name"]),
    "gemma4": _gemma4,
}

# The placeholders of a call's text. ms-swift's ReAct formats arguments as Python does: quotes, None and True.
CALL_FIELDS: dict[str, Callable[[ToolCall, int], str]] = {
    "name": lambda call, number: call.name,
    "name_json": lambda call, number: compact(call.name),
    "id": lambda call, number: call_id(number),
    "json": lambda call, number: compact(call.arguments),
    "python": lambda call, number: str(call.arguments),
    "object": lambda call, number: compact({"name": call.name, "arguments": call.arguments}),
    "parameters_object": lambda call, number: compact({"name": call.name, "parameters": call.arguments}),
    "gemma4": lambda call, number: _gemma4_arguments(call.arguments),
}

# The formats of an argument's value.
_VALUES: dict[str, Callable[[Any], str]] = {
    "json": lambda value: value if isinstance(value, str) else compact(value),
    "python": str,
    "ascii": lambda value: json.dumps(value) if isinstance(value, dict | list) else str(value),
    "quoted": lambda value: f'"{value}"' if isinstance(value, str) else compact(value),
}


def call_id(number: int) -> str:
    """Return the id of call `number` (from 0) of a conversation, and of its result, in formats that write ids.

    Mistral's ids have nine letters or digits. They are counted: random ids would be text that no model can learn.
    """
    return f"call{number:05d}"


def fill(text: str, **values: str) -> str:
    """Replace each {name} that has a value; all others, such as {"name": ...}, stay unchanged."""
    return _PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), text)


def fill_from(text: str, functions: Mapping[str, Callable[..., str]], *source: Any) -> str:
    """Replace each {name} by the result of its function for `source`; only functions that the text names are called."""
    return _PLACEHOLDER.sub(lambda found: functions[found[1]](*source) if found[1] in functions else found[0], text)


@dataclass(frozen=True, kw_only=True)
class ToolTexts:
    """How tools and tool calls are formatted.

    Attributes:
        tool, tool_joiner: one of {tools}, with the placeholders of TOOL_FIELDS, and the separator of tools.
        call, call_joiner: one of {calls}, with the placeholders of CALL_FIELDS, or with {name} and {values}.
        value, value_joiner: one argument of {values}, with {key}, {value} and {is_string} (true or false); "": `call`
            has no {values}.
        values: the format of an argument's value, a key of _VALUES.
        all_calls: the text around a run of {calls}.
    """

    tool: str = "{tool}"
    tool_joiner: str = "\n"
    call: str
    call_joiner: str = "\n"
    value: str = ""
    value_joiner: str = ""
    values: str = "json"
    all_calls: str = "{calls}"

    def format_tools(self, tools: Iterable[Tool], name: Callable[[Tool], str] | None = None) -> tuple[str, list[str]]:
        """Return {tools}, and the result of `name` for each.

        Raises:
            RowError: a tool lacks a field that the texts describe.
        """
        try:
            whole = list(tools)
            written = self.tool_joiner.join(fill_from(self.tool, TOOL_FIELDS, tool) for tool in whole)
            return written, [name(tool) for tool in whole] if name is not None else []
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            detail = f"{type(error).__name__}: {error}"
            raise RowError("bad-tools", "a tool that the template cannot describe", detail) from error

    def format_calls(self, calls: Sequence[ToolCall], number: int = 0) -> str:
        """Return the text of a run of calls, the first of which is call `number` of the conversation.

        Raises:
            RowError: the arguments of a call are not an object, but the format writes them one by one.
        """
        try:
            written = [self._call(call, number) for number, call in enumerate(calls, start=number)]
        except (AttributeError, TypeError, ValueError) as error:
            detail = f"{type(error).__name__}: {error}"
            raise RowError("bad-tools", "a call whose arguments are not a JSON object", detail) from error
        return fill(self.all_calls, calls=self.call_joiner.join(written))

    def _call(self, call: ToolCall, number: int) -> str:
        if not self.value:
            return fill_from(self.call, CALL_FIELDS, call, number)
        values = self.value_joiner.join(self._value(key, value) for key, value in call.arguments.items())
        return fill(self.call, name=call.name, values=values)

    def _value(self, key: str, value: object) -> str:
        is_string = "true" if isinstance(value, str) else "false"
        return fill(self.value, key=key, value=_VALUES[self.values](value), is_string=is_string)
