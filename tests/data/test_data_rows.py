from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatune.data.rows import RowWriter, TokenRows, atomic_directory, num_trained_tokens
from megatune.errors import MegatuneError

ROWS = st.lists(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(-100, 2**31 - 1)), min_size=1), max_size=8)


@settings(max_examples=25, deadline=None)
@given(ROWS)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, rows: list[list[tuple[int, int]]]) -> None:
    folder = tmp_path_factory.mktemp("rows") / "train"
    with RowWriter(folder) as writer:
        for row in rows:
            writer.append([token for token, _ in row], [label for _, label in row])
    read = TokenRows(folder)
    assert not read.is_packed
    assert [list(zip(ids.tolist(), labels.tolist(), strict=True)) for ((ids, labels),) in read] == rows
    assert read.document_lengths(range(len(rows))).tolist() == [len(row) for row in rows]


@settings(max_examples=25, deadline=None)
@given(ROWS, st.integers(0, 9))
def test_packed_documents_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, written: list[list[tuple[int, int]]], room: int
) -> None:
    """Every document once, whole, in a row of at most the capacity."""
    capacity = max(map(len, written), default=1) + room
    folder = tmp_path_factory.mktemp("rows") / "train"
    with RowWriter(folder, capacity, seed=1) as writer:
        for document in written:
            writer.append([token for token, _ in document], [label for _, label in document])
    read = pickle.loads(pickle.dumps(TokenRows(folder)))
    assert read.is_packed
    assert len(read) == writer.num_rows
    documents = [list(zip(ids.tolist(), labels.tolist(), strict=True)) for row in read for ids, labels in row]
    assert sorted(documents) == sorted(written)
    for number, row in enumerate(read):
        lengths = [len(document.input_ids) for document in row]
        assert 1 <= sum(lengths) <= capacity
        assert read.document_lengths([number]).tolist() == lengths
    backwards = range(len(read) - 1, -1, -1)
    expected = [len(document.input_ids) for number in backwards for document in read[number]]
    assert read.document_lengths(backwards).tolist() == expected


def test_rows_are_pickled_by_name_not_by_content(tmp_path: Path) -> None:
    with RowWriter(tmp_path / "train") as writer:
        writer.append(range(10_000), range(10_000))
    pickled = pickle.dumps(TokenRows(tmp_path / "train"))
    assert len(pickled) < 1000
    assert pickle.loads(pickled)[0][0].input_ids[-1] == 9_999


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 tokens"), RowWriter(tmp_path / "train") as writer:
        writer.append([], [])
    assert list(tmp_path.iterdir()) == []


def test_a_document_that_fits_no_row_leaves_nothing(tmp_path: Path) -> None:
    writer = RowWriter(tmp_path / "train", capacity=2)
    writer.append([1], [1])
    writer.append([1, 2, 3], [1, 2, 3])
    with pytest.raises(ValueError, match="documents of 1 to 3 tokens for rows of 2"):
        writer.close()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_appears_only_when_closed(tmp_path: Path) -> None:
    writer = RowWriter(tmp_path / "train")
    writer.append([1, 2], [-100, 2])
    assert not (tmp_path / "train").exists()
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["train"]


def test_the_first_of_two_writers_wins(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "made") as ours:
        (tmp_path / "made").mkdir()
        (tmp_path / "made" / "theirs").touch()
        (ours / "ours").touch()
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["theirs"]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_damaged_folder_is_named(tmp_path: Path) -> None:
    with RowWriter(tmp_path / "train") as writer:
        writer.append([1, 2, 3], [1, 2, 3])
    tokens = tmp_path / "train" / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:8])
    with pytest.raises(MegatuneError, match=r"2 tokens on disk, 3 in offsets\.npy") as caught:
        TokenRows(tmp_path / "train")
    assert caught.value.exit_code == 66
    with pytest.raises(MegatuneError, match="not whole"):
        TokenRows(tmp_path / "missing")


def test_packed_rows_of_other_documents_are_refused(tmp_path: Path) -> None:
    for name, count in (("train", 3), ("other", 2)):
        with RowWriter(tmp_path / name, capacity=4) as writer:
            for _ in range(count):
                writer.append([1, 2], [1, 2])
    (tmp_path / "other" / "rows.npy").replace(tmp_path / "train" / "rows.npy")
    with pytest.raises(MegatuneError, match=r"3 documents on disk, 2 in rows\.npy"):
        TokenRows(tmp_path / "train")
    (tmp_path / "train" / "documents.npy").unlink()
    with pytest.raises(MegatuneError, match="not whole"):
        TokenRows(tmp_path / "train")


def test_a_file_in_the_way_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MegatuneError, match="cannot write") as caught:
        RowWriter(tmp_path / "file" / "train")
    assert caught.value.exit_code == 73


def test_misuse_is_a_value_error(tmp_path: Path) -> None:
    with RowWriter(tmp_path / "train") as writer:
        with pytest.raises(ValueError, match="2 tokens with 1 labels"):
            writer.append([1, 2], [1])
        with pytest.raises(ValueError, match="0 tokens"):
            writer.append([], [])


def test_the_first_token_is_never_trained() -> None:
    assert num_trained_tokens([5, -100, 7]) == 1
    assert num_trained_tokens([5]) == 0
