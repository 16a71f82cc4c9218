"""Write agents.json.gz: what ms-swift's own agent templates make of some inputs.

Run it with the Python of an environment that has ms-swift, once for each version: it replaces that version's part.
"""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

# A build of torchvision for another torch lacks these operators; nothing here uses them, but importing it does.
OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
for operator in ("nms", "qnms"):
    OPERATORS.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import swift  # noqa: E402

GOLDEN = Path(__file__).parent / "agents.json.gz"
VERSION = swift.__version__.split(".")[0]
# Megatune refuses these: only their names are kept.
REFUSED = (
    "gemma4", "hy_v3", "hy_v3_preview", "kimi_k25", "kimi_k3", "minicpm5", "minimax_m2", "minimax_m3", "seed_oss",
)  # fmt: skip

WEATHER = {
    "name": "get_weather",
    "description": " Return the weather of a city. ",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "the city's name \n"},
            "unit": {"type": "string", "enum": ["c", "f", None], "default": None},
        },
        "required": ["city"],
    },
}
SEARCH = {
    "name": "搜索",
    "description": "在网上搜索 {names}",
    "parameters": {
        "type": "object",
        "properties": {
            "query": {"type": ["string", "array"], "description": "要搜索的内容"},
            "filter": {
                "type": "object",
                "properties": {"since": {"type": "string"}, "sites": {"type": "array", "items": {"type": "string"}}},
                "additionalProperties": False,
            },
        },
    },
    "strict": True,
}
BARE = {"name": "stop"}
HUMAN = {"name_for_model": "calc", "name_for_human": "Calculator", "description_for_model": "Adds.", "parameters": "{}"}
PADDED = {
    "type": "function",
    "function": {
        "name": "pad",
        "description": "Has fields of other tools.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "enum": None}, "b": None}},
        "strict": None,
    },
}
NULLS = {
    "name": "nulls",
    "description": "Has nulls that mean something.",
    "x-note": {"a": None},
    "parameters": {
        "$defs": {"used": {"type": "string", "title": None}, "default": None},
        "anyOf": [{"const": None}, {"type": None, "examples": [None, {"a": None}]}, {"examples": None}],
        "properties": {"const": {"default": None, "items": {"default": None, "minimum": None}}},
    },
}
NO_FUNCTION = {"type": "function", "name": "flat", "description": "Is not nested.", "parameters": None}


