"""dataset_info.json and paths: which files, how their rows read, and the exact words for what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatune.data.formats import FORMATS, AlpacaFormat
from megatune.data.formats.columns import OPENAI_TAGS, Columns, Tags
from megatune.data.sources import DatasetSource, SourcePosition, resolve_datasets
from megatune.data.sources.data_files import splits_by_name
from megatune.data.sources.registry import parse_entry
from megatune.errors import ExitCode, MegatuneError

ROWS = [{"instruction": "Hi", "output": "Hello\nyou"}, {"instruction": "你好", "output": 'say "hi", 你好 🙂'}]
PAIR = {"prompt": "Q", "chosen": "good", "rejected": "bad"}


def write(path: Path, content: str = json.dumps(ROWS)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
    return path


def info(folder: Path, /, **entries: Any) -> Path:
    write(folder / "dataset_info.json", json.dumps(entries))
    write(folder / "a.json")
    return folder


def resolved(name: str, folder: str | Path, stage: str = "sft") -> DatasetSource:
    (source,) = resolve_datasets([name], folder, stage)
    return source


def refused(names: list[str] | str, folder: Path, stage: str = "sft") -> tuple[str, int]:
    with pytest.raises(MegatuneError) as caught:
        resolve_datasets([names] if isinstance(names, str) else names, folder, stage)
    return str(caught.value).replace(f"{folder}/", "").replace(str(folder), "HERE"), int(caught.value.exit_code)


def files(source: DatasetSource, folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in source.files]


# What LLaMA-Factory has off unless it is listed.
OFF: dict[str, None] = dict.fromkeys(("history", "system", "tools", "images", "videos", "audios"))


def test_an_entry_with_nothing_said_is_alpaca(tmp_path: Path) -> None:
    assert resolved("a", info(tmp_path, a={"file_name": "a.json"})) == DatasetSource(
        "a", (tmp_path / "a.json",), AlpacaFormat(Columns(**OFF))
    )


@pytest.mark.parametrize(
    ("entry", "columns", "tags"),
    [
        ({"columns": {"prompt": "question", "system": None}}, Columns("question", query=None, **OFF), Tags()),
        ({"columns": {"system": "s"}}, Columns(query=None, **{**OFF, "system": "s"}), Tags()),
        ({"formatting": "sharegpt", "tags": {"role_tag": "role"}}, Columns(**OFF), Tags(role_tag="role")),
        ({"formatting": "openai"}, Columns(messages="messages", **OFF), OPENAI_TAGS),
        ({"formatting": "query_response", "columns": {"prompt": "q"}}, Columns("q", None, None), Tags()),
        ({"formatting": "query_response"}, Columns(None, None, None), Tags()),
        ({"formatting": "text"}, Columns("text"), Tags()),
        (
            {"formatting": None, "subset": None, "num_samples": None, "tags": None, "ranking": False},
            Columns(**OFF),
            Tags(),
        ),
    ],
)
def test_what_is_not_listed_is_off_or_keeps_its_default(
    tmp_path: Path, entry: dict[str, Any], columns: Columns, tags: Tags
) -> None:
    source = resolved("a", info(tmp_path, a={"file_name": "a.json", **entry}))
    usual = FORMATS[entry.get("formatting") or "alpaca"]
    assert source.format == replace(usual, columns=columns, tags=tags)


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl"):
        write(tmp_path / "parts" / name, "".join(f'{{"instruction": "{name} {i}", "output": "x"}}\n' for i in range(2)))
    for name in ("README.md", ".gitattributes", "dataset_info.json", "state.json", "notes.pdf", "weights.pkl"):
        write(tmp_path / "parts" / name, "not data")
    source = resolved("parts", info(tmp_path, parts={"file_name": "parts"}))
    read = [(row.fields["instruction"], position) for row, position in source.rows_from()]
    assert [text for text, _ in read] == ["a.jsonl 0", "a.jsonl 1", "b.jsonl 0", "b.jsonl 1"]
    assert [row.fields["instruction"] for row in source.rows()] == [text for text, _ in read]
    for done, (_, position) in enumerate(read, start=1):
        assert isinstance(position, SourcePosition)
        assert [(row.fields["instruction"], after) for row, after in source.rows_from(position)] == read[done:]
    write(tmp_path / "parts" / "c.csv", "x\n1\n")
    message, code = refused("parts", tmp_path)
    assert message.startswith("parts: data files of several types: .csv and .jsonl\n    fix: use one file type per")
    assert code == ExitCode.INPUT


CARD = """---
configs:
- config_name: en
  data_files:
  - {split: train, path: "en/*.jsonl"}
  - {split: held, path: ["en/held/*", "./more/**"]}
