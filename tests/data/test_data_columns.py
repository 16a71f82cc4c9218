"""Columns with names of their own, in data sets that no entry of dataset_info.json describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatune.data.conversation import Conversation, Message
from megatune.data.sources import resolve_datasets
from megatune.errors import ExitCode, MegatuneError

QUESTION = Conversation((Message("user", "Who?"), Message("assistant", "I.")))


def read(tmp_path: Path, columns: dict[str, str], *rows: dict[str, Any], stage: str = "sft") -> list[Any]:
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (source,) = resolve_datasets(["rows.jsonl"], tmp_path, stage, columns)
    return [source.format.to_example(row.fields, stage) for row in source.rows()]


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        ({"q": "query", "a": "response"}, {"q": "Who?", "a": "I."}),
        ({"Q": "query", "A": "response"}, {"q": "Who?", "a": "I.", "query": "no", "response": "no"}),
        ({"q": "instruction", "r": "input", "a": "output"}, {"q": "Who?", "r": "", "a": "I.", "input": "no"}),
        ({"a": "output"}, {"instruction": "Who?", "a": "I.", "output": "no"}),
        (
            {"talk": "messages"},
            {"talk": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}], "messages": "no"},
        ),
        ({"talk": "conversations"}, {"talk": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "I."}]}),
        # LLaMA-Factory's order: the part of a row, then its column.
        ({"prompt": "q", "response": "a"}, {"q": "Who?", "a": "I."}),
        ({"prompt": "prompt", "response": "a"}, {"prompt": "Who?", "a": "I.", "output": "no"}),
        ({"prompt": "q", "query": "r", "response": "a"}, {"q": "Who?", "r": "", "a": "I."}),
        ({"query": "q", "response": "a"}, {"q": "Who?", "a": "I."}),
        ({"messages": "t"}, {"t": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]}),
        # What is told without: names in capital letters.
        ({}, {"Question": "Who?", "Response": "I.", "Id": 1}),
    ],
)
def test_forms(tmp_path: Path, columns: dict[str, str], row: dict[str, Any]) -> None:
    assert read(tmp_path, columns, row) == [QUESTION]


def test_other_parts_of_a_row(tmp_path: Path) -> None:
    columns = {"q": "query", "good": "response", "bad": "rejected_response", "s": "system_prompt", "past": "history"}
    row = {"q": "Who?", "good": "I.", "bad": "He.", "s": "Be brief.", "past": [["a", "b"]], "system": "no"}
    (pair,) = read(tmp_path, columns, row, stage="dpo")
    assert [message.content for message in (*pair.chosen.messages, pair.rejected.messages[-1])] == [
        "a",
        "b",
        "Who?",
        "I.",
        "He.",
    ]
    assert pair.chosen.system == "Be brief."
    (judged,) = read(tmp_path, {"ok": "label"}, {"query": "Who?", "response": "I.", "ok": False}, stage="kto")
    assert judged.desirable is False
    assert read(tmp_path, {"body": "text"}, {"body": "Once"}, stage="pt") == ["Once"]


def test_a_column_that_the_first_rows_lack(tmp_path: Path) -> None:
    """Rows of JSON may leave out what they have not."""
    rows = [{"q": "Who?", "a": "I."}, {"q": "Who?", "a": "I.", "tag": "x", "picture": "1.jpg"}]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    columns = {"q": "query", "a": "response", "picture": "image"}
    (source,) = resolve_datasets(["rows.jsonl"], tmp_path, "sft", columns)
    assert source.format.columns.images == "picture"


def test_columns_that_read_both_ways_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MegatuneError, match=r"\{prompt: response, response: prompt\} is ambiguous"):
        read(tmp_path, {"prompt": "response", "response": "prompt"}, {"prompt": "I.", "response": "Who?"})


@pytest.mark.parametrize(
    ("columns", "row", "stage", "fix"),
    [
        (
            {},
            {"id": "7", "Kunden Frage": "a", "Antwort: alt": "b"},
            "sft",
            "{Kunden Frage: query, 'Antwort: alt': response}",
        ),
        ({}, {"Frage": "a", "gut": "b", "schlecht": "c"}, "dpo", "{Frage: query, gut: chosen, schlecht: rejected}"),
        ({}, {"n": 1, "Verlauf": [{"role": "user", "content": "a"}]}, "sft", "{Verlauf: messages}"),
        ({}, {"n": 1}, "sft", "{n: query}"),
        ({"prompt": "Fragen", "response": "Antwort"}, {"Frage": "a", "Antwort": "b"}, "sft", "one of Antwort, Frage"),
    ],
)
def test_what_the_columns_could_be_is_suggested(
    tmp_path: Path, columns: dict[str, str], row: dict[str, Any], stage: str, fix: str
) -> None:
    with pytest.raises(MegatuneError) as caught:
        read(tmp_path, columns, row, stage=stage)
    assert fix in str(caught.value)


def test_refusals(tmp_path: Path) -> None:
    rows = '{"q": "Who?", "a": "I."}\n'
    for name in ("one.jsonl", "two.jsonl"):
        (tmp_path / name).write_text(rows)
    (tmp_path / "three.jsonl").write_text(rows.replace('"q"', '"query"').replace('"a"', '"response"'))
    columns = {"q": "query", "a": "response", "pictures": "images", "s": "sistem"}
    with pytest.raises(MegatuneError) as caught:
        resolve_datasets(["one.jsonl", "two.jsonl", "three.jsonl"], tmp_path, "sft", columns)
    assert str(caught.value).splitlines() == [
        "columns: no data set has a field 'pictures'",
        "    fix: one of a, q, query, response",
        "columns: no data set has a field 's'",
        "    fix: one of a, q, query, response",
        "columns: 'sistem' is not a known part of a row",
        "    fix: did you mean system?",
    ]
    assert caught.value.exit_code == ExitCode.SETTINGS
    # A column that one data set has will do: each has its own.
    names = ["one.jsonl", "three.jsonl"]
    assert len(resolve_datasets(names, tmp_path, "sft", {"q": "query", "a": "response"})) == 2
    # An entry of dataset_info.json says its own columns.
    (tmp_path / "dataset_info.json").write_text('{"described": {"file_name": "three.jsonl"}}')
    with pytest.raises(MegatuneError, match=r"no data set has a field 'q'\n.*move them to the entries"):
        resolve_datasets(["described"], tmp_path, "sft", {"q": "query"})
