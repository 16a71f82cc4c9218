"""The exact words for rows and files that cannot be read, or must not."""

from __future__ import annotations

import gzip
import json
import lzma
import pickle
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from readers_kit import COMPRESS, refusal, rows_of, write, write_arrow

from megatune.data.readers import read_rows
from megatune.errors import ExitCode, MegatuneError

ROWS = [{"instruction": "Hi"}, {"instruction": "Ho"}]

# What is wrong with one row.

LATIN = '{"a": "café"}'.encode("latin-1")

BAD_ROWS = [  # name, the third line of the file, code, message, raw
    ("jsonl", b'{"a": "x', "invalid-json", "invalid JSON (unterminated string at column 7)", '{"a": "x'),
    (
        "jsonl",
        b'{"a": 1, b}\r',
        "invalid-json",
        "invalid JSON (expected property name enclosed in double quotes at column 10)",
        '{"a": 1, b}',
    ),
    ("jsonl", b'{"a": 1 "b"}', "invalid-json", "invalid JSON (expected ',' delimiter at column 9)", '{"a": 1 "b"}'),
    ("jsonl", b'{"a": }', "invalid-json", "invalid JSON (expected value at column 7)", '{"a": }'),
    ("jsonl", b'{"a": "\t"}', "invalid-json", "invalid JSON (invalid control character at column 8)", '{"a": "\t"}'),
    ("jsonl", b'{"a": "\\x"}', "invalid-json", "invalid JSON (invalid \\escape at column 8)", '{"a": "\\x"}'),
    ("jsonl", b'{"a": 1} {}', "invalid-json", "invalid JSON (extra data at column 10)", '{"a": 1} {}'),
    ("jsonl", b"[" * 100_000, "invalid-json", "invalid JSON (nested too deeply)", "[" * 100_000),
    ("jsonl", b"1" * 5000, "invalid-json", "invalid JSON (a number with too many digits)", "1" * 5000),
    (
        "jsonl",
        b"[1]",
        "not-an-object",
        "not a JSON object (expected an object with the row's fields, got a list)",
        "[1]",
    ),
    (
        "jsonl",
        b"null",
        "not-an-object",
        "not a JSON object (expected an object with the row's fields, got null)",
        "null",
    ),
    ("jsonl", b'{"a": 1, "b": 2, "a": 3}', "duplicate-key", "a key appears twice ('a')", '{"a": 1, "b": 2, "a": 3}'),
    ("jsonl", b'{"a": [{"b": 1, "b": 1}]}', "duplicate-key", "a key appears twice ('b')", '{"a": [{"b": 1, "b": 1}]}'),
    ("jsonl", b'{"a": "x\0"}', "nul-bytes", "the row has NUL bytes (the first at column 9)", '{"a": "x\0"}'),
    (
        "jsonl",
        LATIN,
        "not-utf8",
        "not UTF-8 (byte 0xe9 at column 11; the file looks like latin-1: save it as UTF-8)",
        '{"a": "caf\\xe9"}',
    ),
    (
        "jsonl",
        b'{"a": "\x93x\x94"}',
        "not-utf8",
        "not UTF-8 (byte 0x93 at column 8; the file looks like cp1252: save it as UTF-8)",
        '{"a": "\\x93x\\x94"}',
    ),
    (
        "jsonl",
        '{"a": "你"}'.encode() + b"\xf0\x9f\x99",  # an emoji that was cut
        "not-utf8",
        "not UTF-8 (byte 0xf0 at column 11; save the file as UTF-8)",
        '{"a": "你"}\\xf0\\x9f\\x99',
    ),
    (
        "jsonl",
        '{"a": "你好"}'.encode("gbk"),
        "not-utf8",
        "not UTF-8 (byte 0xc4 at column 8; save the file as UTF-8)",
        '{"a": "\\xc4\\xe3\\xba\\xc3"}',
    ),
    ("txt", b"x\0y\0", "nul-bytes", "the row has NUL bytes (the first at column 2)", "x\0y\0"),
    (
        "txt",
        b"caf\xe9",
        "not-utf8",
        "not UTF-8 (byte 0xe9 at column 4; the file looks like latin-1: save it as UTF-8)",
        "caf\\xe9",
    ),
    ("csv", b"1", "wrong-field-count", "wrong number of fields (1 fields, the header has 2)", "1"),
    ("csv", b'1,2,"\n"', "wrong-field-count", "wrong number of fields (3 fields, the header has 2)", '1,2,"\n"'),
    ("csv", b"1,\0", "nul-bytes", "the row has NUL bytes (in 'y')", "1,\0"),
]