def wrapped(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": tool}


OFFERS = [
    ([], "Be brief.", "How warm is it?"),
    ([WEATHER], None, "How warm is it?"),
    ([WEATHER], "", "How warm is it?"),
    ([WEATHER], "Be brief.\n", "你好 {tools} {system}"),
    ([wrapped(WEATHER), wrapped(SEARCH), wrapped(HUMAN)], "  {tools} Be brief.", "How warm is it?"),
    ([SEARCH], "用中文回答。", ""),
    ([SEARCH, WEATHER], " ", "How?"),
    ([BARE], "Be brief.", "How?"),
    ([wrapped({"name": "stop", "description": "", "parameters": {}})], None, "How?"),
    ([HUMAN], None, "How?"),
    ([PADDED, wrapped(WEATHER)], "Be brief.", "How?"),
    ([NULLS], "Be brief.", "How?"),
    ([NO_FUNCTION], None, "How?"),
    ([{"function": WEATHER}], None, "How?"),
    ([wrapped({"description": "nameless", "parameters": {"type": "object", "properties": {}}})], "S", "How?"),
    ([wrapped({**WEATHER, "parameters": "text"})], "S", "How?"),
]
KINDS = {"t": True, "f": False, "n": None, "i": 3, "x": 1.5, "big": 1e20, "list": [1, "二"], "s": "true", "m": "a\nb"}
CALLS: list[tuple[list[tuple[str, Any]], str | None]] = [
    ([("get_weather", {"city": "Paris"})], None),
    ([("get_weather", {"city": "Paris"})], ""),
    ([("get_weather", {"city": "Paris"})], "I look it up.\n"),
    ([("get_weather", {"city": "Paris"})], " \n"),
    ([("get_weather", {"city": "北京"})], "<think>\nHm.\n</think>\n\n"),
    ([("get_weather", {"city": "北京"})], "<think>\nHm.\n</think>\n\n I look. "),
    ([("a", {"city": "{name}"}), ("b", {"city": "{value}"}), ("搜索", {"query": "天气"})], "Three."),
    ([("deep", {"a": {"b": [{"c": "d", "é": None}]}, "e": 'it\'s "so"'})], None),
    ([("kinds", KINDS)], "x"),
    ([("stop", {})], None),
    ([("stop", {}), ("stop", {})], "Twice."),
    ([("listed", [1, 2])], None),
    ([("number", 5)], None),
    ([("text", "city=Paris")], None),
]
REACT = "Thought: I look.\nAction: get_weather\nAction Input: {'city': 'Paris'}"
QWEN = "✿FUNCTION✿: get_weather\n✿ARGS✿: {'city': 'Paris'}"
RESULTS = [
    ("I look.", ["20 degrees"]),
    ("I look.", ["20 degrees", "30 {content}", '{"晴": "天"}\n']),
    ("", [""]),
    (REACT, ["20 degrees"]),
    (REACT + "\n", ["20 degrees\n", "30"]),
    (REACT + "\nObservation:", ["20 degrees"]),
    (QWEN, ["20 degrees", "30"]),
    (QWEN + "\n✿RESULT✿:", ["20 degrees\n"]),
    ("Action: alone", ["20 {results}"]),
    ("<tool_call>\n{}\n</tool_call>", ["a", "b"]),
]
STANDALONE = [["20 degrees"], ["20 degrees\n", "30 {content}"], ["晴"]]
CHAT = {"prompt": "<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n", "separator": "<|im_end|>\n"}


def templates() -> dict[str, type]:
    if VERSION == "3":
        from swift.plugin.agent_template import agent_templates

        return agent_templates
    from swift.agent_template import agent_template_map

    return agent_template_map


def offer(template: Any, tools: list[dict[str, Any]], system: str | None, question: str) -> list[str]:
    if not tools:
        return [system or "", question]
    tools = copy.deepcopy(tools)
    if VERSION == "4":
        from swift.utils import remove_arrow_padding

        tools = [remove_arrow_padding(tool) for tool in tools]
    message = {"role": "user", "content": question}
    tools = [template.wrap_tool(tool) for tool in tools]
    return [template._format_tools(tools, system, message), message["content"]]


def calls(template: Any, called: list[tuple[str, Any]], before: str | None) -> list[str | None]:
    messages = [
        {"role": "tool_call", "content": json.dumps({"name": name, "arguments": json.dumps(arguments)})}
        for name, arguments in called
    ]
    text = template._format_tool_calls(messages)
    message = None if before is None else {"role": "assistant", "content": before}
    if VERSION == "4":
        text = template._add_tool_call_prefix(text, message)
    return [message["content"] if message else None, text]


def results(template: Any, answer: str, returned: list[str]) -> list[str]:
    answer, contexts = template._format_tool_responses(answer, [{"role": "tool", "content": each} for each in returned])
    return [answer, "".join(contexts)]


def standalone(template: Any, returned: list[str]) -> str | None:
    if VERSION == "3":
        return None
    try:
        return "".join(template._format_standalone_tool_responses([{"content": each} for each in returned]))
    except NotImplementedError:
        return None


def attempt(function: Any, template: Any, *inputs: Any) -> Any:
    try:
        return function(template, *inputs)
    except Exception as error:
        return {"error": type(error).__name__}


def outputs(name: str) -> dict[str, list[Any]]:
    template = templates()[name]()
    prompt = CHAT["prompt"].replace("{content}", "{{QUERY}}")
    template.template_meta = SimpleNamespace(prompt=[prompt], chat_sep=[CHAT["separator"]])
    return {
        "offers": [attempt(offer, template, *each) for each in OFFERS],
        "calls": [attempt(calls, template, *each) for each in CALLS],
        "results": [attempt(results, template, *each) for each in RESULTS],
        "standalone": [attempt(standalone, template, each) for each in STANDALONE],
    }


def main() -> None:
    golden = json.loads(gzip.decompress(GOLDEN.read_bytes())) if GOLDEN.exists() else {"versions": {}}
    golden["inputs"] = {"offers": OFFERS, "calls": CALLS, "results": RESULTS, "standalone": STANDALONE, "chat": CHAT}
    golden["versions"][VERSION] = {name: None if name in REFUSED else outputs(name) for name in sorted(templates())}
    text = json.dumps(golden, ensure_ascii=False)
    GOLDEN.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"ms-swift {swift.__version__}: {len(golden['versions'][VERSION])} names, {GOLDEN.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