- config_name: main
  default: true
  data_dir: main
---
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("clone", ["main/train.jsonl"]),
        ("clone:en", ["en/1.jsonl", "en/2.jsonl"]),
        ("clone:en/main", ["en/1.jsonl", "en/2.jsonl", "main/train.jsonl"]),
        ("clone:all#7", ["en/1.jsonl", "en/2.jsonl", "main/train.jsonl"]),
        ("held", ["en/held/h.jsonl", "more/deep/m.jsonl"]),
        ("held:main", "clone: no split held of subset main"),
        ("folder", ["en/held/h.jsonl"]),
        ("clone:fr", "clone: no subset fr\n    fix: its subsets are en, main"),
        (
            "unsplit",
            'clone: no split dev of subset en\n    fix: write "split" in dataset_info.json: one of train, held',
        ),
        ("nothing", "clone: empty: no data files"),
        ("a:en", "dataset_info.json: a: a.json is a file, which has no subsets, splits or folders"),
    ],
)
def test_a_copy_of_a_repository(tmp_path: Path, name: str, expected: list[str] | str) -> None:
    clone = {"file_name": "clone"}
    info(
        tmp_path,
        a={"file_name": "a.json"},
        held={**clone, "subset": "en", "split": "held"},
        folder={**clone, "folder": "./en/held/"},
        unsplit={**clone, "subset": "en", "split": "dev"},
        nothing={**clone, "folder": "empty"},
    )
    write(tmp_path / "clone" / "README.md", CARD)
    for path in ("en/2", "en/1", "en/held/h", "more/deep/m", "main/train", "main/test", ".git/x", "rest"):
        write(tmp_path / "clone" / f"{path}.jsonl", json.dumps(ROWS[0]))
    if isinstance(expected, list):
        source = resolved(name, tmp_path)
        assert files(source, tmp_path / "clone") == expected
        assert source.num_samples == (7 if name.endswith("#7") else None)
    else:
        message, code = refused(name, tmp_path)
        assert message.startswith(expected)
        assert code == (ExitCode.INPUT if name == "nothing" else ExitCode.SETTINGS)


@pytest.mark.parametrize(
    ("paths", "splits"),
    [
        (["data/train-00000-of-00001.parquet", "x.csv"], {"train": ["data/train-00000-of-00001.parquet"]}),
        (["data/train_sft-00000-of-00001-ab.parquet"], {"train_sft": ["data/train_sft-00000-of-00001-ab.parquet"]}),
        (["my-train/a.csv", "dev/a.csv", "test.csv"], {"train": ["my-train/a.csv"], "validation": ["dev/a.csv"]}),
        (["my_train.csv", "eval.csv", "b.csv"], {"train": ["my_train.csv"], "test": ["eval.csv"]}),
        (["trained.csv", "b/c.csv"], {"train": ["trained.csv", "b/c.csv"]}),
    ],
)
def test_splits_are_told_by_names(paths: list[str], splits: dict[str, list[str]]) -> None:
    assert splits_by_name(paths) == splits


