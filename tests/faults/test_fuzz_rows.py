"""Rows of every form with anything in any field, in every kind of file: what is wrong is named with its place, and the
good rows beside it become the same tokens as without it."""

from __future__ import annotations

import copy
import csv
import io
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet
import pytest
from fuzzing import JSON, TEXTS, fuzz
from hypothesis import strategies as st
from pictures_kit import Model, make_model
from pictures_kit import draw as draw_picture

from megatune.config.settings import Settings
from megatune.data.bad_rows import RowError
from megatune.data.check import Checked, check_data
from megatune.data.encode import Encoded
from megatune.data.pipeline import DatasetReader, DatasetState, Pipeline
from megatune.data.report import DatasetReport
from megatune.errors import MegatuneError

_ROLES = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
_TOOLS = '[{"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "int"}}}}]'
_ASKED = '{"name": "f", "arguments": {}}'
_CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


class _Form(NamedTuple):
    """A stage, an entry of dataset_info.json, and a good row."""

    stage: str
    entry: dict[str, Any]
    row: dict[str, Any]


def _said(*texts: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


FORMS = {
    "alpaca": _Form(
        "sft",
        {"columns": {"prompt": "instruction", "query": "input", "response": "output", "system": "system",
                     "history": "history"}},
        {"instruction": "Add.", "input": "1 2", "output": "3", "system": "Be brief.", "history": [["a", "b"]]},
    ),
    "sharegpt": _Form(
        "sft",
        {"formatting": "sharegpt", "columns": {"messages": "conversations", "system": "system", "tools": "tools"}},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": _ASKED},
                           {"from": "observation", "value": "7"}, {"from": "gpt", "value": "Hello"}],
         "system": "s", "tools": _TOOLS},
    ),
    "openai": _Form(
        "sft",
        {"formatting": "openai", "columns": {"messages": "messages", "tools": "tools"}},
        {"messages": [{"role": "system", "content": "s"}, *_said("Hi"),
                      {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                      {"role": "tool", "content": "7"},
                      {"role": "assistant", "content": [{"type": "text", "text": "x"}], "loss": 1}], "tools": _TOOLS},
    ),
    "swift": _Form("sft", {"formatting": "query_response"},
                   {"query": "q", "response": "a", "system": "s", "history": [["a", "b"]]}),
    "text": _Form("pt", {"formatting": "text"}, {"text": "It rained all day, and the river rose."}),
    "pairs": _Form("dpo", {"ranking": True, "columns": {"prompt": "instruction", "query": "input", "chosen": "chosen",
                                                        "rejected": "rejected"}},
                   {"instruction": "Add.", "input": "1 2", "chosen": "3", "rejected": "4"}),
    "conversations in pairs": _Form(
        "rm", {"formatting": "openai", "ranking": True, "columns": {"messages": "messages", "chosen": "chosen",
                                                                    "rejected": "rejected", "margin": "margin"}},
        {"messages": _said("Add."), "chosen": _said("Add.", "3"), "rejected": {"role": "assistant", "content": "4"},
         "margin": 1.5}),
    "judged": _Form("kto", {"formatting": "openai", "columns": {"messages": "messages", "kto_tag": "label"}},
                    {"messages": _said("Add.", "3"), "label": True}),
    "pictures": _Form("sft", {"formatting": "openai", "columns": {"messages": "messages", "images": "images",
                                                                  "videos": "videos"}},
                      {"messages": _said("<image>What?", "It."), "images": ["a.png"], "videos": []}),
}  # fmt: skip
KINDS = ("jsonl", "json", "csv", "parquet", "arrow")
_WORDS = st.sampled_from(
    ["messages", "conversations", "role", "content", "from", "value", "user", "assistant", "system", "tool", "human",
     "gpt", "observation", "function_call", "tool_calls", "type", "text", "image", "image_url", "video", "url", "path",
     "bytes", "tools", "loss", "weight", "reasoning_content", "<think>", "</think>", "<image>", "<video>", "a.png",
     "no.png", ".", "data:image/png;base64,iVBORw0KGgo", "objects", "<bbox>", "margin", "label", "chosen", "rejected"]
)  # fmt: skip
_VALUES = _WORDS | JSON | st.sampled_from([_said("x"), _said("x", "y"), [], {}, "{", "[1", "[[1]]", '{"a": NaN}'])


