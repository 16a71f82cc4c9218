"""Token rows on disk: what is written is read, by any process, and what is damaged is named."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatune.data import store
from megatune.data.build import RowsBuilder, RowShape
from megatune.data.media import MediaSource
from megatune.data.media.processor import MediaShape
from megatune.data.media_table import DocumentMedia, MediaCounts, packed
from megatune.data.rows import Document, TokenRows
from megatune.errors import ExitCode, MegatuneError

DOCUMENT = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1, max_size=12)


def document(tokens: list[tuple[int, bool]]) -> Document:
    ids = np.array([token for token, _ in tokens], dtype=np.int32)
    return Document(ids, np.where([trained for _, trained in tokens], ids, np.int32(-100)))


def plain(documents: tuple[Document, ...]) -> list[tuple[list[int], list[int]]]:
    return [(ids.tolist(), labels.tolist()) for ids, labels, _ in documents]


def built(folder: Path, samples: list[list[Document]], shape: RowShape, **parts: list[int]) -> dict[str, TokenRows]:
    folder.mkdir()
    with RowsBuilder(folder, shape) as builder:
        assert [builder.add(sample) for sample in samples] == list(range(len(samples)))
        reports = {name: builder.write_part(name, numbers) for name, numbers in parts.items()}
    rows = {name: TokenRows(folder / name) for name in parts}
    for name, report in reports.items():
        found = [one for row in rows[name] for one in row]
        assert (report.samples, report.documents, report.rows) == (len(parts[name]), len(found), len(rows[name]))
        assert report.tokens == sum(len(ids) for ids, *_ in found)
        assert report.longest == max((len(ids) for ids, *_ in found), default=0)
        assert report.largest_id == max((int(ids.max()) for ids, *_ in found), default=0)
        assert report.trained == sum(int((labels[1:] != -100).sum()) for _, labels, _ in found), (
            "first tokens are never predicted"
        )
    return rows


@settings(max_examples=30, deadline=None)
@given(st.data(), st.booleans())
def test_parts_hold_their_samples(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, packing: bool) -> None:
    """Every sample as often as it is asked for, in that order unless it is packed; the tokens are there once."""
    samples = [[document(tokens)] for tokens in data.draw(st.lists(DOCUMENT, min_size=1, max_size=8))]
    numbers = st.lists(st.integers(0, len(samples) - 1), max_size=12)
    train, evaluation = data.draw(numbers), data.draw(numbers)
    folder = tmp_path_factory.mktemp("rows") / "made"
    parts = built(folder, samples, RowShape("sft", 12, packing, 1), train=train, evaluation=evaluation)
    for name, wanted in (("train", train), ("evaluation", evaluation)):
        rows = pickle.loads(pickle.dumps(parts[name]))
        assert rows.is_packed == packing
        found = [one for row in rows for one in plain(row)]
        expected = [plain(tuple(samples[number]))[0] for number in wanted]
        assert (sorted(found) if packing else found) == (sorted(expected) if packing else expected)
        lengths = [[len(ids) for ids, *_ in row] for row in rows]
        assert all(1 <= sum(row) <= 12 for row in lengths)
        assert rows.row_lengths().tolist() == [sum(row) for row in lengths]
        backwards = range(len(rows) - 1, -1, -1)
        assert rows.document_lengths(backwards).tolist() == [size for row in backwards for size in lengths[row]]
    total = sum(len(one.input_ids) for sample in samples for one in sample)
    assert [len(np.load(folder / name)) for name in ("tokens.npy", "trained.npy")] == [total, total]


def test_a_pair_is_a_row(tmp_path: Path) -> None:
    pairs = [[document([(10 * i + k, k > 0) for k in range(3)]), document([(10 * i, True)] * 2)] for i in range(4)]
    rows = built(tmp_path / "made", pairs, RowShape("dpo", 8, False, 0), train=[3, 0, 3], evaluation=[1])
    assert rows["train"].arrangement == "pairs"
    assert not rows["train"].is_packed
    assert [plain(row) for row in rows["train"]] == [plain(tuple(pairs[i])) for i in (3, 0, 3)]
    assert [plain(row) for row in rows["evaluation"]] == [plain(tuple(pairs[1]))]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 30), min_size=1, max_size=12), st.integers(2, 16), st.booleans())
def test_every_token_of_a_text_but_its_first_is_predicted_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], cutoff_len: int, packing: bool
) -> None:
    """In the order of the texts. Without packing, a row belongs to one text; with it, no row could take one more token
    of the text that the next one begins with."""
    starts = np.cumsum([0, *lengths])
    texts = [
        [Document(*[np.arange(start, start + size, dtype=np.int32)] * 2)]
        for start, size in zip(starts, lengths, strict=False)
    ]
    folder = tmp_path_factory.mktemp("texts") / "made"
    rows = built(folder, texts, RowShape("pt", cutoff_len, packing, 0), train=list(range(len(texts))))["train"]
    assert rows.is_packed == packing
    predicted = [token for row in rows for ids, labels, _ in row for token in labels[1:].tolist()]
    assert predicted == [token for ((ids, *_),) in texts for token in ids[1:].tolist()]
    sizes = [[len(ids) for ids, *_ in row] for row in rows]
    assert all(size >= 2 for row in sizes for size in row)
    assert all(sum(row) <= cutoff_len for row in sizes)
    if packing:
        assert all(sum(row) >= cutoff_len - 1 for row in sizes[:-1])
    else:
        assert all(len(row) == 1 for row in sizes)
        assert len(sizes) == sum(-(-(size - 1) // (cutoff_len - 1)) for size in lengths)


def test_many_documents_are_counted_as_few_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are written a million at a time; here five, so that documents lie on both sides of a write."""
    monkeypatch.setattr("megatune.data.build._FLUSH_TOKENS", 5)
    samples = [[document([(i, i % 3 == 0), (i + 1, True)][: 1 + i % 2])] for i in range(20)]
    rows = built(tmp_path / "made", samples, RowShape("sft", 4, False, 0), train=list(range(19, -1, -1)))
    assert [plain(row) for row in rows["train"]] == [plain(tuple(sample)) for sample in samples[::-1]]


