"""What determines the name of prepared rows, and what does not."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from tokenizer_kit import gpt_oss_tokenizer, llama3_tokenizer, qwen_tokenizer

from megatune.config.groups.data import DataSettings
from megatune.config.groups.run import RunSettings
from megatune.config.setting import Mark
from megatune.config.settings import Settings, marked
from megatune.data.cache import key as key_of
from megatune.data.cache.key import local_parts, prepared_key
from megatune.data.sources import resolve_datasets
from megatune.data.templates.named import NAMED_TEMPLATES
from megatune.errors import ExitCode, MegatuneError
from megatune.hub import digests
from megatune.hub.digests import remembered_digest

TOKENIZER = qwen_tokenizer()

BY_VALUE, BY_CONTENT, BY_PICTURES = (
    {path.removeprefix("data.") for path in marked(mark) if path.startswith("data.")}
    for mark in (Mark.ROWS, Mark.CONTENT, Mark.MEDIA)
)

# Data settings that leave the prepared rows as they are: of the order of rows, of streaming, of processes and places.
IRRELEVANT = {
    "group_by_length",
    "disable_shuffling",
    "streaming",
    "buffer_size",
    "max_bad_rows",
    "tokenized_path",
    "preprocessing_num_workers",
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "template_date",  # where a template states no day
}

ROWS = [{"instruction": f"What is {i}?", "output": f"It is {i}."} for i in range(5)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set, good, and a cache of this test's own."""
    monkeypatch.setenv("MEGATUNE_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data"
    data.mkdir()
    (data / "good.json").write_text(json.dumps(ROWS))
    (data / "other.json").write_text(json.dumps(ROWS[1:]))
    info = {"good": {"file_name": "good.json"}, "other": {"file_name": "other.json"}}
    (data / "dataset_info.json").write_text(json.dumps(info))
    return data


def key(folder: Path, *, tokenizer: Any = TOKENIZER, run: dict[str, Any] | None = None, **data: Any) -> str:
    chosen = DataSettings(**{"dataset": ["good"], "dataset_dir": str(folder), **data})
    return prepared_key(Settings(run=RunSettings(**run or {}), data=chosen), tokenizer).name


def test_what_needs_no_tokenizer_is_known_before_a_run(folder: Path) -> None:
    settings = Settings(data=DataSettings(dataset=["good"], dataset_dir=str(folder)))
    parts, early = prepared_key(settings, TOKENIZER).parts, local_parts(settings)
    assert early == {part: parts[part] for part in parts if part not in ("the tokenizer", "the template")}
    on_hub = Settings(data=DataSettings(dataset=["good", "owner/name"], dataset_dir=str(folder)))
    assert local_parts(on_hub) == {part: early[part] for part in early if part.startswith("the file ")}


def test_every_data_setting_is_in_the_key_or_known_not_to_matter() -> None:
    """A new setting changes the rows or does not: say which, by a mark or in IRRELEVANT."""
    groups = [BY_VALUE, BY_CONTENT, BY_PICTURES, IRRELEVANT]
    assert set().union(*groups) == set(DataSettings.model_fields)
    assert sum(map(len, groups)) == len(DataSettings.model_fields)


def test_columns_are_in_the_key_by_what_they_do(folder: Path) -> None:
    """Those of a data set without an entry; the same file, read otherwise, is other rows."""
    (folder / "rows.jsonl").write_text('{"a": "x", "b": "y", "query": "z"}\n')
    named = [{"a": "query", "b": "response"}, {"a": "response", "b": "query"}, {"a": "response"}]
    keys = [key(folder, dataset=["rows.jsonl"], columns=columns) for columns in named]
    assert len(set(keys)) == 3
    assert key(folder, dataset=["rows.jsonl"], columns={"B": "response", "A": "query"}) == keys[0]


@pytest.mark.parametrize(
    ("row", "formatting"),
    [
        (ROWS[0], "alpaca"),
        ({"messages": [{"role": "user", "content": "x"}]}, "openai"),
        ({"conversations": [{"from": "human", "value": "x"}]}, "sharegpt"),
        ({"query": "x", "response": "y"}, "query_response"),
        ({"text": "x"}, "text"),
    ],
)
@pytest.mark.parametrize("swift_version", [0, 4])
def test_data_sets_are_in_the_key_by_the_names_of_earlier_versions(
    row: dict[str, Any], formatting: str, swift_version: int, folder: Path
) -> None:
    """Their checkpoints resume."""
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    stage = "pt" if "text" in row else "sft"
    described = key_of._described(*resolve_datasets(["rows.jsonl"], folder, stage, swift_version=swift_version))
    assert sorted(described) == [
        "columns", "fetched", "fields", "files", "formatting", "name", "num_samples", "ranking", "renames",
        "swift_version", "tags",
    ]  # fmt: skip
    assert described["formatting"] == ("ms_swift" if swift_version else formatting)
    assert described["swift_version"] == swift_version
    assert described["fields"] == (tuple(row) if swift_version else ())


OTHER_VALUES = {
    "cutoff_len": 7,
    "truncation_strategy": "drop",
    "mix_strategy": "interleave_once",
    "interleave_probs": [1.0],
    "dataset_weights": [2.0],
    "on_bad_row": "error",
    "max_samples": 3,
    "val_size": 0.5,
    "train_on_prompt": True,
    "mask_history": True,
    "enable_thinking": None,
    "preserve_thinking": True,
    "default_system": "Be brief.",
    "model_name": "Ada",
    "model_author": "Grace",
    "dataset": ["good", "other"],
    "eval_dataset": ["other"],
    "template": "chatml",
    "packing": True,
    "dataset_shuffle": False,
    "conversation_rules": "ms_swift_4",
    "agent_template": "hermes",
    "tool_format": "qwen",
    "add_empty_thought": False,
    "answer_masks": [],
}


@pytest.mark.parametrize("name", sorted(BY_VALUE | BY_CONTENT - {"dataset_dir", "columns"}))
def test_what_determines_the_rows_determines_the_key(folder: Path, name: str) -> None:
    assert key(folder, **{name: OTHER_VALUES[name]}) != key(folder)


OTHER_IRRELEVANT = {
    "group_by_length": True,
    "disable_shuffling": True,
    "max_bad_rows": 0.5,
    "streaming": True,
    "buffer_size": 5,
    "tokenized_path": "rows",
    "preprocessing_num_workers": 4,
    "dataloader_num_workers": 4,
    "dataloader_pin_memory": False,
    "template_date": "2026-11-27",
}


def test_what_does_not_determine_the_rows_does_not_determine_the_key(folder: Path) -> None:
    assert set(OTHER_IRRELEVANT) == IRRELEVANT
    assert key(folder, **OTHER_IRRELEVANT) == key(folder)


def test_seed_and_stage_count(folder: Path) -> None:
    keys = [key(folder, run=run) for run in ({}, {"seed": 1}, {"stage": "pt"})]
    assert len(set(keys)) == 3
    assert key(folder, run={"stage": "pt"}) == key(folder, run={"stage": "pt"}, packing=True), "null packs texts"


def test_files_count_by_their_content(folder: Path, tmp_path: Path) -> None:
    before = key(folder)
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy, copy_function=shutil.copyfile)
    assert key(copy) == before, "on another machine, in another folder, at another time"
    (folder / "good.json").write_text(json.dumps(list(reversed(ROWS))))
    assert key(folder) != before
    (folder / "good.json").write_text(json.dumps(ROWS))
    assert key(folder) == before


