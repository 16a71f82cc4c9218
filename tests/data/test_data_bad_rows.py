"""on_bad_row and truncation_strategy: rows that are left out, kept aside or refused, each with its place and reason."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizer_kit import qwen_tokenizer

from megatune.config.groups.data import DataSettings
from megatune.config.settings import Settings
from megatune.data.bad_rows import BadRows, RowError
from megatune.data.prepare import Prepared, prepare
from megatune.data.readers import Position, RawRow
from megatune.data.samples import Sample
from megatune.errors import ExitCode, MegatuneError
from megatune.training.loaders import Quarantine

TOKENIZER = qwen_tokenizer()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set of six rows: two that are fine, one that is long, three that are bad."""
    monkeypatch.setenv("MEGATUNE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data.jsonl").write_text(
        '{"instruction": "q", "output": "a"}\n'
        '{"instruction": "q"\n'
        '{"instruction": "q", "output": "caf\\u00e9 \\ud800"}\n'
        f'{{"instruction": "q", "output": "{"long " * 40}"}}\n'
        '{"instruction": "今天", "output": 7}\n'
        '{"instruction": "q", "output": "b"}\n'
    )
    return tmp_path


def prepared(folder: Path, dataset: str = "data.jsonl", **data: Any) -> Prepared:
    options = {"template": "qwen3_nothink", "cutoff_len": 50, **data}
    return prepare(Settings(data=DataSettings(dataset=[dataset], dataset_dir=str(folder), **options)), TOKENIZER)


def refusal(folder: Path, dataset: str = "data.jsonl", **data: Any) -> str:
    """What is said of rows that are refused, with the folder's name left out."""
    with pytest.raises(MegatuneError) as caught:
        prepared(folder, dataset, **data)
    assert caught.value.exit_code == ExitCode.DATA
    return str(caught.value).replace(f"{folder}/", "")


def test_skipped_rows_are_counted_by_reason_and_code(folder: Path) -> None:
    result = prepared(folder)
    (report,) = result.report.datasets
    assert (report.read, report.trained, report.truncated, report.dropped.total()) == (6, 3, 1, 3)
    assert {report.codes[reason]: count for reason, count in report.dropped.items()} == {
        "invalid-json": 1,
        "lone-surrogate": 1,
        "wrong-type": 1,
    }


def test_quarantined_rows_are_kept_with_their_reasons(folder: Path) -> None:
    """Those that are too long, too; and again when the rows are found in the cache."""
    options: dict[str, Any] = {"on_bad_row": "quarantine", "truncation_strategy": "drop"}
    assert len(prepared(folder, **options).train) == 2
    output_dir = folder / "out"
    output_dir.mkdir()
    assert Quarantine(output_dir, keep=False).copy(prepared(folder, **options).directory)
    text = (output_dir / "bad_rows.jsonl").read_text(encoding="utf-8").replace(f"{folder}/", "")
    assert "café \\ud800" in text
    assert "今天" in text
    kept = [json.loads(line) for line in text.splitlines()]
    assert kept[0] == {
        "where": "data.jsonl:2",
        "code": "invalid-json",
        "reason": "invalid JSON",
        "detail": "expected ',' delimiter at column 20",
        "raw": '{"instruction": "q"',
    }
    assert [(row["where"], row["code"], row["row"]["instruction"]) for row in kept[1:]] == [
        ("data.jsonl:3", "lone-surrogate", "q"),
        ("data.jsonl:4", "too-long", "q"),
        ("data.jsonl:5", "wrong-type", "今天"),
    ]