def test_tokens_are_digested_once_for_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digested, write = [], store._write_digests

    def counting(path: Path) -> None:
        digested.append(path.name)
        write(path)

    monkeypatch.setattr(store, "_write_digests", counting)
    samples = [[document([(number, True)] * 3)] for number in range(3)]
    parts = built(tmp_path / "made", samples, RowShape("sft", 3, False, 0), train=[0, 1], evaluation=[2])
    assert digested.count("tokens.npy") == 1
    assert [row[0].input_ids[0] for part in parts.values() for row in part] == [0, 1, 2]


def test_rows_are_pickled_by_name_not_by_content(tmp_path: Path) -> None:
    sample = [Document(*[np.arange(10_000, dtype=np.int32)] * 2)]
    rows = built(tmp_path / "made", [sample], RowShape("sft", 10_000, False, 0), train=[0])["train"]
    pickled = pickle.dumps(rows)
    assert len(pickled) < 1000
    assert pickle.loads(pickled)[0][0].input_ids[-1] == 9_999


def test_misuse_is_a_value_error(tmp_path: Path) -> None:
    none = np.empty(0, np.int32)
    with RowsBuilder(tmp_path, RowShape("sft", 2, True, 0)) as builder:
        with pytest.raises(ValueError, match="0 tokens"):
            builder.add([Document(none, none)])
        with pytest.raises(ValueError, match="2 tokens with 1 labels"):
            builder.add([Document(np.ones(2, np.int32), np.ones(1, np.int32))])
        number = builder.add([Document(*[np.ones(3, np.int32)] * 2)])
        with pytest.raises(ValueError, match="documents of 3 to 3 tokens for rows of 2"):
            builder.write_part("train", [number])