def _places(row: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """List the paths of all values in a row."""
    pairs = row.items() if isinstance(row, dict) else enumerate(row) if isinstance(row, list) else ()
    return [*([above] if above else []), *(place for key, each in pairs for place in _places(each, (*above, key)))]


@st.composite
def _odd_row(draw: st.DrawFn, good: dict[str, Any]) -> Any:
    """Draw a row with some values changed, left out or put elsewhere."""
    if draw(st.integers(0, 19)) == 0:
        return draw(JSON)
    row = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 3))):
        places = _places(row)
        if not places:
            break
        *above, last = draw(st.sampled_from(places))
        inside: Any = row
        for key in above:
            inside = inside[key]
        change = draw(st.integers(0, 5))
        if change == 0:
            del inside[last]
        elif change == 1 and isinstance(inside, dict):
            inside[draw(_WORDS | TEXTS)] = inside.pop(last)
        elif change == 2 and isinstance(inside, list):
            inside.insert(draw(st.integers(0, len(inside))), copy.deepcopy(draw(_VALUES)))
        elif change == 3 and isinstance(inside, dict):
            inside[draw(_WORDS | TEXTS)] = copy.deepcopy(draw(_VALUES))
        else:
            inside[last] = copy.deepcopy(draw(_VALUES))
    return row


