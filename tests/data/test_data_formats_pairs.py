"""Preference pairs of every form, and what is wrong with rows that are none."""

from __future__ import annotations

from typing import Any

import pytest
from formats_kit import pair_of

from megatune.data.bad_rows import RowError
from megatune.data.conversation import Message, PreferencePair, ToolCall
from megatune.data.formats import AlpacaFormat, RowFormat, detect
from megatune.data.formats.columns import Columns

Q, GOOD, BAD = Message("user", "q"), Message("assistant", "good"), Message("assistant", "bad")


def detected(row: dict[str, Any]) -> RowFormat:
    form = detect(row)
    assert form is not None
    assert form.ranking
    return form


def complaint(row: dict[str, Any], source: RowFormat) -> str:
    with pytest.raises(RowError) as caught:
        source.to_example(row, "dpo")
    return f"{caught.value.code}: {caught.value}"


def turn(role: str, value: Any) -> dict[str, Any]:
    return {"from": role, "value": value}


def said(role: str, content: Any, **keys: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **keys}


U, G, B = said("user", "q"), said("assistant", "good"), said("assistant", "bad")


@pytest.mark.parametrize(
    "row",
    [
        # alpaca
        {"instruction": "q", "input": "", "chosen": "good", "rejected": "bad"},
        {"instruction": "q", "output": "good", "rejected": "bad"},
        # sharegpt
        {"conversations": [turn("human", "q")], "chosen": turn("gpt", "good"), "rejected": turn("gpt", "bad")},
        {"conversations": [turn("human", "q")], "chosen": "good", "rejected": "bad"},
        # OpenAI's messages
        {"messages": [U], "chosen": G, "rejected": B},
        {"messages": [U], "chosen": [G], "rejected": [B]},
        {"messages": [U], "chosen": [U, G], "rejected": [U, B]},
        # ms-swift
        {"messages": [U, G], "rejected_response": "bad"},
        {"messages": [U, G], "rejected_messages": [U, B]},
        {"messages": [U, G], "rejected_messages": [B]},
        {"query": "q", "response": "good", "rejected_response": "bad"},
        # Hugging Face's TRL
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        {"prompt": [U], "chosen": [G], "rejected": [B]},
        {"prompt": "q", "chosen": [G], "rejected": [B]},
        {"chosen": [U, G], "rejected": [U, B]},
        {"prompt": "q", "chosen": [U, G], "rejected": [U, B]},
        # What a table writes where a row has nothing.
        {"messages": [U, G], "chosen": None, "rejected": None, "rejected_response": "bad"},
    ],
)
def test_pairs(row: dict[str, Any]) -> None:
    assert detected(row).to_example(row, "dpo") == pair_of((Q,), GOOD, BAD)


def test_system_history_and_tools() -> None:
    prompt = (Message("user", "a"), Message("assistant", "b"), Message("user", "c\nd"))
    pair = pair_of(prompt, GOOD, BAD, "s", ({"name": "f"},))
    row: dict[str, Any] = {"chosen": "good", "rejected": "bad", "system": "s", "tools": '[{"name": "f"}]'}
    alpaca = {**row, "instruction": "c", "input": "d", "history": [["a", "b"]]}
    assert detected(alpaca).to_example(alpaca, "dpo") == pair
    query = {**row, "query": "c\nd", "history": [["a", "b"]]}
    assert detected(query).to_example(query, "dpo") == pair
    turns = [turn("system", "s"), turn("human", "a"), turn("gpt", "b"), turn("human", "c\nd")]
    chat = {**row, "conversations": turns, "system": "the column"}
    assert detected(chat).to_example(chat, "dpo") == pair
    whole = [said("system", "s"), said("user", "a"), said("assistant", "b"), said("user", "c\nd")]
    lists = {**row, "chosen": [*whole, G], "rejected": [*whole, B], "system": "the column"}
    assert detected(lists).to_example(lists, "dpo") == pair


