"""The standard forms of ms-swift's data, read from files that no entry of dataset_info.json describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from formats_kit import pair_of, said

from megatune.data.bad_rows import UnsupportedRow
from megatune.data.conversation import Conversation, Example, Message, ToolCall
from megatune.data.sources import resolve_datasets

ASKED, ANSWERED = Message("user", "q"), Message("assistant", "a")
TWICE = (Message("user", "p"), Message("assistant", "o"), ASKED, ANSWERED)
SINGLE = [said("user", "q"), said("assistant", "a")]
CALL, OTHER = '{"name": "f", "arguments": {"x": 1}}', '{"name": "g", "arguments": "{}"}'
TOOLS = '[{"type": "function", "function": {"name": "f"}}]'


def read(tmp_path: Path, stage: str, *rows: dict[str, Any]) -> list[Example]:
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (source,) = resolve_datasets([str(tmp_path / "rows.jsonl")], tmp_path, stage)
    examples = [source.format.to_example(row.fields, stage) for row in source.rows()]
    assert not any(isinstance(example, Exception) for example in examples)
    return examples


@pytest.mark.parametrize(
    ("row", "example"),
    [
        ({"messages": [said("system", "s"), *SINGLE]}, Conversation((ASKED, ANSWERED), "s")),
        (
            {"messages": [said("user", "p"), said("assistant", "o", loss=False), *SINGLE]},
            Conversation((TWICE[0], Message("assistant", "o", trained=False), ASKED, ANSWERED)),
        ),
        (
            {"messages": [said("user", "p"), said("assistant", "o", loss_scale=0.0), *SINGLE]},
            Conversation((TWICE[0], Message("assistant", "o", trained=False), ASKED, ANSWERED)),
        ),
        (
            {"system": "s", "conversation": [{"human": "p", "assistant": "o"}, {"human": "q", "assistant": "a"}]},
            Conversation(TWICE, "s"),
        ),
        ({"conversations": [{"user": "p", "gpt": "o"}, {"user": "q", "gpt": "a"}]}, Conversation(TWICE)),
        ({"messages": [{"user": "p", "assistant": "o"}, *SINGLE]}, Conversation(TWICE)),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            Conversation((ASKED, ANSWERED)),
        ),
        ({"instruction": "p", "input": "q", "output": "a"}, Conversation((Message("user", "p\nq"), ANSWERED))),
        ({"system": "s", "query": "q", "response": "a", "history": [["p", "o"]]}, Conversation(TWICE, "s")),
        (
            {"tools": TOOLS, "messages": [said("user", "q"), said("tool_call", CALL), said("tool", "1"), SINGLE[1]]},
            Conversation(
                (ASKED, Message("assistant", "", (ToolCall("f", {"x": 1}),)), Message("tool", "1"), ANSWERED),
                None,
                ({"type": "function", "function": {"name": "f"}},),
            ),
        ),
        (
            {
                "messages": [
                    said("user", "q"),
                    said("assistant", "Both: "),
                    said("tool_call", CALL),
                    said("tool_call", json.loads(OTHER)),
                    said("tool_response", "1"),
                    said("tool_response", "2"),
                    SINGLE[1],
                ]
            },
            Conversation(
                (
                    ASKED,
                    Message("assistant", "Both: ", (ToolCall("f", {"x": 1}), ToolCall("g", {}))),
                    Message("tool", "1"),
                    Message("tool", "2"),
                    ANSWERED,
                )
            ),
        ),
    ],
)
def test_conversations(tmp_path: Path, row: dict[str, Any], example: Conversation) -> None:
    assert read(tmp_path, "sft", row) == [example]
    # A role that only later rows have is known, too.
    assert read(tmp_path, "sft", {"messages": SINGLE}, row)[1] == example if "messages" in row else True


PAIR = pair_of((ASKED,), ANSWERED, Message("assistant", "b"), "s")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [said("system", "s"), *SINGLE], "rejected_response": "b"},
        {
            "messages": [said("system", "s"), *SINGLE],
            "rejected_messages": [said("system", "s"), SINGLE[0], said("assistant", "b")],
        },
        {"system": "s", "query": "q", "response": "a", "rejected_response": "b"},
        {"system": "s", "conversation": [{"human": "q", "assistant": "a"}], "rejected_response": "b"},
    ],
)
def test_pairs(tmp_path: Path, row: dict[str, Any]) -> None:
    assert read(tmp_path, "dpo", row) == [PAIR]
    assert read(tmp_path, "rm", {**row, "margin": 2})[0].margin == 2  # type: ignore[union-attr]


def test_judged_answers(tmp_path: Path) -> None:
    rows = [{"messages": SINGLE, "label": True}, {"messages": SINGLE, "label": False}]
    assert [row.desirable for row in read(tmp_path, "kto", *rows)] == [True, False]  # type: ignore[union-attr]


@pytest.mark.parametrize("row", [{"response": "a"}, {"text": "a"}, {"messages": [said("assistant", "a")]}])
def test_texts(tmp_path: Path, row: dict[str, Any]) -> None:
    assert read(tmp_path, "pt", row) == ["a"]


def test_what_is_no_text_or_not_built(tmp_path: Path) -> None:
    for messages in (SINGLE, [said("system", "s"), said("assistant", "a")]):
        with pytest.raises(UnsupportedRow, match="its rows are conversations"):
            read(tmp_path, "pt", {"messages": messages})
    boxes = {"ref": ["a cat"], "bbox": [[0, 0, 9, 9]]}
    with pytest.raises(UnsupportedRow, match="bounding boxes is not supported"):
        read(tmp_path, "sft", {"query": "Where is <ref-object>?", "response": "<bbox>", "objects": boxes})
    assert read(tmp_path, "sft", {"query": "q", "response": "a", "objects": boxes}) == [Conversation((ASKED, ANSWERED))]