@pytest.mark.parametrize("code", ["scripted.py", "other.py"])
def test_a_repository_that_is_a_script_is_refused_and_not_run(tmp_path: Path, code: str) -> None:
    canary = tmp_path / "canary"
    write(tmp_path / "scripted" / code, f"open({str(canary)!r}, 'w')")
    write(tmp_path / "scripted" / "README.md", "---\nlicense: mit\n---\n")
    if code == "scripted.py":
        write(tmp_path / "scripted" / "rows.json")
    expected = f"scripted: its rows are generated by a script, {code}\n    why: data set code is never run"
    assert refused("scripted", tmp_path) == (expected, ExitCode.INPUT)
    assert not canary.exists()


@pytest.mark.parametrize("kind", [".pkl", ".pickle", ".pt", ".bin"])
def test_pickles_are_refused_by_kind(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "folder" / f"a{kind}", "x")
    info(tmp_path, named={"file_name": f"folder/a{kind}"})
    for name in ("named", f"folder/a{kind}"):
        message, code = refused(name, tmp_path)
        why = "loading one may run code that it contains"
        assert message.startswith(f"folder/a{kind}: {kind} files are not supported\n    why: {why}")
        assert code == ExitCode.INPUT
    assert refused("folder", tmp_path)[0].startswith(f"folder: no data files; {kind} files are not supported")


@pytest.mark.parametrize(
    ("row", "formatting", "stage"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, "openai", "sft"),
        ({"conversations": [{"from": "human", "value": "x"}]}, "sharegpt", "sft"),
        ({"text": "x"}, "text", "pt"),
        ({"instruction": "x", "output": "y"}, "alpaca", "sft"),
        ({"query": "x", "response": "y"}, "query_response", "sft"),
        (PAIR, "query_response", "dpo"),
    ],
)
def test_a_path_is_a_data_set_of_the_form_of_its_rows(
    tmp_path: Path, row: dict[str, Any], formatting: str, stage: str
) -> None:
    path = write(tmp_path / "a.jsonl", f'{{broken\n{{"odd": 1}}\n{json.dumps(row)}\n')
    for name, folder in ((str(path), "nowhere"), ("a.jsonl", str(tmp_path)), (f"{path}#3", "nowhere")):
        source = resolved(name, folder, stage)
        assert (type(source.format), source.format.ranking) == (type(FORMATS[formatting]), stage == "dpo")
        assert source.num_samples == (3 if name.endswith("#3") else None)