def test_tool_answers_and_calls() -> None:
    call = said("assistant", None, tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])
    row = {"messages": [U, call, said("tool", "1")], "chosen": G, "rejected": call}
    called = Message("assistant", "", (ToolCall("f", {}),))
    assert detected(row).to_example(row, "dpo") == pair_of((Q, called, Message("tool", "1")), GOOD, called)


def test_columns_of_other_names() -> None:
    columns = Columns(prompt="question", query=None, chosen="better", rejected="worse")
    source = AlpacaFormat(columns, ranking=True)
    assert source.to_example({"question": "q", "better": "good", "worse": "bad"}, "dpo") == pair_of((Q,), GOOD, BAD)


ALPACA = {"instruction": "q", "chosen": "good", "rejected": "bad"}
SHAREGPT = {"conversations": [turn("human", "q")], "chosen": turn("gpt", "good"), "rejected": turn("gpt", "bad")}
OPENAI = {"messages": [U], "chosen": [G], "rejected": [B]}
LISTS = {"chosen": [U, G], "rejected": [U, B]}
SWIFT = {"messages": [U, G], "rejected_response": "bad"}
SAME = "same-answers: chosen and rejected are the same"


@pytest.mark.parametrize(
    ("good", "row", "message"),
    [
        (ALPACA, {**ALPACA, "rejected": "good"}, SAME),
        (SHAREGPT, {**SHAREGPT, "rejected": turn("gpt", "good")}, SAME),
        (LISTS, {"chosen": [U, G], "rejected": [U, G]}, SAME),
        (SWIFT, {**SWIFT, "rejected_response": "good"}, SAME),
        (
            ALPACA,
            {"instruction": "q", "chosen": "good"},
            "missing-field: field 'rejected' is missing (the row has 'instruction', 'chosen')",
        ),
        (
            ALPACA,
            {"instruction": "q", "rejected": "bad"},
            "missing-field: field 'chosen' is missing (the row has 'instruction', 'rejected')",
        ),
        (ALPACA, {**ALPACA, "rejected": None}, "null-content: field 'rejected' is null"),
        (ALPACA, {**ALPACA, "chosen": None}, "null-content: field 'chosen' is null"),
        (
            ALPACA,
            {**ALPACA, "chosen": 5},
            "wrong-type: field 'chosen': expected a string, a message or a list of messages, got a number",
        ),
        (
            ALPACA,
            {**ALPACA, "chosen": "\ud83d"},
            "lone-surrogate: field 'chosen': half of a surrogate pair (character 1)",
        ),
        (ALPACA, {**ALPACA, "rejected": " "}, "empty-message: an empty assistant message (field 'rejected')"),
        (ALPACA, {**ALPACA, "instruction": ""}, "empty-message: an empty user message (field 'instruction')"),
        (
            SHAREGPT,
            {**SHAREGPT, "conversations": [turn("human", "q"), turn("gpt", "a")]},
            "prompt-ends-with-answer: the prompt ends with the assistant's message (message 2 is 'gpt')",
        ),
        (
            SHAREGPT,
            {**SHAREGPT, "conversations": [turn("system", "s")]},
            "no-messages: field 'conversations': no messages (a system message only)",
        ),
        (
            SHAREGPT,
            {**SHAREGPT, "conversations": "q"},
            "messages-not-a-list: field 'conversations': expected a list of messages, got a string",
        ),
        (
            SHAREGPT,
            {key: SHAREGPT[key] for key in ("chosen", "rejected")},
            "missing-field: field 'conversations' is missing (the row has 'chosen', 'rejected')",
        ),
        (
            SHAREGPT,
            {**SHAREGPT, "chosen": None},
            "missing-field: field 'chosen' is missing (the row has 'conversations', 'chosen', 'rejected')",
        ),
        (
            SHAREGPT,
            {**SHAREGPT, "chosen": turn("human", "x")},
            "answer-not-assistant: an answer is not the assistant's (field 'chosen' has role 'human', expected 'gpt')",
        ),
        (
            SHAREGPT,
            {**SHAREGPT, "chosen": turn("bot", "x")},
            "unknown-role: unknown role "
            "(field 'chosen' has role \"bot\", expected one of system, human, gpt, observation, function_call)",
        ),
        (
            SHAREGPT,
            {**SHAREGPT, "chosen": {"value": "x"}},
            "missing-field: field 'chosen.from' is missing (the row has 'value')",
        ),
        (SHAREGPT, {**SHAREGPT, "chosen": turn("gpt", None)}, "null-content: field 'chosen.value' is null"),
        (
            OPENAI,
            {**OPENAI, "chosen": [said("assistant", 1)]},
            "wrong-type: field 'chosen[].content': expected a string, got a number (message 1)",
        ),
        (OPENAI, {**OPENAI, "chosen": []}, "no-messages: field 'chosen': no messages"),
        (
            OPENAI,
            {**OPENAI, "chosen": ["good"]},
            "message-not-an-object: field 'chosen': a message is not an object (message 1 is a string)",
        ),
        (
            OPENAI,
            {**OPENAI, "chosen": [said("system", "s"), G]},
            "answer-without-prompt: field 'chosen': a system message and an answer, but no question",
        ),
        (
            OPENAI,
            {**OPENAI, "chosen": [said("user", "r"), G]},
            "different-prompts: chosen and rejected answer different prompts (message 1 differs)",
        ),
        (
            LISTS,
            {"chosen": [U, G], "rejected": [said("user", "r"), B]},
            "different-prompts: chosen and rejected answer different prompts (message 1 differs)",
        ),
        (
            LISTS,
            {"chosen": [U, G, U, G], "rejected": [U, B]},
            "different-prompts: chosen and rejected answer different prompts (3 and 1 messages before the answers)",
        ),
        (
            LISTS,
            {"chosen": [said("system", "s"), U, G], "rejected": [U, B]},
            "different-prompts: chosen and rejected answer different prompts (the system messages differ)",
        ),
        (
            LISTS,
            {"chosen": [U, G, U], "rejected": [U, B]},
            "answer-not-assistant: an answer is not the assistant's (field 'chosen': message 3 has role 'user')",
        ),
        (
            LISTS,
            {"chosen": "good", "rejected": "bad"},
            "missing-field: field 'messages' is missing (the row has 'chosen', 'rejected')",
        ),
        (
            SWIFT,
            {"messages": [U], "rejected_response": "bad"},
            "missing-field: field 'chosen' is missing (the row has 'messages', 'rejected_response')",
        ),
    ],
)
def test_bad_pairs(good: dict[str, Any], row: dict[str, Any], message: str) -> None:
    assert complaint(row, detected(good)) == message


@pytest.mark.parametrize(("value", "margin"), [(0.5, 0.5), (2, 2.0), (-1, -1.0), (None, 0.0)])
def test_a_margin_is_of_reward_models(value: Any, margin: float) -> None:
    row = {"prompt": "q", "chosen": "good", "rejected": "bad", "margin": value}
    pair = detected(row).to_example(row, "rm")
    assert isinstance(pair, PreferencePair)
    assert pair.margin == margin
    assert detected(row).to_example(row, "dpo") == pair_of((Q,), GOOD, BAD)


@pytest.mark.parametrize(("value", "got"), [("much", '"much"'), (True, "true"), (float("nan"), "NaN")])
def test_a_margin_is_a_number(value: Any, got: str) -> None:
    row = {"instruction": "q", "chosen": "good", "rejected": "bad", "how_much": value}
    with pytest.raises(RowError) as caught:
        AlpacaFormat(columns=Columns(margin="how_much"), ranking=True).to_example(row, "rm")
    assert f"{caught.value.code}: {caught.value}" == f"bad-margin: field 'how_much': expected a number (got {got})"
