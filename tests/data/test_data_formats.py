"""One row at a time: what it becomes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from formats_kit import ALPACA, OPENAI, QUERY, SHAREGPT, TEXT, openai, said, sharegpt

from megatune.data.conversation import Conversation, Message, ToolCall, fill_placeholders
from megatune.data.formats import AlpacaFormat, QueryFormat, RowFormat
from megatune.data.formats.columns import Columns


def conversation(row: dict[str, Any], source: RowFormat = ALPACA) -> Conversation:
    example = source.to_example(row, "sft")
    assert isinstance(example, Conversation)
    return example


def written(row: dict[str, Any], source: RowFormat) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in conversation(row, source).messages]


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"instruction": "Sort", "input": "b a"}, "Sort\nb a"),
        ({"instruction": "Sort", "input": ""}, "Sort"),
        ({"instruction": "", "input": "b a"}, "b a"),
        ({"instruction": "Sort", "input": None}, "Sort"),
        ({"instruction": "Sört 🦀", "id": 7}, "Sört 🦀"),
    ],
)
def test_alpaca_prompt(row: dict[str, Any], prompt: str) -> None:
    assert conversation({**row, "output": "a b"}).messages == (Message("user", prompt), Message("assistant", "a b"))


def test_alpaca_history_system_and_tools() -> None:
    row = {"instruction": "c", "output": "d", "history": [["a", "b"]], "system": "s", "tools": '[{"name": "f"}]'}
    assert written(row, ALPACA) == [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    assert (conversation(row).system, conversation(row).tools) == ("s", ({"name": "f"},))


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


def test_sharegpt_system_column() -> None:
    row = sharegpt(("human", "q"), ("gpt", "a"), system="the column")
    assert conversation(row, SHAREGPT).system == "the column"


def test_sharegpt_parallel_calls() -> None:
    calls = json.dumps([{"name": "f", "arguments": {}}, {"name": "g", "arguments": '{"x": 2}'}])
    row = sharegpt(("human", "q"), ("function_call", calls), ("observation", "1"), ("observation", ""), ("gpt", "a"))
    messages = conversation(row, SHAREGPT).messages
    assert messages[1].tool_calls == (ToolCall("f", {}), ToolCall("g", {"x": 2}))
    assert messages[2:4] == (Message("tool", "1"), Message("tool", ""))


def test_sharegpt_calls_in_tags() -> None:
    call, thought = '{"name": "f", "arguments": {"x": 1}}', "<think>\nlook\n</think>\n\n"
    calls = (ToolCall("f", {"x": 1}),) * 2
    for value, text in (
        (f"{thought}<tool_call>\n{call}\n</tool_call>\n<tool_call>{call}</tool_call>", thought),
        (f"I look. <tool_call>[{call}, {call}]</tool_call>", "I look."),
    ):
        row = sharegpt(("human", "q"), ("function_call", value), ("observation", ""), ("gpt", "a"))
        assert conversation(row, SHAREGPT).messages[1] == Message("assistant", text, calls)


def test_openai_tool_calls() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    other = {"id": "2", "type": "function", "function": {"name": "g", "arguments": {"y": None}}}
    row = openai(
        said("developer", "s"),
        said("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
        said("assistant", None, tool_calls=[call, other]),
        said("tool", "1", tool_call_id="1"),
        said("tool", [{"type": "text", "text": "2"}], tool_call_id="2"),
        said("assistant", "done", reasoning_content="so\n", tool_calls=None),
        tools=[{"type": "function", "function": {"name": "f"}}],
    )
    assert conversation(row, OPENAI) == Conversation(
        (
            Message("user", "ab"),
            Message("assistant", "", (ToolCall("f", {"x": 1}), ToolCall("g", {"y": None}))),
            Message("tool", "1"),
            Message("tool", "2"),
            Message("assistant", "<think>\nso\n</think>\n\ndone"),
        ),
        "s",
        ({"type": "function", "function": {"name": "f"}},),
    )


def test_openai_text_before_a_call_is_kept_and_no_system_message_is_added() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    row = openai(said("user"), said("assistant", "I look.", tool_calls=[call]), said("tool"), said("assistant"))
    found = conversation(row, OPENAI)
    assert found.messages[1] == Message("assistant", "I look.", (ToolCall("f", {}),))
    assert found.system is None


@pytest.mark.parametrize("tools", [None, "", " ", "[]", "null", []])
def test_no_tools(tools: object) -> None:
    assert conversation(openai(said("user"), said("assistant"), tools=tools), OPENAI).tools == ()


@pytest.mark.parametrize(
    ("keys", "trained"),
    [
        ({}, None),
        ({"loss": False}, False),
        ({"loss": True}, True),
        ({"weight": 0}, False),
        ({"weight": 1}, True),
        ({"weight": 0.0}, False),
        ({"loss": None, "weight": 0}, False),
        ({"loss": True, "weight": 0}, True),
    ],
)
def test_which_answers_are_trained(keys: dict[str, Any], trained: bool | None) -> None:
    row = openai(said("user"), said("assistant", **keys), said("user", loss=False), said("assistant"))
    assert [m.trained for m in conversation(row, OPENAI).messages] == [None, trained, None, None]
    call = {"from": "function_call", "value": '{"name": "f"}', **keys}
    row = sharegpt(("human", "q"), ("x", ""), ("observation", ""), ("gpt", "a"))
    row["conversations"][1] = call
    assert conversation(row, SHAREGPT).messages[1] == Message("assistant", "", (ToolCall("f", {}),), trained)


@pytest.mark.parametrize(
    ("row", "query", "response"),
    [
        ({"query": "q", "response": "r"}, "q", "r"),
        ({"problem": "q", "solution": "r"}, "q", "r"),
        ({"question": "q", "answer": "r"}, "q", "r"),
        ({"prompt": "q", "completion": "r"}, "q", "r"),
        # The first of the documented order, whatever the order of the row.
        (
            {
                "problem": "6",
                "question": "5",
                "instruction": "4",
                "input": "3",
                "prompt": "2",
                "query": "1",
                "target": "r",
            },
            "1",
            "r",
        ),
        ({"instruction": "4", "input": "3", "prompt": "2", "output": "r"}, "2", "r"),
        ({"query": "q", "completion": "5", "solution": "4", "target": "x", "output": "3", "answer": "2"}, "q", "2"),
        ({"query": None, "prompt": "q", "response": None, "output": "r"}, "q", "r"),
    ],
)
def test_query_response(row: dict[str, Any], query: str, response: str) -> None:
    assert written(row, QUERY) == [("user", query), ("assistant", response)]


def test_query_response_columns_and_the_rest() -> None:
    columns = Columns(prompt="problem", query=None, response="solution")
    source = QueryFormat(columns)
    row = {"query": "no", "response": "no", "problem": "q", "solution": "r", "history": [["a", "b"]]}
    assert written(row, source) == [("user", "a"), ("assistant", "b"), ("user", "q"), ("assistant", "r")]
    assert conversation({**row, "system_prompt": "s"}, source).system == "s"
    assert conversation({**row, "system_prompt": "s", "system": "t"}, source).system == "t"


@pytest.mark.parametrize(
    ("row", "source"),
    [
        ({"text": "Once"}, TEXT),
        ({"content": "Once"}, TEXT),
        ({"text": "Once", "content": "no"}, TEXT),
        ({"text": "Once"}, AlpacaFormat(columns=Columns(prompt="text"))),
        ({"instruction": "Once", "input": "no", "output": "no"}, ALPACA),
        ({"response": "Once"}, QUERY),
        ({"query": "", "response": "Once"}, QUERY),
    ],
)
def test_pretraining_text(row: dict[str, Any], source: RowFormat) -> None:
    assert source.to_example(row, "pt") == "Once"


def test_placeholders() -> None:
    row = Conversation((Message("user", "{{name}}?"), Message("assistant", "{{name}} by {{author}}")), "You: {{name}}")
    filled, missing = fill_placeholders(row, {"{{name}}": "Mia", "{{author}}": "us"})
    assert filled == Conversation((Message("user", "Mia?"), Message("assistant", "Mia by us")), "You: Mia")
    assert missing == []
    assert fill_placeholders(row, {"{{name}}": "Mia", "{{author}}": None})[1] == ["{{author}}"]
    assert fill_placeholders("plain", {"{{name}}": None, "{{author}}": None}) == ("plain", [])