def test_rows_of_no_known_form(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", '{"odd": 1, "strange": 2}\n')
    expected = (
        "dataset: a.jsonl: no known format has the fields odd, strange\n    fix: write columns: {odd: query, strange: "
        "response}, or describe it in dataset_info.json"
    )
    assert refused("a.jsonl", tmp_path) == (expected, ExitCode.DATA)


def test_names_with_the_characters_of_the_syntax(tmp_path: Path) -> None:
    info(tmp_path, **{"identity": {"file_name": "a.json", "num_samples": 9}, "c#5": {"file_name": "a.json"}})
    for name in ("b#50.json", "d#50", "e:en.json", "f:g/h.json"):
        write(tmp_path / name)
    numbers = {"identity": 9, "identity#50": 50, "c#5": None, "c#5#2": 2, "b#50.json": None, "b#50.json#2": 2}
    numbers |= {"e:en.json": None, "e:en.json#1": 1, "f:g": None, "f:g#3": 3}
    assert {name: resolved(name, tmp_path).num_samples for name in numbers} == numbers
    # "d#50" is a file without a kind, not 50 rows of a data set d.
    assert refused("d#50", tmp_path)[0].startswith("d#50: not a supported kind of data file")


@pytest.mark.parametrize(
    ("entry", "modelscope", "hub", "place"),
    [
        ({"hf_hub_url": "a/b", "ms_hub_url": "c/d", "file_name": "x"}, "", "hf", "a/b"),
        ({"hf_hub_url": "a/b", "ms_hub_url": "c/d", "file_name": "x"}, "1", "ms", "c/d"),
        ({"hf_hub_url": "a/b", "om_hub_url": "e/f", "script_url": "s.py"}, "1", "hf", "a/b"),
        ({"ms_hub_url": "c/d"}, "0", "ms", "c/d"),
        ({"hf_hub_url": None, "file_name": "x"}, "1", None, "x"),
    ],
)
def test_a_hub_wins_over_a_file(
    monkeypatch: pytest.MonkeyPatch, entry: dict[str, Any], modelscope: str, hub: str | None, place: str
) -> None:
    monkeypatch.setenv("USE_MODELSCOPE_HUB", modelscope)
    parsed = parse_entry(entry, "dataset_info.json: x")
    assert (parsed.hub, parsed.place) == (hub, place)


@pytest.mark.parametrize("number", ["0", "-5", "many", "", "1e3"])
def test_a_number_of_rows_that_is_none(tmp_path: Path, number: str) -> None:
    info(tmp_path, a={"file_name": "a.json"})
    what = f"dataset: 'a#{number}': expected a whole number above 0 after #, got {number!r}"
    fix = "write NAME#500 for 500 rows, and OWNER/NAME:SUBSET for one subset"
    assert refused(f"a#{number}", tmp_path) == (f"{what}\n    fix: {fix}", ExitCode.SETTINGS)


@pytest.mark.parametrize("stage", ["sft", "pt", "dpo", "rm"])
def test_pairs_are_for_their_stages_and_nothing_else_is(tmp_path: Path, stage: str) -> None:
    takes_pairs = stage in ("dpo", "rm")
    write(tmp_path / "pairs.jsonl", json.dumps(PAIR))
    info(tmp_path, pairs={"file_name": "pairs.jsonl", "ranking": True}, plain={"file_name": "a.json"})
    pairs, plain = ("pairs", "pairs.jsonl"), ("plain", "a.json")
    for name in pairs if takes_pairs else plain:
        assert resolved(name, tmp_path, stage).format.ranking is (takes_pairs)
    message, code = refused(list(plain if takes_pairs else pairs), tmp_path, stage)
    assert code == ExitCode.SETTINGS
    if takes_pairs:
        assert message == (
            f"dataset_info.json: plain: its rows are not preference pairs, which stage {stage} requires\n"
            '    fix: add "ranking": true if its rows have two answers; otherwise write stage: sft\n'
            f"dataset: a.json: its rows are not preference pairs, which stage {stage} requires\n"
            "    fix: name the two answers chosen and rejected, or describe them in dataset_info.json; otherwise write "
            "stage: sft"
        )
    else:
        assert message == (
            f"dataset_info.json: pairs: its rows are preference pairs, which stage {stage} does not train\n"
            "    fix: write stage: dpo, or rm\n"
            f"dataset: pairs.jsonl: its rows are preference pairs, which stage {stage} does not train\n"
            "    fix: write stage: dpo, or rm"
        )


def test_refusals_name_everything_at_once(tmp_path: Path) -> None:
    folder = info(
        tmp_path,
        identity={"file_name": "a.json"},
        kto={"file_name": "a.json", "columns": {"kto_tag": "label"}},
        sounds={"file_name": "a.json", "columns": {"images": "images", "audios": "audios"}},
        typo={"file_name": "a.json", "formating": "alpaca", "columns": {"promt": "x"}, "tags": {"role_tag": 1}},
        kinds={"file_name": "a.json", "formatting": ["x"], "num_samples": 0, "columns": [], "ranking": "yes"},
        none={"formatting": "alpaca"},
        number=1,
        script={"script_url": "x.py", "file_name": "a.json"},
        openmind={"om_hub_url": "HaM/alpaca_en"},
        cloud={"cloud_file_name": "s3://x"},
        subset={"hf_hub_url": 1, "subset": ["en"]},
    )
    names = ["identiti", "kto", "sounds", "typo", "kinds", "none", "number", "script", "openmind", "cloud", "subset"]
    message, code = refused(names, folder)
    assert code == ExitCode.SETTINGS
    download = "    fix: download the rows, and write file_name instead"
    assert message.splitlines() == [
        "dataset: 'identiti' is neither in dataset_info.json nor a path",
        "    fix: did you mean identity?",
        "dataset_info.json: kto: its rows are desirable and undesirable answers, "
        "and stage sft would train on all of them",
        "    fix: write stage: kto, or remove kto_tag",
        "dataset_info.json: sounds: columns.audios: training on audio is not supported",
        "dataset_info.json: typo: formating: unknown key",
        "    fix: did you mean formatting?",
        "dataset_info.json: typo.columns: promt: unknown key",
        "    fix: did you mean prompt?",
        "dataset_info.json: typo: tags.role_tag: expected a string, got a number",
        "dataset_info.json: kinds: ranking: expected true or false, got a string",
        "dataset_info.json: kinds: num_samples: expected a positive whole number, got 0",
        "dataset_info.json: kinds: formatting: ['x'] is unknown",
        "    fix: one of alpaca, sharegpt, openai, query_response, text",
        "dataset_info.json: kinds: columns: expected an object, got a list",
        "dataset_info.json: none: file_name is missing",
        "    fix: add file_name, a file or folder of this data set, or hf_hub_url or ms_hub_url, its id on a hub",
        "dataset_info.json: number: expected an object, got a number",
        "dataset_info.json: script: script_url: a data set's script is code, which is never run",
        download,
        "dataset_info.json: openmind: om_hub_url: reading from the Openmind hub is not supported",
        download,
        "dataset_info.json: cloud: cloud_file_name: reading from cloud storage is not supported",
        download,
        "dataset_info.json: subset: hf_hub_url: expected a string, got a number",
        "dataset_info.json: subset: subset: expected a string, got a list",
    ]


@pytest.mark.parametrize("name", ["alpaca", "rows.jsonl", "x/y.json"])
def test_users_of_ms_swift_are_told_of_no_dataset_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Unless they wrote one."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MegatuneError) as caught:
        resolve_datasets([name], "data", "sft", swift_version=4)
    assert str(caught.value) == (
        f"dataset: no such file or folder: {name}\n"
        "    fix: name a file or a folder, relative to the working directory, or a data set on a hub: OWNER/NAME"
    )
    with pytest.raises(MegatuneError, match="dataset_dir"):
        resolve_datasets([name], "rows", "sft", swift_version=4)


def test_missing_files_are_another_exit_code(tmp_path: Path) -> None:
    folder = info(tmp_path, gone={"file_name": "gone.json"})
    assert refused("gone", folder) == (
        "dataset_info.json: gone: no such file or folder: gone.json\n"
        "    fix: correct its path, which is relative to the folder of dataset_info.json",
        ExitCode.INPUT,
    )
    for name in ("x/y.json", "./x/y", "x/y/z"):
        fix = "correct the path, which is relative to the working directory or to dataset_dir"
        assert refused(name, folder) == (f"dataset: no such file or folder: {name}\n    fix: {fix}", ExitCode.INPUT)
    write(tmp_path / "dataset_info.json", "{")
    message, code = refused("a", tmp_path)
    assert message.startswith("dataset_info.json:1: not valid JSON: expected property name")
    assert code == ExitCode.INPUT
    write(tmp_path / "dataset_info.json", "[" * 100_000)
    message, code = refused("a", tmp_path)
    assert message.startswith("dataset_info.json: cannot be read")
    assert code == ExitCode.INPUT


def test_a_dataset_dir_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MegatuneError, match=r"dataset_dir: folder .*dataa not found") as caught:
        resolve_datasets(["identity"], tmp_path / "dataa", "sft")
    assert caught.value.exit_code == ExitCode.INPUT