def test_how_rows_are_read_counts(folder: Path) -> None:
    before = key(folder)
    keys = {before}
    for entry in (
        {"columns": {"response": "answer"}},
        {"formatting": "sharegpt", "tags": {"user_tag": "person"}},
        {"num_samples": 3},
    ):
        info = {"good": {"file_name": "good.json", **entry}}
        (folder / "dataset_info.json").write_text(json.dumps(info))
        keys.add(key(folder))
    assert len(keys) == 4


def test_the_tokenizer_counts(folder: Path) -> None:
    other_template, more_tokens, other_stop = qwen_tokenizer("qwen3"), qwen_tokenizer(), qwen_tokenizer()
    more_tokens.add_tokens(["<more>"])
    other_stop.eos_token = "<|endoftext|>"
    tokenizers = [TOKENIZER, llama3_tokenizer(), other_template, more_tokens, other_stop]
    assert len({key(folder, tokenizer=tokenizer) for tokenizer in tokenizers}) == 5
    used = qwen_tokenizer()
    used(["a", "b c"], padding=True, truncation=True, max_length=1)
    assert key(folder, tokenizer=used) == key(folder)


def test_templates_count_by_what_they_say(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert key(folder, template=None) != key(folder, template="default")
    before = key(folder, template="qwen")
    changed = NAMED_TEMPLATES["qwen"].__class__(
        **{
            **{name: getattr(NAMED_TEMPLATES["qwen"], name) for name in NAMED_TEMPLATES["qwen"].__slots__},
            "default_system": "You are another.",
        }
    )
    monkeypatch.setitem(NAMED_TEMPLATES, "qwen", changed)
    assert key(folder, template="qwen") != before

    def of_file(text: str) -> str:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return key(folder, template=str(path))

    assert of_file("user: a") != of_file("user: b")
    assert of_file("user: a") == of_file("user: a")


def test_the_day_counts_where_a_template_states_it(folder: Path) -> None:
    def found(template: str, day: str | None, **changes: Any) -> str:
        tokenizer = gpt_oss_tokenizer() if template == "gpt_oss" else TOKENIZER
        rules = {"conversation_rules": "ms_swift_4", "template": template}
        return key(folder, tokenizer=tokenizer, template_date=day, **rules, **changes)

    assert found("gpt_oss", "2026-11-27") == found("gpt_oss", "2026-11-27") != found("gpt_oss", "2026-11-28")
    assert found("gpt_oss", None) == found("gpt_oss", date.today().isoformat())
    assert found("qwen2_5", "2026-11-27") == found("qwen2_5", "2026-11-28")
    # Another system message takes the place of the text with the day.
    short = {"default_system": "Be brief."}
    assert found("mistral_2501", "2026-11-27") != found("mistral_2501", "2026-11-28")
    assert found("mistral_2501", "2026-11-27", **short) == found("mistral_2501", "2026-11-28", **short)


def test_a_file_that_cannot_be_read(folder: Path) -> None:
    (folder / "good.json").unlink()
    (folder / "good.json").symlink_to("/proc/self/mem")  # nobody can read its first byte, not even root
    with pytest.raises(MegatuneError) as caught:
        key(folder)
    assert caught.value.exit_code == ExitCode.INPUT


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are read to the end."""
    read: list[Path] = []
    whole: Callable[[Path, str], str] = digests._content_digest

    def counting(path: Path, algorithm: str) -> str:
        read.append(path)
        return whole(path, algorithm)

    monkeypatch.setattr(digests, "_content_digest", counting)
    return read


class TestRememberedDigests:
    @pytest.fixture(autouse=True)
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Files of these tests count as old at once: the clock is ten seconds ahead."""
        monkeypatch.setattr("megatune.hub.digests.time.time_ns", lambda: time.clock_gettime_ns(0) + 10**10)

    def test_a_file_is_read_once(self, tmp_path: Path, counted: list[Path]) -> None:
        path = tmp_path / "a.json"
        path.write_text("1")
        first = remembered_digest(path, tmp_path / "digests")
        assert len(first) == 32
        assert remembered_digest(path, tmp_path / "digests") == first
        assert counted == [path]
        os.link(path, tmp_path / "b.json")
        assert remembered_digest(tmp_path / "b.json", tmp_path / "digests") == first

    def test_a_file_that_has_changed_is_read_again(self, tmp_path: Path, counted: list[Path]) -> None:
        path, notes = tmp_path / "a.json", tmp_path / "digests"
        path.write_text("1")
        first = remembered_digest(path, notes)
        times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
        path.write_text("2")
        os.utime(path, ns=times)  # what copies with their times do
        assert remembered_digest(path, notes) != first
        assert len(counted) == 2

    @pytest.mark.parametrize("text", ["", "{}", "[1]", '{"identity": 3}', "\x00"])
    def test_damaged_notes_are_done_without(self, tmp_path: Path, text: str) -> None:
        path, notes = tmp_path / "a.json", tmp_path / "digests"
        path.write_text("1")
        first = remembered_digest(path, notes)
        (note,) = (tmp_path / "digests").iterdir()
        note.write_text(text)
        assert remembered_digest(path, notes) == first

    def test_a_folder_that_cannot_be_written_remembers_nothing(self, tmp_path: Path, counted: list[Path]) -> None:
        path = tmp_path / "a.json"
        path.write_text("1")
        notes = Path("/proc/megatune")
        assert remembered_digest(path, notes) == remembered_digest(path, notes)
        assert len(counted) == 2


def test_a_file_that_was_just_written_is_not_remembered(tmp_path: Path, counted: list[Path]) -> None:
    """It may change again within the tick of its time stamp."""
    path, notes = tmp_path / "a.json", tmp_path / "digests"
    path.write_text("1")
    remembered_digest(path, notes)
    remembered_digest(path, notes)
    assert len(counted) == 2


def test_a_format_of_tools_that_changes_under_its_name_changes_the_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, qwen = [], NAMED_TEMPLATES["qwen"]
    assert qwen.tool_format is not None
    for text in ("one", "two"):
        tools = replace(qwen.tool_format, offer=text)
        monkeypatch.setitem(NAMED_TEMPLATES, "qwen", replace(qwen, tool_format=tools))
        keys.append(key(folder, template="qwen"))
    assert keys[0] != keys[1]


def test_rows_are_kept_by_the_sources_that_make_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code and tables count by what they say, unless no row depends on them; the key, by which runs resume, is without
    them."""
    room = Path(key_of.__file__).parents[1]
    assert {path.stem for path in room.iterdir()} >= key_of._NO_EFFECT_ON_ROWS
    monkeypatch.setattr(key_of, "__file__", str(folder / "cache" / "key.py"))
    monkeypatch.setattr(key_of, "_sources", key_of._sources.__wrapped__)  # which is remembered

    def kept(name: str, text: str) -> str:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        found = key_of.versioned("key")
        assert key_of.versioned("key") == found, "as it is remembered"
        assert found.startswith("key-")
        return found

    first = kept("encode.py", "def f(x: int) -> int:\n    return x + 1\n")
    assert kept("loader.py", "1") == kept("preview/show.py", "2") == first, "no row depends on them"
    documented = 'def f(x: int) -> int:\n    """Add one."""\n    return x + 1  # as asked\n'
    assert kept("encode.py", f'"""A file."""\n{documented}') == first
    table = kept("templates/named.yaml", "a: {b: 1}")
    assert kept("templates/named.yaml", "# A comment.\na:\n  b: 1\n") == table
    others = [kept("encode.py", "def f(x: int) -> int:\n    return x + 2\n"), kept("templates/named.yaml", "a: {b: 2}")]
    assert len({first, table, *others}) == 4
