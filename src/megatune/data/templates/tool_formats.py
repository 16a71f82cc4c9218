"""LLaMA-Factory's formats of tools, which `tool_format` puts in the place of a template's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from megatune.data.bad_rows import RowError
from megatune.data.conversation import ToolCall
from megatune.data.templates.tools import LLAMA3_TOOLS, PLAIN_TOOLS, QWEN_TOOLS, Tool, ToolFormat, tool_schema

_json = partial(json.dumps, ensure_ascii=False)
_TEXT = '<|"|>'  # Gemma 4's quotation mark


def _function(tool: Tool) -> Tool:
    function: Tool = tool_schema(tool)["function"]
    return function


def _lines(parts: Iterable[str]) -> str:
    return "".join(f"\n{part}" for part in parts)


def _arguments(call: ToolCall) -> Mapping[str, Any]:
    """Return the arguments by name, in formats that write them one by one."""
    if not isinstance(call.arguments, Mapping):
        raise RowError("bad-tools", "a call whose arguments are not an object", f"{call.name}: {call.arguments!r}")
    return call.arguments


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _offer_glm4(tools: Sequence[Tool]) -> str:
    described = (
        f"\n\n## {function['name']}\n\n{_json(function, indent=4)}\n在调用上述函数时，请使用 Json 格式表示调用的参数。"
        for function in map(_function, tools)
    )
    return (
        "你是一个名为 ChatGLM 的人工智能助手。你是基于智谱 AI 公司训练的语言模型 GLM-4 模型开发的，"
        f"你的任务是针对用户的问题和要求提供适当的答复和支持。\n\n# 可用工具{''.join(described)}"
    )


def _calls_glm4(calls: Sequence[ToolCall], number: int) -> str:
    if len(calls) > 1:
        raise RowError("bad-tools", "several calls at once, which tool_format: glm4 has no text for")
    return f"{calls[0].name}\n{_json(calls[0].arguments)}"


def _offer_glm4_moe(tools: Sequence[Tool]) -> str:
    return (
        "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
        f"{_lines(_json(tool_schema(tool)) for tool in tools)}\n</tools>\n\n"
        "For each function call, output the function name and arguments within the following XML format:\n"
        "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n"
        "<arg_key>{arg-key-2}</arg_key>\n<arg_value>{arg-value-2}</arg_value>\n...\n</tool_call>\n"
    )


def _calls_glm4_moe(calls: Sequence[ToolCall], number: int) -> str:
    def written(call: ToolCall) -> str:
        pairs = (
            f"\n<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>"
            for key, value in _arguments(call).items()
        )
        return f"\n<tool_call>{call.name}{''.join(pairs)}"

    return "\n".join(map(written, calls))


def _offer_mistral(tools: Sequence[Tool]) -> str:
    return f"[AVAILABLE_TOOLS] {_json([tool_schema(tool) for tool in tools])}[/AVAILABLE_TOOLS]"


def _calls_mistral(calls: Sequence[ToolCall], number: int) -> str:
    return _json([{"name": call.name, "arguments": call.arguments} for call in calls])


def _offer_minimax1(tools: Sequence[Tool]) -> str:
    described = "".join(f"{_json(_function(tool))}\n" for tool in tools)
    return (
        f"You are provided with these tools:\n<tools>\n{described}</tools>\n\n"
        "If you need to call tools, please respond with <tool_calls></tool_calls> XML tags, and provide tool-name and "
        "json-object of arguments, following the format below:\n<tool_calls>\n"
        '{"name": <tool-name-1>, "arguments": <args-json-object-1>}\n...\n</tool_calls>'
    )


def _calls_minimax1(calls: Sequence[ToolCall], number: int) -> str:
    written = (_json({"name": call.name, "arguments": call.arguments}) for call in calls)
    return f"<tool_calls>{_lines(written)}\n</tool_calls>"


def _offer_minimax2(tools: Sequence[Tool]) -> str:
    described = "".join(f"<tool>{_json(_function(tool))}</tool>\n" for tool in tools)
    return (
        "\n\n# Tools\n\nYou may call one or more tools to assist with the user query.\n"
        f"Here are the tools available in JSONSchema format:\n\n<tools>\n{described}</tools>\n\n"
        "When making tool calls, use XML format to invoke tools and pass parameters:\n\n"
        '<minimax:tool_call>\n<invoke name="tool-name-1">\n<parameter name="param-key-1">param-value-1</parameter>\n'
        '<parameter name="param-key-2">param-value-2</parameter>\n...\n</invoke>\n</minimax:tool_call>'
    )


def _calls_minimax2(calls: Sequence[ToolCall], number: int) -> str:
    def written(call: ToolCall) -> str:
        pairs = [f'<parameter name="{key}">{_text(value)}</parameter>' for key, value in _arguments(call).items()]
        return f'<invoke name="{call.name}">{_lines(pairs)}\n</invoke>'

    return "\n".join(map(written, calls))


def _offer_qwen3_5(tools: Sequence[Tool]) -> str:
    return _described_qwen3_5(map(_function, tools))


def _offer_published_qwen3_5(tools: Sequence[Tool]) -> str:
    return _described_qwen3_5(map(tool_schema, tools))


def _described_qwen3_5(schemas: Iterable[Tool]) -> str:
    return (
        "\n\n# Tools\n\nYou have access to the following functions:\n\n<tools>"
        f"{_lines(map(_json, schemas))}\n</tools>\n\n"
        "If you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
        "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
        "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n"
        "</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n"
        "- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested "
        "within <tool_call></tool_call> XML tags\n- Required parameters MUST be specified\n"
        "- You may provide optional reasoning for your function call in natural language BEFORE the function call, but "
        "NOT after\n- If there is no function call available, answer the question like normal with your current "
        "knowledge and do not tell the user about function calls\n</IMPORTANT>"
    )


def _calls_qwen3_5(calls: Sequence[ToolCall], number: int) -> str:
    def written(call: ToolCall) -> str:
        pairs = [f"<parameter={key}>\n{_text(value)}\n</parameter>" for key, value in _arguments(call).items()]
        return f"<tool_call>\n<function={call.name}>{_lines(pairs)}\n</function>\n</tool_call>"

    return "\n".join(map(written, calls))


def _offer_seed_oss(tools: Sequence[Tool]) -> str:
    return (
        "system\nYou are Doubao, a helpful AI assistant. You may call one or more functions to assist with the user "
        "query.Tool List:\nYou are authorized to use the following tools (described in JSON Schema format). Before "
        "performing any task, you must decide how to call them based on the descriptions and parameters of these "
        f"tools.\n{_json([*tools])}\n工具调用请遵循如下格式:\n<seed:tool_call>\n<function=example_function_name>\n"
        "<parameter=example_parameter_1>value_1</parameter>\n<parameter=example_parameter_2>This is the value for the "
        "second parameter\nthat can span\nmultiple lines</parameter>\n</function>\n</seed:tool_call>\n"
    )


def _calls_seed_oss(calls: Sequence[ToolCall], number: int) -> str:
    def written(call: ToolCall) -> str:
        pairs = [f"<parameter={key}>{_text(value)}</parameter>" for key, value in _arguments(call).items()]
        # As in LLaMA-Factory, the name has no bracket behind it.
        return f"\n<seed:tool_call>\n<function={call.name}{_lines(pairs)}\n</function>\n</seed:tool_call>"

    return "\n".join(map(written, calls))


def _offer_ling(tools: Sequence[Tool]) -> str:
    return QWEN_TOOLS.offer(tools).removeprefix("\n\n") + "\ndetailed thinking off"


def _offer_lfm2(tools: Sequence[Tool]) -> str:
    return f"List of tools: <|tool_list_start|>{_json([_function(tool) for tool in tools])}<|tool_list_end|>"


def _calls_lfm2(calls: Sequence[ToolCall], number: int) -> str:
    def written(call: ToolCall) -> str:
        pairs = (
            f'{key}="{value}"' if isinstance(value, str) else f"{key}={_json(value)}"
            for key, value in _arguments(call).items()
        )
        return f"{call.name}({', '.join(pairs)})"

    return f"<|tool_call_start|>[{', '.join(map(written, calls))}]<|tool_call_end|>"


def _offer_gemma4(tools: Sequence[Tool]) -> str:
    return "\n".join(_declaration(_function(tool)) for tool in tools)


def _declaration(function: Tool) -> str:
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
    return f"{_TEXT}{text}{_TEXT}"


def _calls_gemma4(calls: Sequence[ToolCall], number: int) -> str:
    def written(call: ToolCall) -> str:
        if isinstance(call.arguments, str):
            return call.arguments
        return _value(call.arguments)[1:-1] if isinstance(call.arguments, Mapping) else _value(call.arguments)

    return "".join(f"<|tool_call>call:{call.name}{{{written(call)}}}<tool_call|>" for call in calls)


def _value(value: Any) -> str:
    """Write a value as Gemma 4 does: keys sorted and bare."""
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_value(value[key])}' for key in sorted(value))}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_value, value))}]"
    return _json(value) if value is None or isinstance(value, bool) else str(value)


def _described_or_refused(offer: Callable[[Sequence[Tool]], str], tools: Sequence[Tool]) -> str:
    """Write an offer; a schema without what the format describes is the row's fault."""
    try:
        return offer(tools)
    except (KeyError, TypeError, AttributeError) as error:
        detail = f"{type(error).__name__}: {error}"
        raise RowError("bad-tools", "a tool that tool_format cannot describe", detail) from error


