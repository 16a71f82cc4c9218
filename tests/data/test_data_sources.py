"""Files and dataset_info.json: what is read, and the exact words for what is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megatune.data.readers import read_rows
from megatune.data.sources import Columns, DatasetSource, Tags, resolve_datasets
from megatune.errors import ExitCode, MegatuneError

ROWS = [{"instruction": "Hi", "output": "Hello\nyou"}, {"instruction": "你好", "output": 'say "hi", 你好 🙂'}]


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def rows_of(path: Path) -> list[tuple[str, Any]]:
    """Place (without the folder) and fields of each row, or its problem."""
    return [
        (row.where.removeprefix(f"{path.parent}/"), f"{row.problem}: {row.detail}" if row.problem else row.fields)
        for row in read_rows(path)
    ]


def refusal(path: Path) -> tuple[str, int]:
    with pytest.raises(MegatuneError) as caught:
        list(read_rows(path))
    return str(caught.value).replace(f"{path.parent}/", ""), int(caught.value.exit_code)


def test_json_array(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", json.dumps(ROWS, indent=1, ensure_ascii=False))
    assert rows_of(path) == [("a.json:row 1", ROWS[0]), ("a.json:row 2", ROWS[1])]
    assert rows_of(write(tmp_path / "b.json", "[]")) == []


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_json_lines(tmp_path: Path, name: str, newline: str, mark: str) -> None:
    text = mark + newline.join([json.dumps(ROWS[0]), "", json.dumps(ROWS[1], ensure_ascii=False)])
    assert rows_of(write(tmp_path / name, text)) == [(f"{name}:1", ROWS[0]), (f"{name}:3", ROWS[1])]


def test_csv(tmp_path: Path) -> None:
    text = '\ufeffinstruction,output\r\nHi,"Hello\nyou"\r\n你好,"say ""hi"", 你好 🙂"\r\n'
    assert rows_of(write(tmp_path / "a.csv", text)) == [("a.csv:3", ROWS[0]), ("a.csv:4", ROWS[1])]


def test_parquet(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    assert rows_of(tmp_path / "a.parquet") == [("a.parquet:row 1", ROWS[0]), ("a.parquet:row 2", ROWS[1])]


def test_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one\r\n\n\u2028two\x0b three\n")
    assert rows_of(path) == [("a.txt:1", {"text": "one"}), ("a.txt:3", {"text": "\u2028two\x0b three"})]


def test_bad_rows_have_a_place_and_a_reason(tmp_path: Path) -> None:
    lines = ['{"a": 1}', '{"a": "x', '{"a": 1,}', "[1]", "null", '{"a": "\0"}', "1" * 5000]
    rows = rows_of(write(tmp_path / "a.jsonl", "\n".join(lines)))
    assert rows[:6] == [
        ("a.jsonl:1", {"a": 1}),
        ("a.jsonl:2", "invalid JSON: Unterminated string starting at column 7"),
        ("a.jsonl:3", "invalid JSON: Expecting property name enclosed in double quotes at column 9"),
        ("a.jsonl:4", "not a JSON object: expected an object with the row's fields, got a list"),
        ("a.jsonl:5", "not a JSON object: expected an object with the row's fields, got null"),
        ("a.jsonl:6", "invalid JSON: Invalid control character at column 8"),
    ]
    assert rows[6][1].startswith("invalid JSON: Exceeds the limit")
    assert rows_of(write(tmp_path / "a.csv", "x,y\n1\n1,2\n")) == [
        ("a.csv:2", "wrong number of fields: 1 fields, the header has 2"),
        ("a.csv:3", {"x": "1", "y": "2"}),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "", "a.json: the file is empty"),
        ("a.json", '[{"a": 1},\n {"a": 2]', "a.json:2: invalid JSON in row 2: Expecting ',' delimiter at column 9"),
        ("a.json", '[{"a": 1},\n]', "a.json:2: invalid JSON in row 1: a comma before the closing bracket at column 1"),
        (
            "a.json",
            '[{"a": 1}\n{"a": 2}]',
            "a.json:2: invalid JSON in row 1: expected a comma or the closing bracket at column 1",
        ),
        (
            "a.json",
            '[{"a": 1}',
            "a.json:1: invalid JSON in row 1: expected a comma or the closing bracket at column 10",
        ),
        ("a.json", '[{"a": 1}] x', "a.json:1: invalid JSON in row 1: text after the closing bracket at column 11"),
        (
            "a.jsonl",
            '{"a": 1}\n{"a": "café"}\n'.encode("latin-1"),
            "a.jsonl:2: not UTF-8: byte 0xe9\n    mend: save the file as UTF-8",
        ),
        (
            "a.json",
            '[{"a": 1},\n\n{"a": "café"}]'.encode("latin-1"),
            "a.json:3: not UTF-8: byte 0xe9\n    mend: save the file as UTF-8",
        ),
        ("a.csv", "x\nü\n".encode("latin-1"), "a.csv:2: not UTF-8: byte 0xfc\n    mend: save the file as UTF-8"),
        ("a.txt", "hello".encode("utf-16"), "a.txt: the file is UTF-16\n    mend: save it as UTF-8"),
        ("a.csv", 'x\n"open\n', "a.csv:2: invalid CSV: unexpected end of data"),
    ],
)
def test_files_that_cannot_be_read_as_a_whole(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    assert refusal(write(tmp_path / name, content)) == (message, ExitCode.DATA)


def test_a_broken_parquet_file(tmp_path: Path) -> None:
    message, code = refusal(write(tmp_path / "a.parquet", b"PAR1 and no more"))
    assert message.startswith("a.parquet: not a whole parquet file: ")
    assert code == ExitCode.DATA


def test_missing_and_unknown_files(tmp_path: Path) -> None:
    assert refusal(tmp_path / "a.json") == ("a.json: cannot read: No such file or directory", ExitCode.INPUT)
    assert refusal(write(tmp_path / "a.xml", "<a/>")) == (
        "a.xml: not a kind of data file that is read\n    mend: one of .csv, .json, .jsonl, .parquet, .txt",
        ExitCode.INPUT,
    )


def info(folder: Path, **entries: Any) -> Path:
    write(folder / "dataset_info.json", json.dumps(entries))
    write(folder / "a.json", json.dumps(ROWS))
    return folder


def refused(names: list[str], folder: Path) -> tuple[str, int]:
    with pytest.raises(MegatuneError) as caught:
        resolve_datasets(names, folder)
    return str(caught.value).replace(f"{folder}/", ""), int(caught.value.exit_code)


def test_an_entry_with_nothing_said_is_alpaca(tmp_path: Path) -> None:
    assert resolve_datasets(["a"], info(tmp_path, a={"file_name": "a.json"})) == [
        DatasetSource("a", (tmp_path / "a.json",), "alpaca", Columns(), Tags())
    ]


def test_what_is_not_listed_keeps_its_default(tmp_path: Path) -> None:
    entry = {"file_name": "a.json", "columns": {"prompt": "question", "system": None}, "num_samples": 5}
    (source,) = resolve_datasets(["a"], info(tmp_path, a=entry))
    assert source.columns == Columns(prompt="question", system=None)
    assert (source.columns.query, source.columns.response, source.num_samples) == ("input", "output", 5)
    entry = {"file_name": "a.json", "formatting": "sharegpt", "tags": {"role_tag": "role"}}
    (source,) = resolve_datasets(["a"], info(tmp_path, a=entry))
    assert source.tags == Tags(role_tag="role")
    (source,) = resolve_datasets(["a"], info(tmp_path, a={"file_name": "a.json", "formatting": "openai"}))
    assert (source.columns.messages, source.tags.observation_tag) == ("messages", "tool")


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    for name in ("b.jsonl", "a.jsonl"):
        write(tmp_path / "parts" / name, json.dumps({"instruction": name, "output": name}))
    write(tmp_path / "parts" / "README.md", "not data")
    (source,) = resolve_datasets(["parts"], info(tmp_path, parts={"file_name": "parts"}))
    assert [row.fields["instruction"] for row in source.rows()] == ["a.jsonl", "b.jsonl"]
    write(tmp_path / "parts" / "c.csv", "x\n1\n")
    message, code = refused(["parts"], tmp_path)
    assert message.startswith("parts: a folder of .csv and .jsonl files\n    mend: one kind of file in a folder")
    assert code == ExitCode.INPUT


@pytest.mark.parametrize(
    ("row", "formatting", "column"),
    [
        ({"messages": []}, "openai", "messages"),
        ({"conversations": []}, "sharegpt", "conversations"),
        ({"text": "x"}, "alpaca", "text"),
        ({"instruction": "x"}, "alpaca", "instruction"),
    ],
)
def test_a_path_is_a_data_set_of_the_form_of_its_first_row(
    tmp_path: Path, row: dict[str, Any], formatting: str, column: str
) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps(row))
    for name, folder in ((str(path), "nowhere"), ("a.jsonl", str(tmp_path))):
        (source,) = resolve_datasets([name], folder)
        assert source.formatting == formatting
        assert column == (source.columns.prompt if formatting == "alpaca" else source.columns.messages)


def test_refusals_name_everything_at_once(tmp_path: Path) -> None:
    folder = info(
        tmp_path,
        identity={"file_name": "a.json"},
        hub={"hf_hub_url": "x/y", "subset": "en", "split": "test"},
        pairs={"file_name": "a.json", "ranking": True, "columns": {"chosen": "chosen"}},
        kto={"file_name": "a.json", "columns": {"kto_tag": "label"}},
        pictures={"file_name": "a.json", "columns": {"images": "images"}},
        typo={"file_name": "a.json", "formating": "alpaca", "columns": {"promt": "x"}, "tags": {"role_tag": 1}},
        kinds={"file_name": "a.json", "formatting": "chatml", "num_samples": 0, "columns": []},
        none={"formatting": "alpaca"},
        number=1,
    )
    names = ["identiti", "hub", "pairs", "kto", "pictures", "typo", "kinds", "none", "number"]
    message, code = refused(names, folder)
    assert code == ExitCode.SETTINGS
    assert message.splitlines() == [
        "dataset: 'identiti' is neither in dataset_info.json nor a path",
        "    mend: nearest: identity",
        "dataset_info.json: hub: hf_hub_url, subset, split: needs the network loader, which is not built",
        "    mend: download the data set, and keep file_name, formatting, columns and tags only",
        "dataset_info.json: pairs: ranking: preference pairs need stage dpo, which is not built",
        "dataset_info.json: pairs: columns.chosen: preference pairs need stage dpo, which is not built",
        "dataset_info.json: kto: columns.kto_tag: KTO is not built",
        "dataset_info.json: pictures: columns.images: training on images is not built",
        "dataset_info.json: typo: formating: unknown key",
        "    mend: nearest: formatting",
        "dataset_info.json: typo.columns: promt: unknown key",
        "    mend: nearest: prompt",
        "dataset_info.json: typo: tags.role_tag: expected a string, got a number",
        "dataset_info.json: kinds: formatting: 'chatml' is unknown",
        "    mend: one of alpaca, sharegpt, openai",
        "dataset_info.json: kinds: num_samples: expected a positive whole number, got 0",
        "dataset_info.json: kinds: columns: expected an object, got a list",
        "dataset_info.json: none: file_name is missing",
        '    mend: add "file_name": a file or folder of this data set',
        "dataset_info.json: number: expected an object, got a number",
    ]


def test_missing_files_are_another_exit_code(tmp_path: Path) -> None:
    folder = info(tmp_path, gone={"file_name": "gone.json"})
    assert refused(["gone"], folder) == ("dataset_info.json: gone: no such file or folder: gone.json", ExitCode.INPUT)
    assert refused(["x/y.json"], folder) == ("dataset: no such file or folder: x/y.json", ExitCode.INPUT)
    write(tmp_path / "dataset_info.json", "{")
    message, code = refused(["a"], tmp_path)
    assert message.startswith("dataset_info.json:1: cannot read: Expecting property name")
    assert code == ExitCode.INPUT