def test_pictures_inside_quarantined_rows_are_kept_as_digests(tmp_path: Path) -> None:
    """As text, 1 MB of bytes is 3.5 MB; the row's place says where they are."""
    content = bytes(range(256)) * 4096
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    fields = {"images": [{"bytes": content, "path": None}], "messages": [{"content": [{"image_url": {"url": url}}]}]}
    row = RawRow("rows.parquet:row 7", fields, next=Position(7))
    with BadRows("quarantine", "drop", tmp_path) as bad_rows:
        bad_rows.add(Sample(row), RowError("picture-count", "too few tags"))
    (line,) = (tmp_path / "bad_rows.jsonl").read_text().splitlines()
    assert len(line) < 1000
    kept = json.loads(line)
    assert kept["where"] == "rows.parquet:row 7"
    digest = f"<{len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()}>"
    assert kept["row"]["images"] == [{"bytes": digest, "path": None}]
    assert kept["row"]["messages"][0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,<")


def test_a_quarantined_row_may_be_nested_deeper_than_python_calls(tmp_path: Path) -> None:
    text: list[Any] = []
    for _ in range(100_000):
        text = [text]
    row = RawRow("rows.jsonl:1", {"text": text})
    with BadRows("quarantine", "drop", tmp_path) as bad_rows:
        bad_rows.add(Sample(row), RowError("wrong-type", "a list"))
    assert json.loads((tmp_path / "bad_rows.jsonl").read_text())["row"] == "nested too deep"


def test_a_run_that_asks_for_skipped_rows_finds_them_prepared(folder: Path) -> None:
    """And goes on from the checkpoints of one that skipped them: they have the same key."""
    skipped = prepared(folder)
    quarantined = prepared(folder, on_bad_row="quarantine")
    assert quarantined.directory == skipped.directory
    assert Quarantine(folder, keep=False).copy(quarantined.directory)
    lines = (folder / "bad_rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == skipped.report.datasets[0].dropped.total()


def test_every_bad_row_is_found_before_one_is_refused(folder: Path) -> None:
    assert refusal(folder, on_bad_row="error") == (
        "data.jsonl:2: invalid JSON\n    why: expected ',' delimiter at column 20\n"
        "data.jsonl:3: field 'output': half of a surrogate pair\n    why: character 6\n"
        "data.jsonl:5: field 'output': expected a string, got a number\n"
        "3 of 6 rows cannot be trained on\n"
        "    fix: correct them, or write on_bad_row: quarantine, which leaves them out and copies them to "
        "bad_rows.jsonl in output_dir"
    )


def test_twenty_bad_rows_are_named(folder: Path) -> None:
    (folder / "many.jsonl").write_text('{"instruction": "q", "output": "a"}\n' + "[]\n" * 25)
    lines = refusal(folder, "many.jsonl", on_bad_row="error").splitlines()
    assert [line.partition(": ")[0] for line in lines if line.startswith("many")] == [
        f"many.jsonl:{number}" for number in range(2, 22)
    ]
    assert lines[-2] == "and 5 more: 25 of 26 rows cannot be trained on"


def test_rows_that_are_too_long_can_be_refused(folder: Path) -> None:
    """Whatever is done with bad rows; both are said where both are refused."""
    assert refusal(folder, truncation_strategy="error") == (
        "data.jsonl:4: longer than cutoff_len\n    why: 213 tokens, cutoff_len is 50\n"
        "1 of 6 rows are longer than cutoff_len\n"
        "    fix: raise cutoff_len, or write truncation_strategy: budget to cut them, drop to leave them out"
    )
    both = refusal(folder, truncation_strategy="error", on_bad_row="error").splitlines()
    assert "3 of 6 rows cannot be trained on" in both
    assert "1 of 6 rows are longer than cutoff_len" in both


def test_dropping_long_rows_is_what_the_user_asks_for(folder: Path) -> None:
    """on_bad_row: error does not refuse them; a row of which cutting leaves nothing, it does."""
    row = {"instruction": "long " * 200, "output": "a"}
    lines = [json.dumps(row), '{"instruction": "q", "output": "b"}']
    (folder / "long.jsonl").write_text("\n".join(lines))
    dropped = prepared(folder, "long.jsonl", on_bad_row="error", truncation_strategy="drop").report
    assert dropped.datasets[0].dropped == {"longer than cutoff_len": 1}
    assert dropped.lengths is not None
    assert (dropped.lengths.samples, dropped.lengths.over) == (2, 1)
    cut = prepared(folder, "long.jsonl", truncation_strategy="right").report
    assert cut.datasets[0].dropped == {"nothing left to train on after cutting to cutoff_len": 1}
    assert refusal(folder, "long.jsonl", on_bad_row="error", truncation_strategy="right").splitlines()[0] == (
        "long.jsonl:1: nothing left to train on after cutting to cutoff_len"
    )


@pytest.mark.parametrize(("strategy", "code"), [("right", "nothing-left"), ("drop", "too-long")])
def test_rows_that_all_lose_their_labels(folder: Path, strategy: str, code: str) -> None:
    (folder / "long.jsonl").write_text(f'{{"instruction": "{"long " * 200}", "output": "a"}}\n' * 3)
    message = refusal(folder, "long.jsonl", truncation_strategy=strategy)
    reasons = {
        "nothing-left": "nothing left to train on after cutting to cutoff_len",
        "too-long": "longer than cutoff_len",
    }
    what, why = message.splitlines()[:2]
    assert what == "long.jsonl: 0 usable of 3 rows"
    assert why.startswith(f"    why: 3 x {reasons[code]}; the first: long.jsonl:1: {reasons[code]} (1013 tokens")


def mostly_bad(folder: Path, num_good: int, num_bad: int) -> str:
    lines = ['{"instruction": "q", "output": "a"}'] * num_good + ["[]", '{"instruction": "q"}', "{"] * (num_bad // 3)
    (folder / "mostly.jsonl").write_text("\n".join(lines))
    return "mostly.jsonl"


def test_a_data_set_of_bad_rows_is_refused_by_its_commonest_reasons(folder: Path) -> None:
    """Whether its rows are prepared now or found; a higher bound finds them prepared."""
    name = mostly_bad(folder, 5, 495)
    expected = (
        "mostly.jsonl: 495 of 500 rows cannot be trained on, max_bad_rows is 0.01\n"
        "    why: 165 x not a JSON object (mostly.jsonl:6, mostly.jsonl:9, mostly.jsonl:12); "
        "165 x field 'output' is missing (mostly.jsonl:7, mostly.jsonl:10, mostly.jsonl:13); "
        "165 x invalid JSON (mostly.jsonl:8, mostly.jsonl:11, mostly.jsonl:14)\n"
        "    fix: correct the rows (`megatune data preview` shows them), or raise max_bad_rows; null allows any number"
    )
    assert refusal(folder, name) == expected
    assert refusal(folder, name) == expected
    assert refusal(folder, name, on_bad_row="quarantine") == expected
    (cached,) = {prepared(folder, name, max_bad_rows=most).directory for most in (495, 0.99, None)}
    assert cached.is_dir()
    assert "max_bad_rows is 494" in refusal(folder, name, max_bad_rows=494)


def test_a_share_of_bad_rows_allows_ten(folder: Path) -> None:
    assert prepared(folder, mostly_bad(folder, 5, 9)).report.datasets[0].dropped.total() == 9
    assert "12 of 17 rows" in refusal(folder, mostly_bad(folder, 5, 12))
    assert "9 of 14 rows" in refusal(folder, mostly_bad(folder, 5, 9), max_bad_rows=0)
    assert prepared(folder, mostly_bad(folder, 1_500, 15)).report.datasets[0].trained == 1_500