@st.composite
def _files(draw: st.DrawFn) -> tuple[str, str, bytes, list[Any]]:
    """Draw a form, a kind of file, its content and its rows: odd ones between two that are good."""
    name, kind = draw(st.sampled_from(sorted(FORMS))), draw(st.sampled_from(["jsonl", *KINDS]))
    good = FORMS[name].row
    rows = [good, *draw(st.lists(_odd_row(good), min_size=1, max_size=8)), good]
    if kind in ("parquet", "arrow"):
        content = _columnar(kind, rows)
        if content is None:
            kind = "jsonl"
    if kind == "csv":
        content = _separated(rows)
    elif kind == "json":
        content = json.dumps(rows).encode()
    elif kind == "jsonl":
        lines = [json.dumps(row, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass") for row in rows]
        lines[1:-1] = [_damaged(draw, line) for line in lines[1:-1]]
        content = draw(st.sampled_from([b"\n", b"\n", b"\r\n"])).join(lines)
    assert content is not None
    if draw(st.integers(0, 19)) == 0:  # the file as a whole
        at = draw(st.integers(0, len(content)))
        content, rows = content[:at] + draw(st.binary(max_size=3)) + content[at + draw(st.integers(0, 9)) :], []
    return name, kind, content, rows


def _damaged(draw: st.DrawFn, line: bytes) -> bytes:
    """Change a line here and there, but let it be one line."""
    if draw(st.integers(0, 7)):
        return line
    at = draw(st.integers(0, len(line)))
    changed = line[:at] + draw(st.binary(max_size=4)).replace(b"\n", b"").replace(b"\r", b"") + line[at + 1 :]
    return changed if changed.strip() else line  # a blank line is no row


def _columnar(kind: str, rows: list[Any]) -> bytes | None:
    """Return a file of rows; None where they are of no common types."""
    sink = io.BytesIO()
    try:
        table = pyarrow.Table.from_pylist([row if isinstance(row, dict) else {"other": row} for row in rows])
        if kind == "parquet":
            pyarrow.parquet.write_table(table, sink)
        else:
            with pyarrow.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
    except (pyarrow.ArrowException, ValueError, TypeError, OverflowError, AttributeError, UnicodeError):
        return None
    return sink.getvalue()


def _separated(rows: list[Any]) -> bytes:
    sink = io.StringIO()
    names = list(dict.fromkeys(name for row in rows if isinstance(row, dict) for name in row)) or ["x"]
    writer = csv.writer(sink)
    writer.writerow(names)
    for row in rows:
        values = [row.get(name) for name in names] if isinstance(row, dict) else [row]
        writer.writerow([value if isinstance(value, str) else json.dumps(value) for value in values])
    return sink.getvalue().encode("utf-8", "surrogatepass")


class _Checked:
    """The pipelines of all forms, and what their good rows become."""

    def __init__(self, folder: Path, model: Model) -> None:
        self.folder, self.model, self.counts = folder, model, Counter[str]()
        draw_picture(folder / "a.png")
        info = {
            f"{number}-{kind}": {"file_name": f"{number}.{kind}", **form.entry}
            for number, form in enumerate(FORMS.values())
            for kind in KINDS
        }
        (folder / "dataset_info.json").write_text(json.dumps(info))
        self.good = {}
        for name in FORMS:
            self._write(name, "jsonl", json.dumps(FORMS[name].row).encode())
            (sample,) = self.pipeline(name, "jsonl").read(self.pipeline(name, "jsonl").training[0])
            assert isinstance(sample[1], Encoded), (name, sample[1])
            self.good[name] = _tokens(sample[1])

    def _write(self, name: str, kind: str, content: bytes) -> None:
        (self.folder / f"{[*FORMS].index(name)}.{kind}").write_bytes(content)

    def settings(self, name: str, kind: str) -> Settings:
        dataset = [f"{[*FORMS].index(name)}-{kind}"]
        return self.model.settings(self.folder, dataset, stage=FORMS[name].stage, cutoff_len=400)

    def pipeline(self, name: str, kind: str) -> Pipeline:
        settings = self.settings(name, kind)
        vision = self.model.vision(settings) if name == "pictures" else None
        return Pipeline.of(settings, self.model.tokenizer, vision)

    def __call__(self, file: tuple[str, str, bytes, list[Any]]) -> None:
        name, kind, content, rows = file
        self._write(name, kind, content)
        self.counts["rows"] += len(rows)
        settings = self.settings(name, kind)
        checked = Checked()
        check_data(settings, checked, tokenizer=None)
        for each in checked.errors:
            _told(each)
        try:
            pipeline = self.pipeline(name, kind)
            found = list(pipeline.read(pipeline.training[0]))
        except MegatuneError as error:
            self.counts["files refused"] += 1
            _told(error)
            return
        bad = [(sample, error) for sample, error in found if isinstance(error, RowError)]
        self.counts["rows refused"] += len(bad)
        with pipeline.bad_rows(self.folder, "quarantine") as kept:
            for sample, error in bad:
                assert sample.row.where.startswith(f"{self.folder}"), sample.row.where
                assert error.reason
                assert len(f"{error}") < 5000
                kept.add(sample, error)
        self._keeps(name, kind, rows, found)
        report = DatasetReport("x")
        reader = DatasetReader(report, lambda *_: pipeline.read(pipeline.training[0]), DatasetState())
        while reader.take() is not None:
            pass
        assert report.read == len(found)
        assert report.dropped.total() == len(bad)

    def _keeps(self, name: str, kind: str, rows: list[Any], found: list[Any]) -> None:
        """Good rows are those that they are alone; a file of columns gives them nulls, and CSV has texts alone."""
        if not rows:
            return
        assert len(found) == len(rows)
        if kind == "csv" or (kind != "json" and kind != "jsonl"):
            return
        for sample, encoded in (found[0], found[-1]):
            assert isinstance(encoded, Encoded), f"{sample.row.where}: {encoded}"
            assert _tokens(encoded) == self.good[name], sample.row.where


def _tokens(encoded: Encoded) -> list[Any]:
    assert math.isfinite(encoded.margin)
    return [(list(each.input_ids), list(each.labels)) for each in encoded.documents]


def _told(error: MegatuneError) -> None:
    assert error.exit_code in (64, 65, 66), error.exit_code
    for finding in error.findings:
        assert finding.where or finding.fix, finding
        assert len(f"{finding}") < 20_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp("models"), "qwen3_vl")


@pytest.mark.extended(3_000)
@pytest.mark.parametrize("examples", [60, 3_000])
def test_rows(examples: int, model: Model, tmp_path: Path) -> None:
    """3,000 files are more than 10,000 rows."""
    checked = _Checked(tmp_path, model)
    fuzz(_files(), checked, examples)
    print(f"{examples} files: {dict(checked.counts)}")
    assert checked.counts["rows refused"] > examples // 5
    assert checked.counts["rows"] > 3 * examples
