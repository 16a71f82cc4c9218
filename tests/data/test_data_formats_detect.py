"""Which form a row has, told by its fields."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from megatune.data.formats import (
    AlpacaFormat,
    MessagesFormat,
    OpenAIFormat,
    QueryFormat,
    RowFormat,
    TextFormat,
    detect,
)
from megatune.data.formats.columns import Columns, Tags

OPENAI = Tags("role", "content", "user", "assistant", "tool", "function_call", "system")
BY_NAME = Columns(prompt=None, query=None, response=None)


def turn(role: str) -> dict[str, str]:
    return {"from": role, "value": "x"}


def said(role: str) -> dict[str, str]:
    return {"role": role, "content": "x"}


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"messages": [said("user")]}, OpenAIFormat(Columns(messages="messages"), OPENAI)),
        ({"messages": [said("system"), said("user")]}, OpenAIFormat(Columns(messages="messages"), OPENAI)),
        ({"messages": [turn("human")]}, MessagesFormat(Columns(messages="messages"), Tags())),
        ({"conversations": [turn("human")]}, MessagesFormat(Columns(), Tags())),
        ({"conversations": [said("user")]}, OpenAIFormat(Columns(), OPENAI)),
        ({"conversation": [said("user")]}, OpenAIFormat(Columns(messages="conversation"), OPENAI)),
        # Half of one form, half of the other.
        (
            {"conversations": [{"role": "human", "content": "x"}]},
            MessagesFormat(Columns(), Tags("role", "content")),
        ),
        (
            {"conversations": [{"from": "user", "value": "x"}]},
            MessagesFormat(Columns(), Tags("from", "value", "user", "assistant", "tool")),
        ),
        (
            {"messages": [said("user"), said("assistant"), said("observation")]},
            OpenAIFormat(Columns(messages="messages"), Tags("role", "content", "user", "assistant", "observation")),
        ),
        # What to expect where the messages do not tell; each of their problems is then a row's.
        ({"messages": "hi"}, OpenAIFormat(Columns(messages="messages"), OPENAI)),
        ({"messages": None}, OpenAIFormat(Columns(messages="messages"), OPENAI)),
        ({"conversations": []}, MessagesFormat(Columns(), Tags())),
        # alpaca
        ({"instruction": "x", "input": "", "output": "x"}, AlpacaFormat(Columns(), Tags())),
        ({"instruction": "x"}, AlpacaFormat(Columns(), Tags())),
        ({"instruction": "x", "text": "x"}, AlpacaFormat(Columns(), Tags())),
        ({"instruction": "x", "output": "x", "prompt": "x"}, AlpacaFormat(Columns(), Tags())),
        ({"instruction": "x", "input": "", "response": "x"}, AlpacaFormat(Columns(response="response"), Tags())),
        ({"instruction": "x", "response": "x"}, AlpacaFormat(Columns(response="response"), Tags())),
        (
            {"instruction": "x", "output": "x", "system_prompt": "x"},
            AlpacaFormat(Columns(system="system_prompt"), Tags()),
        ),
        ({"instruction": "x", "output": "x", "conversations": None}, AlpacaFormat(Columns(), Tags())),
        ({"instruction": "x", "output": "x", "image": "1.jpg"}, AlpacaFormat(Columns(images="image"), Tags())),
        # query_response
        ({"query": "x", "response": "x"}, QueryFormat(BY_NAME, Tags())),
        ({"input": "x", "output": "x"}, QueryFormat(BY_NAME, Tags())),
        ({"query": "x", "instruction": "x", "answer": "x"}, QueryFormat(BY_NAME, Tags())),
        ({"problem": "x", "solution": "x", "text": "x"}, QueryFormat(BY_NAME, Tags())),
        ({"response": "x"}, QueryFormat(BY_NAME, Tags())),
        ({"prompt": "x"}, QueryFormat(BY_NAME, Tags())),
        # text
        ({"text": "x"}, TextFormat(Columns(prompt="text"), Tags())),
        ({"content": "x"}, TextFormat(Columns(prompt="content"), Tags())),
        ({"content": "x", "text": "x", "url": "x"}, TextFormat(Columns(prompt="text"), Tags())),
        ({"prompt": "x", "text": "x"}, TextFormat(Columns(prompt="text"), Tags())),
        # Preference pairs
        ({"instruction": "x", "chosen": "x", "rejected": "x"}, AlpacaFormat(Columns(), Tags(), True)),
        ({"prompt": "x", "chosen": "x", "rejected": "x"}, QueryFormat(BY_NAME, Tags(), True)),
        ({"prompt": "x", "chosen": said("assistant"), "rejected": "x"}, QueryFormat(BY_NAME, OPENAI, True)),
        (
            {"conversations": [turn("human")], "chosen": turn("gpt"), "rejected": turn("gpt")},
            MessagesFormat(Columns(), Tags(), True),
        ),
        (
            {"messages": [said("user")], "rejected_response": "x"},
            OpenAIFormat(Columns(messages="messages", rejected="rejected_response"), OPENAI, True),
        ),
        (
            {"messages": [said("user")], "rejected_messages": []},
            OpenAIFormat(Columns(messages="messages", rejected="rejected_messages"), OPENAI, True),
        ),
        (
            {"prompt": [said("user")], "chosen": [said("assistant")], "rejected": [said("assistant")]},
            OpenAIFormat(Columns(messages="prompt"), OPENAI, True),
        ),
        (
            {"prompt": "x", "chosen": [said("user"), said("assistant")], "rejected": []},
            OpenAIFormat(Columns(messages=None), OPENAI, True),
        ),
        (
            {"chosen": [turn("human"), turn("gpt")], "rejected": []},
            MessagesFormat(Columns(messages=None), Tags(), True),
        ),
        # Nothing that is known.
        ({}, None),
        ({"id": 1, "body": "x"}, None),
        ({"chosen": "x", "rejected": "x"}, None),
    ],
)
def test_forms(row: dict[str, Any], form: RowFormat | None) -> None:
    assert detect(row) == form
    for order in list(permutations(row.items()))[1:]:
        assert detect(dict(order)) == form, "the order of the fields does not matter"
