"""Which form a row has, told by its fields."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from megatune.data.formats.form import Columns, Form, Tags, detect

OPENAI = Tags("role", "content", "user", "assistant", "tool", "function_call", "system")
BY_NAME = Columns(prompt=None, query=None, response=None)


def turn(role: str) -> dict[str, str]:
    return {"from": role, "value": "x"}


def said(role: str) -> dict[str, str]:
    return {"role": role, "content": "x"}


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"messages": [said("user")]}, Form("openai", Columns(messages="messages"), OPENAI)),
        ({"messages": [said("system"), said("user")]}, Form("openai", Columns(messages="messages"), OPENAI)),
        ({"messages": [turn("human")]}, Form("sharegpt", Columns(messages="messages"), Tags())),
        ({"conversations": [turn("human")]}, Form("sharegpt", Columns(), Tags())),
        ({"conversations": [said("user")]}, Form("openai", Columns(), OPENAI)),
        ({"conversation": [said("user")]}, Form("openai", Columns(messages="conversation"), OPENAI)),
        # Half of one form, half of the other.
        (
            {"conversations": [{"role": "human", "content": "x"}]},
            Form("sharegpt", Columns(), Tags("role", "content")),
        ),
        (
            {"conversations": [{"from": "user", "value": "x"}]},
            Form("sharegpt", Columns(), Tags("from", "value", "user", "assistant", "tool")),
        ),
        (
            {"messages": [said("user"), said("assistant"), said("observation")]},
            Form("openai", Columns(messages="messages"), Tags("role", "content", "user", "assistant", "observation")),
        ),
        # What to expect where the messages do not tell; each of their problems is then a row's.
        ({"messages": "hi"}, Form("openai", Columns(messages="messages"), OPENAI)),
        ({"messages": None}, Form("openai", Columns(messages="messages"), OPENAI)),
        ({"conversations": []}, Form("sharegpt", Columns(), Tags())),
        # alpaca
        ({"instruction": "x", "input": "", "output": "x"}, Form("alpaca", Columns(), Tags())),
        ({"instruction": "x"}, Form("alpaca", Columns(), Tags())),
        ({"instruction": "x", "text": "x"}, Form("alpaca", Columns(), Tags())),
        ({"instruction": "x", "output": "x", "prompt": "x"}, Form("alpaca", Columns(), Tags())),
        ({"instruction": "x", "input": "", "response": "x"}, Form("alpaca", Columns(response="response"), Tags())),
        ({"instruction": "x", "response": "x"}, Form("alpaca", Columns(response="response"), Tags())),
        (
            {"instruction": "x", "output": "x", "system_prompt": "x"},
            Form("alpaca", Columns(system="system_prompt"), Tags()),
        ),
        ({"instruction": "x", "output": "x", "conversations": None}, Form("alpaca", Columns(), Tags())),
        ({"instruction": "x", "output": "x", "image": "1.jpg"}, Form("alpaca", Columns(images="image"), Tags())),
        # query_response
        ({"query": "x", "response": "x"}, Form("query_response", BY_NAME, Tags())),
        ({"input": "x", "output": "x"}, Form("query_response", BY_NAME, Tags())),
        ({"query": "x", "instruction": "x", "answer": "x"}, Form("query_response", BY_NAME, Tags())),
        ({"problem": "x", "solution": "x", "text": "x"}, Form("query_response", BY_NAME, Tags())),
        ({"response": "x"}, Form("query_response", BY_NAME, Tags())),
        ({"prompt": "x"}, Form("query_response", BY_NAME, Tags())),
        # text
        ({"text": "x"}, Form("text", Columns(prompt="text"), Tags())),
        ({"content": "x"}, Form("text", Columns(prompt="content"), Tags())),
        ({"content": "x", "text": "x", "url": "x"}, Form("text", Columns(prompt="text"), Tags())),
        ({"prompt": "x", "text": "x"}, Form("text", Columns(prompt="text"), Tags())),
        # Preference pairs
        ({"instruction": "x", "chosen": "x", "rejected": "x"}, Form("alpaca", Columns(), Tags(), True)),
        ({"prompt": "x", "chosen": "x", "rejected": "x"}, Form("query_response", BY_NAME, Tags(), True)),
        ({"prompt": "x", "chosen": said("assistant"), "rejected": "x"}, Form("query_response", BY_NAME, OPENAI, True)),
        (
            {"conversations": [turn("human")], "chosen": turn("gpt"), "rejected": turn("gpt")},
            Form("sharegpt", Columns(), Tags(), True),
        ),
        (
            {"messages": [said("user")], "rejected_response": "x"},
            Form("openai", Columns(messages="messages", rejected="rejected_response"), OPENAI, True),
        ),
        (
            {"messages": [said("user")], "rejected_messages": []},
            Form("openai", Columns(messages="messages", rejected="rejected_messages"), OPENAI, True),
        ),
        (
            {"prompt": [said("user")], "chosen": [said("assistant")], "rejected": [said("assistant")]},
            Form("openai", Columns(messages="prompt"), OPENAI, True),
        ),
        (
            {"prompt": "x", "chosen": [said("user"), said("assistant")], "rejected": []},
            Form("openai", Columns(messages=None), OPENAI, True),
        ),
        (
            {"chosen": [turn("human"), turn("gpt")], "rejected": []},
            Form("sharegpt", Columns(messages=None), Tags(), True),
        ),
        # Nothing that is known.
        ({}, None),
        ({"id": 1, "body": "x"}, None),
        ({"chosen": "x", "rejected": "x"}, None),
    ],
)
def test_forms(row: dict[str, Any], form: Form | None) -> None:
    assert detect(row) == form
    for order in list(permutations(row.items()))[1:]:
        assert detect(dict(order)) == form, "the order of the fields does not matter"
