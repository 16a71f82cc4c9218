"""What a data set may name, and how large what it names may be: a card's paths stay in its folder, rows of a hub name
no file of this machine, archives and scripts are not opened, and the little that is compressed is no endless row."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from megatune.data.bad_rows import RowError
from megatune.data.conversation import Conversation
from megatune.data.formats import FORMATS, RowFormat
from megatune.data.readers import files, read_rows, text
from megatune.data.samples import RowReader
from megatune.data.sources import resolve_datasets
from megatune.data.sources.detection import DatasetSource
from megatune.errors import ExitCode, MegatuneError

ROW = '{"instruction": "a", "output": "b"}\n'
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 60))
MERGES_OF_MANY = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: *a{i - 1}, k{i}: 1}}\n" for i in range(1, 5000))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "secret.jsonl").write_text(ROW)
    (tmp_path / "set" / "data").mkdir(parents=True)
    (tmp_path / "set" / "data" / "train.jsonl").write_text(ROW)
    return tmp_path / "set"


@pytest.mark.parametrize("card", [
    "data_files: ../secret.jsonl", "data_files: data/../../secret.jsonl", "data_files: '../*.jsonl'", "data_dir: ..",
    "data_files: SECRET", "data_dir: /etc", "data_files: 'file://SECRET'",
])  # fmt: skip
def test_a_card_names_nothing_outside_of_its_folder(folder: Path, card: str) -> None:
    card = card.replace("SECRET", str(folder.parent / "secret.jsonl"))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  {card}\n---\n")
    with pytest.raises(MegatuneError) as caught:
        resolve_datasets([str(folder)], "nowhere", "sft")
    assert caught.value.exit_code in (ExitCode.INPUT, ExitCode.SETTINGS)


@pytest.mark.parametrize(
    "card",
    [MERGES, MERGES_OF_MANY, "[" * 100_000, "a: &a [*a]", "date: 2026-02-30"],
    ids=["merges", "many", "depth", "itself", "date"],
)
def test_a_card_without_end_is_refused(folder: Path, card: str) -> None:
    (folder / "README.md").write_text(f"---\nconfigs: 1\n{card}\n---\n")
    with pytest.raises(MegatuneError) as caught:
        resolve_datasets([str(folder)], "nowhere", "sft")
    assert caught.value.exit_code == ExitCode.INPUT


def test_a_registry_without_end_is_refused(folder: Path) -> None:
    (folder / "dataset_info.json").write_text("[" * 100_000)
    with pytest.raises(MegatuneError, match="cannot be read") as caught:
        resolve_datasets(["x"], folder, "sft")
    assert caught.value.exit_code == ExitCode.INPUT


@pytest.mark.parametrize(("entry", "what"), [
    ({"file_name": "a.zip"}, "archives are not supported"),
    ({"file_name": "a.tar.gz"}, "archives are not supported"),
    ({"file_name": "a.py"}, "scripts are not run"),
    ({"file_name": "a.pkl"}, ".pkl files are not supported"),
    ({"file_name": "a.npy"}, ".npy files are not supported"),
    ({"script_url": "a"}, "a data set's script is code, which is never run"),
])  # fmt: skip
def test_archives_scripts_and_pickles_are_not_opened(folder: Path, entry: dict[str, str], what: str) -> None:
    (folder / entry.get("file_name", "a")).write_bytes(b"PK\x03\x04")
    (folder / "dataset_info.json").write_text(json.dumps({"x": entry}))
    with pytest.raises(MegatuneError, match=what):
        resolve_datasets(["x"], folder, "sft")


@pytest.mark.parametrize(("path", "elsewhere"), [
    ("/etc/passwd", True), ("../a.png", True), ("a/../../b.png", True), ("file:///etc/passwd", True),
    ("..\\a.png", True),
    ({"path": "/etc/passwd"}, True), ("a.png", False), ("a/b..c.png", False),
    ({"bytes": b"x", "path": "/a.png"}, False),
    ("/9j/" + "4AAQSkZJRgABAQ" * 400, False), ("/9j/" + "4AAQSkZJRgABAQ" * 60, False),
    ("/9j/a.jpg", True), ("data:image/png;base64,/../", False),
])  # fmt: skip
def test_rows_of_a_hub_name_pictures_below_media_dir(path: Any, elsewhere: bool) -> None:
    """A user's own rows may name any file, as LLaMA-Factory's do."""
    form = FORMATS["sharegpt"]
    chat = [{"from": "human", "value": "<image>What is it?"}, {"from": "gpt", "value": "A cat."}]
    fields = {"conversations": chat, "images": [path]}
    for fetched in (True, False):
        source = DatasetSource("x", (), form, fetched=fetched)
        example, _ = RowReader(source, "sft", {}, media=True).read(fields)
        if elsewhere and fetched:
            assert isinstance(example, RowError)
            assert example.code == "picture-outside"
        else:
            assert isinstance(example, Conversation)


def test_frames_of_a_video_stay_below_media_dir_too() -> None:
    form: RowFormat = FORMATS["sharegpt"]
    chat = [{"from": "human", "value": "<video>What is it?"}, {"from": "gpt", "value": "A cat."}]
    reader = RowReader(DatasetSource("x", (), form, fetched=True), "sft", {}, media=True)
    example, _ = reader.read({"conversations": chat, "videos": [["a.png", "/etc/passwd"]]})
    assert isinstance(example, RowError)


@pytest.mark.parametrize(("name", "content"), [
    ("a.jsonl", ROW + "x" * 200_000),
    ("a.json", '[{"instruction": "' + "x" * 4_000_000),
    ("a.txt", "x" * 200_000),
    ("a.csv", 'a,b\n1,"' + "x\n" * 100_000),
    ("a.tsv", "a\tb\n1\t" + "x" * 200_000),
])  # fmt: skip
@pytest.mark.parametrize("compressed", [False, True])
def test_a_row_has_an_end(
    tmp_path: Path, name: str, content: str, compressed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gigabyte of zeros compresses to a megabyte, and was one row."""
    for module in (files, text):
        monkeypatch.setattr(module, "MAX_ROW_BYTES", 100_000)
    file = tmp_path / (f"{name}.gz" if compressed else name)
    file.write_bytes(gzip.compress(content.encode()) if compressed else content.encode())
    with pytest.raises(MegatuneError, match=r"a row of more than 0 MiB|field larger than field limit") as caught:
        for _ in read_rows(file):
            pass
    assert caught.value.exit_code == ExitCode.DATA
