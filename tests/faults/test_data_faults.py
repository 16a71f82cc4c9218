"""T34 to T40 and T44: rows that are broken, wrong, empty, in another encoding, too long or without labels, and the
order of those that are good; what a user reads of each before the first step."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizer_kit import qwen_tokenizer

from megatune.config.groups.data import DataSettings
from megatune.config.groups.run import RunSettings
from megatune.config.settings import Settings
from megatune.data.batches import Collator
from megatune.data.loader import StepLoader
from megatune.data.order import PreparedSteps
from megatune.data.prepare import Prepared, prepare
from megatune.errors import ExitCode, MegatuneError

Tell = Callable[..., None]
TOKENIZER = qwen_tokenizer()
GOOD = '{"instruction": "q", "output": "a"}'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGATUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def prepared(folder: Path, content: str | bytes, **data: Any) -> Prepared:
    (folder / "data.jsonl").write_bytes(content.encode() if isinstance(content, str) else content)
    options = {"template": "qwen3_nothink", "cutoff_len": 50, "preprocessing_num_workers": 1, **data}
    settings = DataSettings(dataset=["data.jsonl"], dataset_dir=str(folder), **options)
    return prepare(Settings(data=settings, run=RunSettings(seed=1)), TOKENIZER)


def refused(folder: Path, content: str | bytes, **data: Any) -> tuple[list[str], float]:
    """What is said of data that ends a run, a finding an entry, and after how many seconds."""
    began = time.monotonic()
    with pytest.raises(MegatuneError) as caught:
        prepared(folder, content, **data)
    assert caught.value.exit_code == ExitCode.DATA
    return [str(each).replace(f"{folder}/", "") for each in caught.value.findings], time.monotonic() - began


def test_a_broken_row_is_named_or_set_aside(folder: Path, told: Tell) -> None:
    rows = f'{GOOD}\n{GOOD}\n{{"instruction": "q", "output": "a\n{GOOD}\n'
    said, seconds = refused(folder, rows, on_bad_row="error")
    assert said[0].startswith("data.jsonl:3: invalid JSON")
    assert "unterminated string" in said[0]
    result = prepared(folder, rows, on_bad_row="quarantine")
    kept = json.loads((result.directory / "bad_rows.jsonl").read_text())
    assert (kept["code"], kept["raw"]) == ("invalid-json", '{"instruction": "q", "output": "a')
    assert len(result.train) == 3
    told(case="T34", fault="a row of JSON Lines breaks off", got=said[0].replace("\n", " "), seconds=seconds)


def test_messages_that_are_a_string(folder: Path, told: Tell) -> None:
    good = '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}'
    said, seconds = refused(folder, f'{good}\n{{"messages": "hello"}}\n{good}\n', on_bad_row="error")
    assert "data.jsonl:2: field 'messages'" in said[0]
    told(case="T35", fault="one row's messages are a string", got=said[0].replace("\n", " "), seconds=seconds)


def test_each_wrong_conversation_has_its_code(folder: Path, told: Tell) -> None:
    def row(*messages: tuple[str, Any]) -> str:
        return json.dumps({"messages": [{"role": role, "content": content} for role, content in messages]})

    good = row(("user", "q"), ("assistant", "a"))
    wrong = (
        "{}",
        row(("user", "q"), ("assistant", None)),
        row(("user", "q"), ("critic", "a")),
        row(("system", "s"), ("system", "t"), ("user", "q"), ("assistant", "a")),
        row(("user", "q"), ("assistant", "a"), ("user", "q")),
    )
    (report,) = prepared(folder, "\n".join((good, *wrong, good))).report.datasets
    assert (report.read, report.trained, report.dropped.total()) == (7, 2, 5)
    assert len(set(report.codes.values())) == 5, report.codes
    told(
        case="T36",
        fault="a key is missing, content is null, an unknown role, two system turns, the user's turn is last",
        got="each has a code of its own: " + ", ".join(sorted(set(report.codes.values()))),
    )


@pytest.mark.parametrize("content", ["", "\n\n \n", '{"a": 1}\n{"b"\n'], ids=["empty", "blank lines", "all bad"])
def test_nothing_usable(content: str, folder: Path, told: Tell) -> None:
    said, seconds = refused(folder, content)
    assert any(words in said[0] for words in ("the file is empty", "there are no rows", "no known format"))
    if "there are no rows" in said[0]:
        told(case="T37", fault="a data set without one usable row", got=said[0].replace("\n", " "), seconds=seconds)


def test_encodings(folder: Path, told: Tell) -> None:
    """What no JSON Lines file has is named; a mark, other line ends and every plane are as they are."""
    latin = '{"instruction": "q", "output": "café"}'.encode("latin-1")
    rows = b"\n".join((GOOD.encode(), latin, GOOD.encode().replace(b"q", b"\0"), GOOD.encode()))
    result = prepared(folder, rows, on_bad_row="quarantine")
    kept = [json.loads(line) for line in (result.directory / "bad_rows.jsonl").read_text().splitlines()]
    assert (kept[0]["where"].rpartition(":")[2], kept[0]["code"]) == ("2", "not-utf8")
    assert len(kept) == 2
    assert "looks like latin-1" in kept[0]["detail"]
    plain = prepared(folder, f'{GOOD}\n{{"instruction": "😀", "output": "a"}}\n')
    marked = prepared(folder, b"\xef\xbb\xbf" + f'{GOOD}\r\n{{"instruction": "😀", "output": "a"}}\r\n'.encode())
    for number in range(2):
        ((one,), (other,)) = plain.train[number], marked.train[number]
        assert np.array_equal(one.input_ids, other.input_ids)
    got = f"{kept[0]['where'].rpartition('/')[2]}: {kept[0]['reason']} ({kept[0]['detail']})"
    told(case="T38", fault="latin-1, NUL bytes, a byte order mark, CRLF, emoji", got=got)


def test_lengths_are_told_before_the_first_step(folder: Path, told: Tell) -> None:
    long = json.dumps({"instruction": "q", "output": "long " * 60})
    rows = "\n".join((GOOD, GOOD, GOOD, long))
    report = prepared(folder, rows).report
    assert report.datasets[0].truncated == 1
    lines = "\n".join(report.lines())
    assert "25" in lines
    assert "%" in lines
    assert prepared(folder, rows, truncation_strategy="drop").report.datasets[0].trained == 3
    said, _ = refused(folder, rows, truncation_strategy="error")
    assert "data.jsonl:4" in said[0]
    line = next(each for each in report.lines() if "%" in each)
    told(case="T39", fault="a row is longer than cutoff_len", got=line.strip())


def test_rows_that_lose_their_labels(folder: Path, told: Tell) -> None:
    """A prompt that fills cutoff_len leaves nothing to train on; an empty answer never had anything."""
    long = json.dumps({"instruction": "word " * 80, "output": "a"})
    empty = '{"instruction": "q", "output": ""}'
    (report,) = prepared(folder, f"{GOOD}\n{long}\n{empty}\n", truncation_strategy="right").report.datasets
    assert (report.trained, report.dropped.total()) == (1, 2)
    assert {"nothing-left", "empty-message"} == set(report.codes.values())
    said, seconds = refused(folder, f"{long}\n{long}\n", truncation_strategy="right")
    assert "0 usable of 2 rows" in said[0]
    told(case="T40", fault="cutting leaves no label in any row", got=said[0].replace("\n", " "), seconds=seconds)


def test_the_order_of_rows(folder: Path, told: Tell) -> None:
    """The same rows in every step, whoever makes the batches, from any step on, in the second epoch, too; each once."""
    rows = prepared(folder, "".join(f'{{"instruction": "{number}", "output": "a"}}\n' for number in range(23))).train
    steps = PreparedSteps.from_settings(rows, Settings(run=RunSettings(seed=7)), 4)

    def stream(size: int, *, start: int = 0, num_workers: int = 0) -> list[list[list[int]]]:
        """The rows of each step, those of all ranks together."""
        found: dict[int, list[list[int]]] = {}
        for rank in range(size):
            collator = Collator(4 // size, False, sequence_multiple=1, document_multiple=1, pad_token_id=0)
            place = {"data_parallel_rank": rank, "data_parallel_size": size, "num_micro_batches": 1}
            kind = {"same_length": True, "start_step": start, "stop_step": 12, "num_workers": num_workers}
            for step, batches in StepLoader(steps, collator, **place, **kind):
                tokens = [row.tolist() for batch in batches for row in batch.input_ids if row.any()]
                found.setdefault(step, []).extend(tokens)
        return [sorted(found[step]) for step in sorted(found)]

    whole = stream(1)
    assert stream(2) == whole
    assert stream(1, num_workers=2) == whole
    assert stream(2, start=8, num_workers=2) == whole[8:]
    epochs = [[str(row) for step in whole[first : first + 6] for row in step] for first in (0, 6)]
    assert len(set(epochs[0])) == len(epochs[0]) == 23
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    got = "the same rows in each of 12 steps, each once an epoch"
    told(case="T44", fault="0 and 2 workers, 1 and 2 replicas, a resume in the second epoch", got=got)
