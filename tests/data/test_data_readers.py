"""Files of rows: what is read, and how reading goes on from a position."""

from __future__ import annotations

import json
import os
import tracemalloc
from itertools import product
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from readers_kit import COMPRESS, parts, rows_of, write, write_arrow

from megatune.data import readers
from megatune.data.readers import DATA_SUFFIXES, Position, data_suffix, read_rows
from megatune.errors import MegatuneError

ROWS = [{"instruction": "Hi", "output": "Hello\nyou"}, {"instruction": "你好", "output": 'say "hi", 你好 🙂'}]
TABLE = pyarrow.Table.from_pylist([{"n": n, "text": f"row {n}"} for n in range(25)])


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_json_array(tmp_path: Path, name: str) -> None:
    for indent in (None, 1):
        path = write(tmp_path / name, json.dumps(ROWS, indent=indent, ensure_ascii=False))
        assert rows_of(path) == [(f"{name}:row 1", ROWS[0]), (f"{name}:row 2", ROWS[1])]
    assert rows_of(write(tmp_path / name, "\ufeff[]")) == []


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.ndjson", "A.JSONL"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_json_lines(tmp_path: Path, name: str, newline: str, mark: str) -> None:
    lines = [json.dumps(ROWS[0]), "", " " + json.dumps(ROWS[1], ensure_ascii=False) + "\t", " \t", '{"a": NaN}']
    rows = rows_of(write(tmp_path / name, mark + newline.join(lines)))
    assert rows[:2] == [(f"{name}:1", ROWS[0]), (f"{name}:3", ROWS[1])]
    ((where, fields),) = rows[2:]
    assert where == f"{name}:5"
    assert fields["a"] != fields["a"]


def test_separated_values(tmp_path: Path) -> None:
    text = '\ufeffinstruction,output\r\nHi,"Hello\nyou"\r\n\r\n你好,"say ""hi"", 你好 🙂"\r\n'
    assert rows_of(write(tmp_path / "a.csv", text)) == [("a.csv:2", ROWS[0]), ("a.csv:5", ROWS[1])]
    text = 'instruction\toutput\nHi\t"Hello\nyou"\n你好\t"say ""hi"", 你好 🙂"'
    assert rows_of(write(tmp_path / "a.tsv", text)) == [("a.tsv:2", ROWS[0]), ("a.tsv:4", ROWS[1])]
    assert rows_of(write(tmp_path / "b.csv", "x,y\r1,2\r3,4")) == [
        ("b.csv:2", {"x": "1", "y": "2"}),
        ("b.csv:3", {"x": "3", "y": "4"}),
    ]


def test_parquet(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    assert rows_of(tmp_path / "a.parquet") == [("a.parquet:row 1", ROWS[0]), ("a.parquet:row 2", ROWS[1])]


@pytest.mark.parametrize("stream", [False, True])
def test_arrow(tmp_path: Path, stream: bool) -> None:
    path = write_arrow(tmp_path / "a.arrow", pyarrow.Table.from_pylist(ROWS), 1, stream=stream)
    assert rows_of(path) == [("a.arrow:row 1", ROWS[0]), ("a.arrow:row 2", ROWS[1])]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_columns_of_json_are_decoded(tmp_path: Path, kind: str) -> None:
    json_type = pyarrow.json_()
    item = pyarrow.struct([("role", pyarrow.string()), ("content", json_type)])
    schema = pyarrow.schema([("a", json_type), ("b", pyarrow.list_(item))])
    storage = pyarrow.schema(
        [("a", pyarrow.string()), ("b", pyarrow.list_(pyarrow.struct([("role", "str"), ("content", "str")])))]
    )
    values = [
        {"a": '{"x": [1]}', "b": [{"role": "user", "content": '"hi"'}, None]},
        {"a": None, "b": None},
        {"a": "{", "b": []},
        {"a": '{"x": 1, "x": 2}', "b": []},
    ]
    table = pyarrow.Table.from_pylist(values, storage).cast(schema)
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        write_arrow(path, table, 2, stream=True)
    assert [message for _, message in rows_of(path)] == [
        {"a": {"x": [1]}, "b": [{"role": "user", "content": "hi"}, None]},
        {"a": None, "b": None},
        "invalid JSON (expected property name enclosed in double quotes in 'a')",
        "a key appears twice ('x')",
    ]
    assert [row.raw for row in read_rows(path)][2:] == ["{", '{"x": 1, "x": 2}']


def test_fields_that_other_objects_of_a_column_have_are_left_out(tmp_path: Path) -> None:
    """A call of one tool would otherwise have the arguments of all others, null, and be trained with them."""
    calls = [{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "post", "arguments": {"code": {"zip": 5}}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"calls": calls, "id": None}]), tmp_path / "a.parquet")
    assert rows_of(tmp_path / "a.parquet") == [("a.parquet:row 1", {"calls": calls, "id": None})]


def test_a_data_set_that_was_saved_to_disk(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path)
    name = "data-00000-of-00001.arrow"
    assert rows_of(tmp_path / name) == [(f"{name}:row 1", ROWS[0]), (f"{name}:row 2", ROWS[1])]


def test_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one\r\n\n\u2028two\x0b three\n")
    assert rows_of(path) == [("a.txt:1", {"text": "one"}), ("a.txt:3", {"text": "\u2028two\x0b three"})]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_files(tmp_path: Path, suffix: str) -> None:
    contents = {
        "a.json": json.dumps(ROWS),
        "a.jsonl": "\n".join(map(json.dumps, ROWS)),
        "a.csv": "x,y\n1,2\n",
        "a.tsv": "x\ty\n1\t2\n",
        "a.txt": "one\ntwo\n",
    }
    for name, text in contents.items():
        plain = rows_of(write(tmp_path / name, text))
        path = write(tmp_path / f"{name}{suffix}", COMPRESS[suffix](text.encode()))
        assert rows_of(path) == [(where.replace(name, path.name), fields) for where, fields in plain]
    # Members one after the other, as parallel compressors write them.
    path = write(tmp_path / f"b.txt{suffix}", COMPRESS[suffix](b"one\n") + COMPRESS[suffix](b"two\n"))
    assert [fields["text"] for _, fields in rows_of(path)] == ["one", "two"]


