"""One row at a time: what it becomes, and the exact words for what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatune.data.formats import (
    Conversation,
    Message,
    RowError,
    ToolCall,
    UnsupportedRow,
    fill_placeholders,
    to_example,
)
from megatune.data.sources import OPENAI_COLUMNS, OPENAI_TAGS, Columns, DatasetSource

ALPACA = DatasetSource("a", (Path("a.json"),))
SHAREGPT = DatasetSource("s", (Path("s.json"),), "sharegpt")
OPENAI = DatasetSource("o", (Path("o.json"),), "openai", OPENAI_COLUMNS, OPENAI_TAGS)
USER, ANSWER = Message("user", "Hi"), Message("assistant", "Hello")


def conversation(row: dict[str, Any], source: DatasetSource = ALPACA) -> Conversation:
    example = to_example(row, source, "sft")
    assert isinstance(example, Conversation)
    return example


def complaint(row: dict[str, Any], source: DatasetSource, stage: str = "sft") -> str:
    with pytest.raises(RowError) as caught:
        to_example(row, source, stage)
    return f"{caught.value.reason} ({caught.value.detail})" if caught.value.detail else caught.value.reason


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"instruction": "Sort", "input": "b a"}, "Sort\nb a"),
        ({"instruction": "Sort", "input": ""}, "Sort"),
        ({"instruction": "", "input": "b a"}, "b a"),
        ({"instruction": "Sort", "input": None}, "Sort"),
        ({"instruction": "Sort", "id": 7}, "Sort"),
    ],
)
def test_alpaca_prompt(row: dict[str, Any], prompt: str) -> None:
    assert conversation({**row, "output": "a b"}).messages == (Message("user", prompt), Message("assistant", "a b"))


def test_alpaca_history_and_system() -> None:
    row = {"instruction": "c", "output": "d", "history": [["a", "b"]], "system": "s"}
    roles = [(message.role, message.content) for message in conversation(row).messages]
    assert roles == [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    assert conversation(row).system == "s"


def sharegpt(*turns: tuple[str, Any], **fields: Any) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": value} for role, value in turns], **fields}


def test_sharegpt_with_tools() -> None:
    call = '<think>\nlook\n</think>\n\n{"name": "f", "arguments": {"x": 1}}'
    tools = '[{"name": "f", "description": "d"}]'
    row = sharegpt(
        ("system", "s"), ("human", "q"), ("function_call", call), ("observation", "1"), ("gpt", "a"), tools=tools
    )
    assert conversation({**row, "system": "the column"}, SHAREGPT) == Conversation(
        (
            Message("user", "q"),
            Message("assistant", "<think>\nlook\n</think>\n\n", (ToolCall("f", {"x": 1}),)),
            Message("tool", "1"),
            Message("assistant", "a"),
        ),
        "s",
        ({"name": "f", "description": "d"},),
    )


def test_sharegpt_parallel_calls() -> None:
    calls = json.dumps([{"name": "f", "arguments": {}}, {"name": "g", "arguments": '{"x": 2}'}])
    row = sharegpt(("human", "q"), ("function_call", calls), ("observation", "1"), ("observation", "2"), ("gpt", "a"))
    assert conversation(row, SHAREGPT).messages[1].tool_calls == (ToolCall("f", {}), ToolCall("g", {"x": 2}))


def openai(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": list(messages)}


def test_openai_tool_calls() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    row = openai(
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "1"},
        {"role": "assistant", "content": "done", "reasoning_content": "so\n"},
    )
    assert conversation(row, OPENAI) == Conversation(
        (
            Message("user", "ab"),
            Message("assistant", "", (ToolCall("f", {"x": 1}),)),
            Message("tool", "1"),
            Message("assistant", "<think>\nso\n</think>\n\ndone"),
        ),
        "s",
    )


def test_pretraining_takes_the_prompt_column() -> None:
    source = DatasetSource("t", (Path("t.txt"),), columns=Columns(prompt="text"))
    assert to_example({"text": "Once upon a time"}, source, "pt") == "Once upon a time"
    assert complaint({"text": " \n"}, source, "pt") == "field 'text' is empty"
    assert complaint({"body": "x"}, source, "pt") == "field 'text' is missing (the row has 'body')"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"instruction": "a"}, "field 'output' is missing (the row has 'instruction')"),
        ({}, "field 'instruction' is missing (the row has no fields)"),
        ({"instruction": "a", "output": None}, "field 'output': expected a string, got null"),
        ({"instruction": "a", "output": 5}, "field 'output': expected a string, got a number"),
        ({"instruction": ["a"], "output": "b"}, "field 'instruction': expected a string, got a list"),
        ({"instruction": "a", "output": "b", "input": {}}, "field 'input': expected a string, got an object"),
        ({"instruction": "a", "output": " "}, "an empty assistant message (turn 2)"),
        ({"instruction": "", "output": "b"}, "an empty user message (turn 1)"),
        ({"instruction": "a", "output": "\ud83d"}, "field 'output': half of a surrogate pair (at character 1)"),
        (
            {"instruction": "a", "output": "b", "history": [["q"]]},
            "field 'history': expected a list of [question, answer] pairs (got [[\"q\"]])",
        ),
    ],
)
def test_bad_alpaca_rows(row: dict[str, Any], message: str) -> None:
    assert complaint(row, ALPACA) == message


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"conversations": "hi"}, "field 'conversations': expected a list of messages, got a string"),
        ({"messages": []}, "field 'conversations' is missing (the row has 'messages')"),
        ({"conversations": []}, "field 'conversations': no messages"),
        ({"conversations": ["hi"]}, "field 'conversations': a message is not an object (message 1 is a string)"),
        ({"conversations": [{"value": "x"}]}, "field 'conversations[].from' is missing (message 1)"),
        (sharegpt(("human", None)), "field 'conversations[].value': expected a string, got null (message 1)"),
        (
            sharegpt(("human", "q"), ("bot", "a")),
            "unknown role (message 2 has role 'bot', expected one of system, human, gpt, observation, function_call)",
        ),
        (sharegpt(("system", "a"), ("system", "b")), "two system messages (conversations[2])"),
        (sharegpt(("human", "a"), ("system", "b")), "a system message that is not the first (conversations[2])"),
        (sharegpt(("human", "q")), "the last message is not the assistant's (it is the user's)"),
        (sharegpt(("gpt", "a")), "roles out of order (turn 1: expected user, got assistant)"),
        (sharegpt(("human", "a"), ("human", "b")), "roles out of order (turn 2: expected assistant, got user)"),
        (
            sharegpt(("human", "q"), ("gpt", "a"), ("gpt", "b")),
            "roles out of order (turn 3: expected user or tool, got assistant)",
        ),
        (
            sharegpt(("human", "q"), ("function_call", "f(x)")),
            'a function call is not JSON (message 2: Expecting value in "f(x)")',
        ),
        (
            sharegpt(("human", "q"), ("function_call", '{"name": "f", "arguments": [1]}')),
            'a function call needs a name and an object of arguments (message 2: {"name": "f", "arguments": [1]})',
        ),
        (
            sharegpt(("human", "q"), ("gpt", "a"), tools="{"),
            "field 'tools' is not JSON (Expecting property name enclosed in double quotes at column 2)",
        ),
        (
            sharegpt(("human", "q"), ("gpt", "a"), tools={"name": "f"}),
            'field \'tools\': expected a list of tool schemas (got {"name": "f"})',
        ),
    ],
)
def test_bad_conversations(row: dict[str, Any], message: str) -> None:
    assert complaint(row, SHAREGPT) == message


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            openai({"role": "user", "content": [{"type": "file", "id": 1}]}),
            'a part of a message is not text (message 1 has the part {"type": "file", "id": 1})',
        ),
        (
            openai({"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": "f"}),
            "tool calls are not a list (message 2 has a string)",
        ),
    ],
)
def test_bad_openai_messages(row: dict[str, Any], message: str) -> None:
    assert complaint(row, OPENAI) == message


def test_images_refuse_the_data_set() -> None:
    with pytest.raises(UnsupportedRow, match="field 'images': training on images is not built"):
        to_example({"instruction": "a", "output": "b", "images": ["1.jpg"]}, ALPACA, "sft")
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.raises(UnsupportedRow, match="message 1 has a part of type 'image_url'"):
        to_example(openai(picture), OPENAI, "sft")


def test_placeholders() -> None:
    row = Conversation((Message("user", "{{name}}?"), Message("assistant", "{{name}} by {{author}}")), "You: {{name}}")
    filled, missing = fill_placeholders(row, {"{{name}}": "Mia", "{{author}}": "us"})
    assert filled == Conversation((Message("user", "Mia?"), Message("assistant", "Mia by us")), "You: Mia")
    assert missing == []
    assert fill_placeholders(row, {"{{name}}": "Mia", "{{author}}": None})[1] == ["{{author}}"]
    assert fill_placeholders("plain", {"{{name}}": None, "{{author}}": None}) == ("plain", [])