def test_a_row_that_is_not_there(tmp_path: Path) -> None:
    rows = built(tmp_path / "made", [[document([(1, True)])]], RowShape("sft", 2, False, 0), train=[0])["train"]
    for row in (-1, 1):
        with pytest.raises(IndexError, match=f"row {row} of 1"):
            rows[row]


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("tokens.npy", None, "No such file"),
        ("tokens.npy", b"\0" * 8, ""),
        ("tokens.npy.xxh3", None, "No such file"),
        ("tokens.npy.xxh3", b"\0" * 7, "multiple"),
        ("train/rows.npy", None, "No such file"),
        ("train/rows.npy", b"garbage", ""),
        ("train/manifest.json", b"{}", "arrangement"),
        ("train/manifest.json", b"heaps", ""),
    ],
)
def test_a_damaged_folder_is_named(tmp_path: Path, name: str, content: bytes | None, why: str) -> None:
    folder = tmp_path / "made"
    built(folder, [[document([(1, True)] * 3)]], RowShape("sft", 3, False, 0), train=[0])
    (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    with pytest.raises(MegatuneError, match="the folder of token rows is incomplete") as caught:
        TokenRows(folder / "train")
    assert caught.value.exit_code == ExitCode.INPUT
    assert why in caught.value.findings[0].why
    assert caught.value.findings[0].fix == "run the command again: it prepares the rows again"


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("train/documents.npy", _npy(np.array([[0, 3], [3, 2**62]])), "differs from what was written"),
        ("train/documents.npy", _npy(np.array([[0, 3], [2, 5]])), "differs from what was written"),
        ("train/documents.npy", _npy(np.array([0.0, 5.0])), "differs from what was written"),
        ("train/documents.npy", _npy(np.array([[0, 3], [3, 5]])).replace(b"(2, 2)", b"(2, 2e99)"), ""),
        ("train/documents.npy", _npy(np.array([[0, 3], [3, 5]])).replace(b"(2, 2), }  ", b"(2, 2**62), }"), ""),
        ("train/rows.npy", _npy(np.array([2, 1, 2])), "differs from what was written"),
        ("tokens.npy.xxh3", b"\0" * 16, "digests of 2 blocks"),
    ],
)
def test_an_index_with_absurd_numbers_is_refused(tmp_path: Path, name: str, content: bytes, why: str) -> None:
    folder = tmp_path / "made"
    samples = [[document([(1, True)] * 3)], [document([(2, True)] * 2)]]
    built(folder, samples, RowShape("sft", 3, False, 0), train=[0, 1])
    (folder / name).write_bytes(content)
    with pytest.raises(MegatuneError, match="the folder of token rows is incomplete") as caught:
        TokenRows(folder / "train")
    assert caught.value.exit_code == ExitCode.INPUT
    assert why in caught.value.findings[0].why


@pytest.mark.parametrize(("name", "byte"), [("tokens.npy", 4 * 70_000 + 129), ("trained.npy", 70_128)])
def test_a_flipped_bit_is_not_trained(tmp_path: Path, name: str, byte: int) -> None:
    """It is found when its row is read; other rows are as they were."""
    samples = [[document([(7, True)] * 1000)] for _ in range(80)]
    rows = built(tmp_path / "made", samples, RowShape("sft", 1000, False, 0), train=range(80))["train"]
    content = bytearray((tmp_path / "made" / name).read_bytes())
    content[byte] ^= 4
    (tmp_path / "made" / name).write_bytes(content)
    rows = TokenRows(rows.directory)
    assert rows[0][0].labels.tolist() == [7] * 1000
    with pytest.raises(MegatuneError, match=f"{name} differs from what was written from byte") as caught:
        rows[70]
    assert caught.value.exit_code == ExitCode.INPUT
    assert "it prepares the rows again" in caught.value.findings[0].fix


@pytest.mark.parametrize("packing", [False, True])
def test_pictures_are_counted_by_row(tmp_path: Path, packing: bool) -> None:
    """Documents of 10 tokens, of which pictures have these; packed, two of them to a row."""

    content = packed(MediaSource("image", data=b"one"), MediaShape((1, 2, 2), None, (), (), (28, 28)))

    def pictured(*sizes: int) -> list[Document]:
        starts = np.cumsum([0, *sizes])[:-1]
        found = tuple(
            DocumentMedia(int(start), size, (1, 2, 2 * size), None, is_video=False, packed=content)
            for start, size in zip(starts, sizes, strict=True)
        )
        return [document([(1, True)] * 10)._replace(media=found)]

    samples = [pictured(4), pictured(), pictured(2, 5)]
    parts = built(tmp_path / "made", samples, RowShape("sft", 20, packing, 1), train=[0, 2], none=[1], again=[0, 1, 0])
    of_row = 11 if packing else 7
    assert parts["train"].count_media() == MediaCounts(images=3, tokens=11, largest=5, of_row=of_row)
    assert parts["none"].count_media() == MediaCounts()
    again = [sum(each.num_tokens for one in row for each in one.media) for row in parts["again"]]
    assert parts["again"].count_media() == MediaCounts(images=2, tokens=8, largest=4, of_row=max(again))