def _format(name: str, offer: Callable[..., str], calls: Callable[..., str]) -> ToolFormat:
    return ToolFormat(name=name, offer=partial(_described_or_refused, offer), calls=calls)


# As Qwen3.5's chat template has it, where LLaMA-Factory leaves out that a tool is a function.
QWEN3_5_TOOLS = ToolFormat(
    name="qwen3_5", offer=_offer_published_qwen3_5, calls=_calls_qwen3_5, offer_before_system=True, joiner="\n\n"
)

# By LLaMA-Factory's names.
LLAMAFACTORY_TOOLS: dict[str, ToolFormat] = {
    tools.name: tools
    for tools in (
        _format("default", PLAIN_TOOLS.offer, PLAIN_TOOLS.calls),
        _format("gemma4", _offer_gemma4, _calls_gemma4),
        _format("glm4", _offer_glm4, _calls_glm4),
        _format("glm4_moe", _offer_glm4_moe, _calls_glm4_moe),
        _format("lfm2", _offer_lfm2, _calls_lfm2),
        _format("ling", _offer_ling, QWEN_TOOLS.calls),
        _format("llama3", LLAMA3_TOOLS.offer, LLAMA3_TOOLS.calls),
        _format("minimax1", _offer_minimax1, _calls_minimax1),
        _format("minimax2", _offer_minimax2, _calls_minimax2),
        _format("mistral", _offer_mistral, _calls_mistral),
        _format("qwen", QWEN_TOOLS.offer, QWEN_TOOLS.calls),
        _format("qwen3_5", _offer_qwen3_5, _calls_qwen3_5),
        _format("seed_oss", _offer_seed_oss, _calls_seed_oss),
    )
}
