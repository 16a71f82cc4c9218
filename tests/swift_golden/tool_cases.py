"""Cases of tools, calls and responses."""

from __future__ import annotations

import json
from typing import Any

from casework import add, flag, for_stage, pairwise, turns

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather. ",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "A city's name"},
                "days": {"type": "integer", "enum": [1, 2]},
            },
            "required": ["city"],
        },
    },
}
ADD = {"name": "加", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}


def call(name: str, *, as_text: bool = True, **arguments: Any) -> dict[str, Any]:
    """A call of a tool."""
    content = {"name": name, "arguments": arguments}
    return {"role": "tool_call", "content": json.dumps(content, ensure_ascii=False) if as_text else content}


def told(text: str, role: str = "tool_response") -> dict[str, Any]:
    """What a tool says."""
    return {"role": role, "content": text}


ASKED = turns("Weather in Rome?")
ROME, SUNNY = call("get_weather", city="Rome", days=2), told('{"sky": "clear", "t": 21}')
TOOL_ROWS: dict[str, list[dict[str, Any]]] = {
    "none": turns("Hi?", "Yes."),
    "call": [*ASKED, ROME],
    "round": [*ASKED, ROME, SUNNY, *turns(None, "It is sunny.")],
    "text first": [*ASKED, *turns(None, "I look. "), ROME, SUNNY, *turns(None, "It is sunny.")],
    "two calls": [*ASKED, ROME, call("加", a=1.5), SUNNY, told("2.5\n"), *turns(None, "Sunny; 2.5.")],
    "two rounds": [*ASKED, ROME, SUNNY, call("加", a=2), told("3", "tool"), *turns(None, "Sunny and 3.")],
    "goes on": [*ASKED, ROME, SUNNY, *turns(None, "It is sunny.", "Thanks.")[:1], *turns("Thanks", "Bye.")],
    "system": [*turns(system="Be brief."), *ASKED, ROME, SUNNY, *turns(None, "Sunny.")],
    "thought": [*ASKED, *turns(None, "<think>\nlook\n</think>\n\n"), ROME, SUNNY,
                *turns(None, "<think>\ngood\n</think>\n\nIt is sunny."), *turns("So?", "Go.")],
    "loss": [*ASKED, {**ROME, "loss": False}, SUNNY, {**turns(None, "It is sunny.")[0], "loss": True}],
    "typed": [*ASKED, call("get_weather", city="Rome", flag=True, none=None, many=[1, "é"], deep={"a": False}),
              SUNNY, *turns(None, "Ok.")],
    "words": [*ASKED, {"role": "assistant", "content": "Action: get_weather\nAction Input: {}"}, SUNNY,
              *turns(None, "Sunny.")],
    "after user": [*ASKED, SUNNY, *turns(None, "Sunny.")],
    "ends in tool": [*ASKED, ROME, SUNNY],
    "bad call": [*ASKED, {"role": "tool_call", "content": "get_weather(Rome)"}, SUNNY, *turns(None, "Sunny.")],
    "parameters": [*ASKED, {"role": "tool_call", "content": '{"name": "f", "parameters": "{\\"a\\": 1}"}'}, SUNNY,
                   *turns(None, "Sunny.")],
    "sharegpt": [*ASKED, {**ROME, "role": "function_call"}, told("x", "observation"), *turns(None, "Sunny.")],
    "function": [*ASKED, {**ROME, "role": "function-call"}, told("x", "function"), *turns(None, "Sunny.")],
}  # fmt: skip
AGENTS = ("hermes", "qwen3_coder", "glm4", "glm4_5", "chatglm4", "glm4_0414", "glm4_7", "deepseek_v3_1", "react_en",
          "react_zh", "qwen_en", "qwen_zh", "qwen_en_parallel", "llama3", "llama4", "mistral", "toolbench",
          "hunyuan_hermes",
          "react_grpo", "seed_oss", "none_such")  # fmt: skip


def tools() -> None:
    """Tools, calls and responses by agent template, model and stage, and in the forms that rows give them."""
    models = ("Qwen3-8B", "Qwen2.5-7B-Instruct", "Meta-Llama-3.1-8B-Instruct", "Qwen3-4B-Thinking-2507",
              "DeepSeek-R1-Distill-Qwen-7B", "Mixtral-8x7B-Instruct-v0.1", "DeepSeek-V3", "Qwen1.5-MoE-A2.7B-Chat",
              "Qwen3-VL-8B-Instruct", "Meta-Llama-3-8B-Instruct", "Qwen3-4B-Instruct-2507")  # fmt: skip
    names = list(TOOL_ROWS)
    # As a text, which both versions keep as it is: v3 gives tools in a list each other's keys, with null.
    both = json.dumps([WEATHER, ADD], ensure_ascii=False)
    for model in models:  # the default agent template, every row by itself
        for name in names:
            add(
                f"tools/{name.replace(' ', '-')}",
                model,
                "sft",
                [{"tools": both, "messages": TOOL_ROWS[name]}],
            )
    axes = {"agent": AGENTS, "model": models[:7], "stage": ("sft", "dpo", "kto"), "rows": (0, 1, 2),
            "loss_scale": (None, "default", "last_round", "all")}  # fmt: skip
    for number, case in enumerate(pairwise(axes)):
        rows = [{**for_stage(case["stage"], TOOL_ROWS[name], at), "tools": both}
                for at, name in enumerate(names[case["rows"]:-3:3])]  # fmt: skip
        flags = [*flag("agent_template", case["agent"]), *flag("loss_scale", case["loss_scale"])]
        add(f"agent/{number}-{case['agent']}", case["model"], case["stage"], rows, flags)
    given = {
        "list": [WEATHER, {"type": "function", "function": ADD}],
        "mixed list": [WEATHER, ADD],
        "one": [WEATHER],
        "bare": [ADD],
        "list of text": [json.dumps(WEATHER), json.dumps(ADD, ensure_ascii=False)],
        "one text": json.dumps(WEATHER),
        "empty": [],
        "empty text": "",
        "no tools": None,
        "not json": "get_weather",
        "no description": [{"name": "f", "parameters": {}}],
    }
    for name, value in given.items():
        for model in models[:3]:
            rows = [{"tools": value, "messages": TOOL_ROWS["round"]}, {"tools": value, "messages": TOOL_ROWS["system"]}]
            add(f"tools/as-{name.replace(' ', '-')}", model, "sft", rows)
    spoken = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": {
        "name": "get_weather", "arguments": '{"city": "Rome"}'}}]}  # fmt: skip
    rows = [{"tools": [WEATHER], "messages": [*ASKED, {**spoken, "content": text}, {**told("x", "tool"),
    "tool_call_id": "1"},
                                               *turns(None, "Sunny.")]} for text in ("", "I look.")]  # fmt: skip
    for model in models[:3]:
        add("tools/openai", model, "sft", rows)
        empty = [call("get_weather", as_text=False, city="Rome")]
        add(
            "tools/objects",
            model,
            "sft",
            [{"tools": [WEATHER], "messages": [*ASKED, *empty, SUNNY, *turns(None, "Ok.")]}],
        )