def test_kinds_by_name() -> None:
    assert DATA_SUFFIXES == (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
    names = {"x.jsonl.gz": ".jsonl", "X.JSON": ".json", "a.b.csv.zst": ".csv", "x.md": None, "x.gz": None, "json": None}
    assert {name: data_suffix(Path("some.json") / name) for name in names} == names


@settings(deadline=None, database=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(["[", "]", ",", "1", "-1.5e3", "true", '{"a": 1, "a": 2}', "\n", " ", '"你🙂', "🙂"]),
            st.sampled_from(ROWS).map(json.dumps),
        ),
        max_size=12,
    ),
    st.integers(1, 9),
)
def test_a_json_array_is_the_same_in_any_chunks(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[str], size: int
) -> None:
    path = write(tmp_path_factory.mktemp("array") / "a.json", "[" + ",".join(pieces))

    def outcome() -> object:
        try:
            return parts(read_rows(path))
        except MegatuneError as error:
            return str(error)

    whole = outcome()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatune.data.readers.text.CHUNK_BYTES", size)
        assert outcome() == whole


# Going on from a position.


def files_of_all_kinds(folder: Path) -> list[Path]:
    text = b'\xef\xbb\xbf\n{"a": 1}\r\n\n{"a": \n[1]\n{"a": "\xe9"}\n' + '{"a": "你好"}\n\n{"a": "🙂"}'.encode()
    array = b'[{"a": 1}, 2, {"a": 1, "a": 2},\n{"a": {}}]'
    table = '\ufeffx,y\n\n1,"\n"\n1\n"你",\n'.encode()
    contents = {".jsonl": text, ".txt": text, ".json": array, ".csv": table, ".tsv": table.replace(b",", b"\t")}
    files = [write(folder / f"a{suffix}", content) for suffix, content in contents.items()]
    for (suffix, content), (compression, compress) in product(contents.items(), COMPRESS.items()):
        files.append(write(folder / f"a{suffix}{compression}", compress(content)))
    files.append(write_arrow(folder / "stream.arrow", TABLE, 10, stream=True))
    files.append(write_arrow(folder / "file.arrow", TABLE, 10, stream=False))
    pyarrow.parquet.write_table(TABLE, folder / "a.parquet", row_group_size=10)
    return [*files, folder / "a.parquet"]


def test_large_rows_are_read_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an Arrow file, which is mapped into memory."""
    monkeypatch.setattr(readers, "BATCH_BYTES", 2**20)
    table = pyarrow.table({"a": [os.urandom(100_000) for _ in range(200)]})
    path, tracked = write_arrow(tmp_path / "a.arrow", table, 200, stream=False), 0
    del table
    tracemalloc.start()
    for row in read_rows(path):
        tracked = max(tracked, tracemalloc.get_traced_memory()[0])
        assert row.error is None
    tracemalloc.stop()
    assert tracked < 5 * 2**20


def test_reading_goes_on_after_any_row(tmp_path: Path) -> None:
    files = files_of_all_kinds(tmp_path)
    assert {data_suffix(path) for path in files} == set(DATA_SUFFIXES) - {".ndjson"}
    for path in files:
        rows = parts(read_rows(path))
        assert len(rows) >= 3
        for k, (*_, after) in enumerate(rows):
            assert isinstance(after, Position)
            assert after.row == k + 1
            assert parts(read_rows(path, after=after)) == rows[k + 1 :]


@settings(deadline=None, database=None)
@given(
    st.lists(st.one_of(st.binary(max_size=8), st.sampled_from([b"", b"\r", b'{"a": 1}', b"\xef\xbb\xbf"])), max_size=8)
)
def test_reading_of_lines_goes_on_after_any_row(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    folder = tmp_path_factory.mktemp("lines")
    for name in ("a.jsonl", "a.txt"):
        # A first row keeps hypothesis from files that are empty, or of other kinds by their first bytes.
        path = write(folder / name, b"\n".join([b'{"a": 1}', *lines]))
        rows = parts(read_rows(path))
        for k, (*_, after) in enumerate(rows):
            assert isinstance(after, Position)
            assert parts(read_rows(path, after=after)) == rows[k + 1 :]


def test_what_comes_before_a_position_is_not_read_again(tmp_path: Path) -> None:
    lines = write(tmp_path / "a.jsonl", "".join(f'{{"n": {n}}}\n' for n in range(3)))
    pyarrow.parquet.write_table(TABLE, tmp_path / "a.parquet", row_group_size=10, compression="none")
    arrow = write_arrow(tmp_path / "a.arrow", TABLE, 10, stream=True)
    for path, skipped, damaged in (
        (lines, 2, b'"n": 0'),
        (tmp_path / "a.parquet", 12, b"row 3"),
        (arrow, 12, b"row 3"),
    ):
        rows = list(read_rows(path))
        content = path.read_bytes()
        assert damaged in content
        write(path, content.replace(damaged, b"\xff" * len(damaged), 1))
        assert list(read_rows(path, after=rows[skipped - 1].next)) == rows[skipped:]
        try:
            again = list(read_rows(path))
        except MegatuneError:
            again = []
        assert again != rows