@pytest.mark.parametrize(("kind", "line", "code", "message", "raw"), BAD_ROWS)
def test_a_bad_row_has_a_place_and_a_reason(
    tmp_path: Path, kind: str, line: bytes, code: str, message: str, raw: str
) -> None:
    before = {"jsonl": b'{"a": 1}\n\n', "txt": b"one\n\n", "csv": b"x,y\n1,2\n"}[kind]
    after = {"jsonl": b'{"a": 2}\n', "txt": b"two\n", "csv": b"3,4\n"}[kind]
    path = write(tmp_path / f"a.{kind}", before + line + b"\n" + after)
    first, bad, last = read_rows(path)
    assert first.error is None
    assert last.error is None
    assert first.raw == last.raw == ""
    assert bad.error is not None
    assert (bad.where, bad.error.code, str(bad.error), bad.raw) == (f"{path}:3", code, message, raw)
    assert bad.fields == {}
    assert bad.error.reason == message.partition(" (")[0]


@pytest.mark.parametrize(("line", "code"), [(line, code) for kind, line, code, *_ in BAD_ROWS if kind == "jsonl"])
def test_a_bad_first_row_is_not_the_file_s_problem(tmp_path: Path, line: bytes, code: str) -> None:
    bad, good = read_rows(write(tmp_path / "a.jsonl", line + b'\n{"a": 1}'))
    assert bad.error is not None
    assert (bad.error.code, good.fields) == (code, {"a": 1})


