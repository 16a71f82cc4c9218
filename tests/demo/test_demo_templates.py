"""Chat templates render exactly the text that the published ones render, written out by hand."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from megatune.demo.family import demo_family
from megatune.demo.tokenizer import make_tokenizer

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
WEATHER_JSON = '{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}'
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TOOL_TURNS = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "rain"},
    {"role": "tool", "content": "wind"},
    {"role": "assistant", "content": "Wet."},
]
CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "<think>\nGreet.\n</think>\n\nHello"},
    {"role": "user", "content": "Bye"},
]


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    return make_tokenizer(demo_family(name), 400)


def render(name: str, messages: list[dict[str, Any]], **switches: Any) -> str:
    return tokenizer_of(name).apply_chat_template(messages, tokenize=False, **switches)


def test_qwen2_has_a_default_system_message() -> None:
    assert render("qwen2", [{"role": "user", "content": "Hi"}], add_generation_prompt=True) == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_qwen2_keeps_the_given_system_message_and_every_answer_whole() -> None:
    assert render("qwen2", [{"role": "system", "content": "Be brief."}, *CHAT]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nGreet.\n</think>\n\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    )


QWEN_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n"
    f"<tools>\n{WEATHER_JSON}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
)
QWEN_CALL_AND_RESPONSES = (
    '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>\n'
    "<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n<tool_response>\nwind\n</tool_response><|im_end|>\n"
)


def test_qwen2_tools() -> None:
    assert render("qwen2", TOOL_TURNS, tools=[WEATHER]) == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.\n\n"
        + QWEN_TOOLS
        + "<|im_start|>user\nWeather?<|im_end|>\n"
        + QWEN_CALL_AND_RESPONSES
        + "<|im_start|>assistant\nWet.<|im_end|>\n"
    )


def test_qwen3_tools_and_the_empty_reasoning_of_the_last_answer() -> None:
    assert render("qwen3", TOOL_TURNS, tools=[WEATHER]) == (
        "<|im_start|>system\n"
        + QWEN_TOOLS
        + "<|im_start|>user\nWeather?<|im_end|>\n"
        + QWEN_CALL_AND_RESPONSES
        + "<|im_start|>assistant\n<think>\n\n</think>\n\nWet.<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("switches", "ending"),
    [({}, ""), ({"enable_thinking": True}, ""), ({"enable_thinking": False}, "<think>\n\n</think>\n\n")],
)
def test_qwen3_drops_earlier_reasoning_and_has_a_thinking_switch(switches: dict[str, bool], ending: str) -> None:
    assert render("qwen3", CHAT, add_generation_prompt=True, **switches) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n" + ending
    )


def test_qwen3_keeps_the_reasoning_of_the_last_answer() -> None:
    assert render("qwen3", CHAT[:2]) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nGreet.\n</think>\n\nHello<|im_end|>\n"
    )


LLAMA_SYSTEM = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n{environment}"
    "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n{system}<|eot_id|>"
)


def test_llama3_headers() -> None:
    messages = [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": " Hi "}]
    assert render("llama", messages, add_generation_prompt=True) == (
        LLAMA_SYSTEM.format(environment="", system="Be brief.")
        + "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        + "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_llama3_tools() -> None:
    indented = (
        '{\n    "type": "function",\n    "function": {\n        "name": "weather",\n'
        '        "parameters": {\n            "type": "object"\n        }\n    }\n}\n\n'
    )
    assert render("llama", TOOL_TURNS[:3], tools=[WEATHER]) == (
        LLAMA_SYSTEM.format(environment="Environment: ipython\n", system="")
        + "<|start_header_id|>user<|end_header_id|>\n\nGiven the following functions, please respond with a JSON for a "
        "function call with its proper arguments that best answers the given prompt.\n\nRespond in the format "
        '{"name": function name, "parameters": dictionary of argument name and its value}.Do not use variables.\n\n'
        + indented
        + "Weather?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        + '{"name": "weather", "parameters": {"city": "Oslo"}}<|eot_id|>'
        + '<|start_header_id|>ipython<|end_header_id|>\n\n"rain"<|eot_id|>'
    )


@pytest.mark.parametrize("name", ["deepseek_r1_distill_qwen", "deepseek_r1_distill_llama"])
def test_deepseek_r1_cuts_earlier_reasoning_and_starts_by_thinking(name: str) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *CHAT]
    assert render(name, messages, add_generation_prompt=True) == (
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜>\n\nHello<｜end▁of▁sentence｜>"
        "<｜User｜>Bye<｜Assistant｜><think>\n"
    )


@pytest.mark.parametrize("name", ["deepseek_r1_distill_qwen", "deepseek_v3"])
def test_deepseek_tool_calls(name: str) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [TOOL_TURNS[0], {"role": "assistant", "content": None, "tool_calls": [call, call]}, *TOOL_TURNS[2:]]
    written = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Oslo"}\n```<｜tool▁call▁end｜>'
    assert render(name, messages) == (
        "<｜begin▁of▁sentence｜><｜User｜>Weather?<｜Assistant｜><｜tool▁calls▁begin｜>"
        + f"{written}\n{written}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
        + "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>rain<｜tool▁output▁end｜>\n"
        + "<｜tool▁output▁begin｜>wind<｜tool▁output▁end｜><｜tool▁outputs▁end｜>Wet.<｜end▁of▁sentence｜>"
    )


def test_qwen2_moe_has_a_default_system_message_of_its_own() -> None:
    assert render("qwen2_moe", CHAT[:1], add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert render("qwen2_moe", [{"role": "system", "content": "Be brief."}, CHAT[0]]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )


def test_mixtral_puts_the_system_message_into_the_first_turn() -> None:
    answer = {"role": "assistant", "content": "Hello"}
    messages = [{"role": "system", "content": "Be brief."}, CHAT[0], answer, CHAT[2]]
    assert render("mixtral", messages, add_generation_prompt=True) == (
        "<s> [INST] Be brief.\n\nHi [/INST] Hello</s> [INST] Bye [/INST]"
    )


@pytest.mark.parametrize("messages", [CHAT[1:], [CHAT[0], CHAT[2]]])
def test_mixtral_refuses_turns_that_do_not_alternate(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(TemplateError, match="alternate"):
        render("mixtral", messages)


def test_deepseek_v3_keeps_every_answer_whole() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *CHAT]
    assert render("deepseek_v3", messages, add_generation_prompt=True) == (
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜><think>\nGreet.\n</think>\n\nHello"
        "<｜end▁of▁sentence｜><｜User｜>Bye<｜Assistant｜>"
    )


SHOWN = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "Is "},
            {"type": "image", "image": "a.jpg"},
            {"type": "text", "text": " in\n"},
            {"type": "video", "video": "a.mp4"},
        ],
    },
    {"role": "assistant", "content": [{"type": "text", "text": "No."}]},
    {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": "b.jpg"}}, {"type": "text", "text": "And?"}],
    },
]
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_vision_families_write_a_placeholder_for_each_picture(name: str, numbered: bool) -> None:
    first, video, second = ("Picture 1: ", "Video 1: ", "Picture 2: ") if numbered else ("", "", "")
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" if name.startswith("qwen2") else ""
    assert render(name, SHOWN, add_generation_prompt=True, add_vision_id=numbered) == (
        f"{system}<|im_start|>user\nIs {first}{IMAGE} in\n{video}{VIDEO}<|im_end|>\n"
        "<|im_start|>assistant\nNo.<|im_end|>\n"
        f"<|im_start|>user\n{second}{IMAGE}And?<|im_end|>\n<|im_start|>assistant\n"
    )
    brief = {"role": "system", "content": "Be brief."}
    assert render(name, [brief, CHAT[0]]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )


def test_qwen3_vl_tools() -> None:
    turns = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in TOOL_TURNS]
    turns[1]["content"] = []
    for messages in (TOOL_TURNS, turns):
        assert render("qwen3_vl", messages, tools=[WEATHER]) == (
            "<|im_start|>system\n"
            + QWEN_TOOLS
            + "<|im_start|>user\nWeather?<|im_end|>\n"
            + QWEN_CALL_AND_RESPONSES
            + "<|im_start|>assistant\nWet.<|im_end|>\n"
        )
