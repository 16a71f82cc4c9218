"""Describe one tool in the ways that ms-swift's agent templates do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Tool = dict[str, Any]

# Keys of a JSON schema: of dicts of other schemas, with null as a value, and of lists that may have null in them.
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_NULLABLE = ("default", "const")
_LISTS_WITH_NULL = ("enum", "examples")


def compact(value: object, indent: int | None = None) -> str:
    """Return JSON on one line (or indented), with letters of every script as they are."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def prepared(tool: Mapping[str, Any], version: int) -> Tool:
    """Return a tool as agent templates get it: wrapped as {"type": "function", "function": ...} and, from version 4
    of ms-swift on, without the null fields that Arrow gives to tools that share a table with others."""
    kept = dict(tool) if version < 4 else without_padding(dict(tool))
    return kept if "type" in kept or "function" in kept else {"type": "function", "function": kept}


def without_padding(schema: Any) -> Any:
    """Return a schema without its null fields, except where null means something."""
    if isinstance(schema, list):
        return [without_padding(item) for item in schema]
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
            kept[key] = {name: without_padding(item) for name, item in value.items() if item is not None}
        else:
            kept[key] = without_padding(value)
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


def _human_name(tool: Tool) -> str:
    return str(_function(tool).get("name_for_human") or _name(tool))


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


# The placeholders of a tool in agents.yaml.
TOOL_FIELDS: dict[str, Callable[[Tool], str]] = {
    "tool": compact,
    "tool_indented": lambda tool: compact(tool, indent=4),
    "function": lambda tool: compact(_function(tool)),
    "function_indented": lambda tool: compact(_function(tool), indent=4),
    "name": lambda tool: str(_name(tool)),
    "human": _human_name,
    "description": _description,
    "parameters": _parameters,
    "summary": lambda tool: str(_function(tool).get("description", "")),
    "schema": lambda tool: compact(_function(tool).get("parameters", {})),
    "xml": _xml,
}