def test_bad_rows_of_a_json_array(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", '[{"a": 1}, [2], {"a": 1, "a": 2}, {"a": {"b": 1}}]')
    assert rows_of(path) == [
        ("a.json:row 1", {"a": 1}),
        ("a.json:row 2", "not a JSON object (expected an object with the row's fields, got a list)"),
        ("a.json:row 3", "a key appears twice ('a')"),
        ("a.json:row 4", {"a": {"b": 1}}),
    ]
    assert [row.raw for row in read_rows(path)] == ["", "[2]", '{"a": 1, "a": 2}', ""]


# What is wrong with a file.

OVER_LINES = "one JSON object over several lines is not a row"
LINES_FIX = "one object per line, or an array in a .json file"
EMPTY = "the file is empty\n    fix: write rows into it, or remove it from the data"
JSON_FIX = "\n    fix: correct it there; in a .jsonl file, on_bad_row can skip single rows that cannot be read"
LATIN_FIX = "    why: the file looks like latin-1\n    fix: save the file as UTF-8"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "", f"a.json: {EMPTY}"),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0), f"a.jsonl.gz: {EMPTY}"),
        (
            "a.json",
            '[{"a": 1},\n {"a": 2]',
            "a.json:2: invalid JSON in row 2: expected ',' delimiter at column 9" + JSON_FIX,
        ),
        (
            "a.json",
            '[{"a": 1},\n]',
            "a.json:2: invalid JSON in row 1: a comma before the closing bracket at column 1" + JSON_FIX,
        ),
        (
            "a.json",
            '[{"a": 1}\n{"a": 2}]',
            "a.json:2: invalid JSON in row 1: expected a comma or the closing bracket at column 1" + JSON_FIX,
        ),
        (
            "a.json",
            '[{"a": 1}',
            "a.json:1: invalid JSON in row 1: expected a comma or the closing bracket at column 10" + JSON_FIX,
        ),
        (
            "a.json",
            '[{"a": 1, "a": 2',
            "a.json:1: invalid JSON in row 1: expected ',' delimiter at column 17" + JSON_FIX,
        ),
        (
            "a.json",
            '[{"a": 1}] x',
            "a.json:1: invalid JSON in row 1: text after the closing bracket at column 12" + JSON_FIX,
        ),
        ("a.json", '[1,\n"x', "a.json:2: invalid JSON in row 2: unterminated string at column 1" + JSON_FIX),
        (
            "a.json",
            json.dumps({"version": 1, "rows": ROWS}, indent=1),
            f"a.json:1: {OVER_LINES}\n    fix: {LINES_FIX}",
        ),
        (
            "a.json",
            json.dumps({"data": ROWS}, indent=1),
            f"a.json:1: {OVER_LINES}\n    fix: keep only the list of 'data'",
        ),
        (
            "a.jsonl",
            "\n" + "\n".join(json.dumps(row, indent=1) for row in ROWS),
            f"a.jsonl:2: {OVER_LINES}\n    fix: {LINES_FIX}",
        ),
        (
            "a.json",
            '[{"a": 1},\n\n{"a": "café"}]'.encode("latin-1"),
            f"a.json:3: not UTF-8: byte 0xe9 at column 11\n{LATIN_FIX}",
        ),
        ("a.csv", "x\nü\n".encode("latin-1"), f"a.csv:2: not UTF-8: byte 0xfc at column 1\n{LATIN_FIX}"),
        ("a.txt", "hello".encode("utf-16"), "a.txt: the file is UTF-16\n    fix: save it as UTF-8"),
        ("a.csv", 'x\ny\n"open\n\n', "a.csv:3: invalid CSV: a quoted field is not closed"),
        ("a.csv", 'x,y\n1,"2"3\n', "a.csv:2: invalid CSV: ',' expected after '\"'"),
        ("a.csv", "x,y,x\n", "a.csv:1: the header has 'x' twice\n    fix: give each column a unique name"),
        (
            "a.csv",
            ",x\n0,1\n",
            "a.csv:1: column 1 of the header has no name\n"
            "    fix: name it, or remove the column (pandas: to_csv(index=False))",
        ),
        (
            "a.jsonl",
            gzip.compress(b"{}", mtime=0),
            "a.jsonl: the name says .jsonl, but the content is gzip\n    fix: name it a.jsonl.gz",
        ),
        (
            "a.jsonl.gz",
            "{}",
            "a.jsonl.gz: the name says gzip, but the content is something else\n"
            "    fix: name it a.jsonl if it is not compressed",
        ),
        (
            "a.csv.zst",
            lzma.compress(b"x"),
            "a.csv.zst: the name says zstd, but the content is xz\n    fix: name it a.csv.xz",
        ),
        (
            "a.json",
            b"PAR1\x15\x04",
            "a.json: the name says .json, but the content is parquet\n    fix: name it a.parquet",
        ),
        ("a.parquet", '{"a": 1}', "a.parquet: the name says .parquet, but the content is something else"),
        (
            "a.parquet",
            gzip.compress(b"PAR1", mtime=0),
            "a.parquet: the name says .parquet, but the content is gzip\n    fix: decompress it first",
        ),
        (
            "a.json",
            b"PK\x03\x04....",
            "a.json: the name says .json, but the content is a zip archive\n    fix: unpack it first",
        ),
        (
            "a.parquet",
            "version https://git-lfs.github.com/spec/v1\noid sha256:0",
            "a.parquet: the name says .parquet, but the content is a pointer of Git LFS\n"
            "    fix: fetch the file itself: git lfs pull",
        ),
    ],
)
def test_files_that_cannot_be_read_as_a_whole(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    assert refusal(write(tmp_path / name, content)) == (message, ExitCode.DATA)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_compressed_file_that_breaks_off(tmp_path: Path, suffix: str) -> None:
    whole = COMPRESS[suffix](b"".join(b'{"a": %d}\n' % n for n in range(1000)))
    message, code = refusal(write(tmp_path / f"a.jsonl{suffix}", whole[: len(whole) // 2]))
    assert message.splitlines()[0].endswith("file is damaged or truncated")
    assert message.splitlines()[-1] == "    fix: fetch or compress it again"
    assert code == ExitCode.DATA


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_broken_columnar_file(tmp_path: Path, kind: str) -> None:
    message, code = refusal(write(tmp_path / f"a.{kind}", b"PAR1 and no more" if kind == "parquet" else b"ARROW1\0\0"))
    assert message.startswith(f"a.{kind}: not a complete {kind} file: ")
    assert code == ExitCode.DATA


def test_a_time_beyond_pythons_calendar(tmp_path: Path) -> None:
    table = pyarrow.table({"time": pyarrow.array([10**15], pyarrow.timestamp("s"))})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    message, code = refusal(tmp_path / "a.parquet")
    assert message.startswith("a.parquet: not a complete parquet file: ")
    assert code == ExitCode.DATA


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_two_columns_of_one_name(tmp_path: Path, kind: str) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["x", "x"])
    if kind == "parquet":
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    else:
        write_arrow(tmp_path / "a.arrow", table, 1, stream=True)
    message = f"a.{kind}: two columns are named 'x'\n    fix: give each column a unique name"
    assert refusal(tmp_path / f"a.{kind}") == (message, ExitCode.DATA)


CODE = "    why: loading one may run code that it contains\n    fix: save the rows as .jsonl or .parquet"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *(
            (f"a{s}", f"a{s}: {s} files are not supported\n{CODE}")
            for s in (".pkl", ".pickle", ".pt", ".bin", ".npy", ".npz")
        ),
        ("a.pkl.gz", f"a.pkl.gz: .pkl files are not supported\n{CODE}"),
        (
            "a.py",
            "a.py: scripts are not run\n    why: reading data must not run code\n"
            "    fix: run it yourself to write .jsonl or .parquet",
        ),
        ("a.zip", "a.zip: archives are not supported\n    fix: unpack it first"),
        ("a.tar.gz", "a.tar.gz: archives are not supported\n    fix: unpack it first"),
        (
            "a.gz",
            "a.gz: the name does not state what is compressed\n"
            "    fix: add the type of its content, for example a.jsonl.gz",
        ),
        (
            "a.parquet.gz",
            "a.parquet.gz: a .parquet file that is compressed as a whole is not read\n"
            "    why: .parquet files compress what they hold\n    fix: decompress it",
        ),
        (
            "a.xml",
            "a.xml: not a supported kind of data file\n"
            "    fix: one of .json, .jsonl, .ndjson, .csv, .tsv, .parquet, .arrow, .txt; "
            "all but .parquet and .arrow also with .gz, .bz2, .xz, .zst, .lz4",
        ),
    ],
)
def test_files_that_are_refused_by_name(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(MegatuneError) as caught:
        read_rows(write(tmp_path / name, "x"))  # at once, not when the first row is asked for
    assert (str(caught.value).replace(f"{tmp_path}/", ""), caught.value.exit_code) == (message, ExitCode.INPUT)


def test_missing_files(tmp_path: Path) -> None:
    assert refusal(tmp_path / "a.json") == ("a.json: cannot read: No such file or directory", ExitCode.INPUT)
    (tmp_path / "b.jsonl").mkdir()
    assert refusal(tmp_path / "b.jsonl") == ("b.jsonl: cannot read: Is a directory", ExitCode.INPUT)


class _Marks:
    """Pickles to a call that leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_extension_types_are_not_unpickled(tmp_path: Path, kind: str) -> None:
    attack = pickle.dumps(_Marks(tmp_path / "ran"))
    metadata = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": attack}
    schema = pyarrow.schema([pyarrow.field("x", pyarrow.int64(), metadata=metadata)])
    table = pyarrow.Table.from_arrays([pyarrow.array([7])], schema=schema)
    if kind == "parquet":
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    else:
        write_arrow(tmp_path / "a.arrow", table, 1, stream=False)
    assert rows_of(tmp_path / f"a.{kind}") == [(f"a.{kind}:row 1", {"x": 7})]
    assert not (tmp_path / "ran").exists()
