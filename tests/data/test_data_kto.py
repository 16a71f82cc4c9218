"""Answers with judgements from rows of every form to micro-batches, and prompts with answers to other prompts."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loader_kit import step_batches
from rich.console import Console
from tokenizer_kit import qwen_tokenizer

from megatune.config.settings import DataSettings, RunSettings, Settings
from megatune.data.bad_rows import RowError
from megatune.data.batches import Collator
from megatune.data.build import RowsBuilder, RowShape
from megatune.data.companions import CompanionRows, Companions
from megatune.data.conversation import Conversation, Message
from megatune.data.formats import AlpacaFormat, MessagesFormat, detect
from megatune.data.formats.columns import Columns, Tags
from megatune.data.media import MediaSource
from megatune.data.media.processor import MediaShape
from megatune.data.media_table import DocumentMedia, packed
from megatune.data.order import PreparedSteps
from megatune.data.prepare import prepare
from megatune.data.preview import read_preview
from megatune.data.preview.show import show_preview
from megatune.data.rows import DESIRABLE, IGNORE_INDEX, Document, TokenRows
from megatune.errors import MegatuneError

TOKENIZER = qwen_tokenizer()
U, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
EXPECTED = (Message("user", "q"), Message("assistant", "a"))
KTO_TAG = Columns(kto_tag="kto_tag")


@pytest.mark.parametrize("tag", [True, False])
@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "q", "input": "", "output": "a", "kto_tag": None},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "label": None},
        {"messages": [U, A], "label": None},  # ms-swift
        {"prompt": "q", "completion": "a", "label": None},  # TRL, text
        {"prompt": [U], "completion": [A], "label": None},  # TRL, messages
        {"prompt": [U], "completion": "a", "label": None},
    ],
)
def test_rows_are_detected(row: dict[str, Any], tag: bool) -> None:
    row = {name: tag if value is None else value for name, value in row.items()}
    form = detect(row)
    assert form is not None
    assert not form.ranking
    assert form.to_example(row, "kto") == Conversation(EXPECTED, desirable=tag)


def test_rows_of_dataset_info() -> None:
    alpaca = {"instruction": "q", "output": "a", "history": [["b", "c"]], "system": "s", "kto_tag": False}
    history = (Message("user", "b"), Message("assistant", "c"))
    assert AlpacaFormat(columns=KTO_TAG).to_example(alpaca, "kto") == Conversation(
        (*history, *EXPECTED), "s", desirable=False
    )
    tags = Tags("role", "content", "user", "assistant")
    sharegpt = MessagesFormat(Columns(messages="messages", kto_tag="good"), tags)
    assert sharegpt.to_example({"messages": [U, A], "good": True}, "kto") == Conversation(EXPECTED, desirable=True)


@pytest.mark.parametrize("stage", ["sft", "kto"])
def test_an_answer_beside_its_prompt_ends_it_in_stage_kto(stage: str) -> None:
    """Messages that have their answer are not continued by another column."""
    row = {"messages": [U, A], "completion": "other", "label": True}
    form = MessagesFormat(Columns(messages="messages", response="completion", kto_tag="label"), Tags("role", "content"))
    form = MessagesFormat(form.columns, Tags("role", "content", "user", "assistant"))
    found = form.to_example(row, stage)
    assert isinstance(found, Conversation)
    assert found.messages == EXPECTED


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"instruction": "q", "output": "a"}, "missing-field: field 'kto_tag' is missing (the row has"),
        *(
            (
                {"instruction": "q", "output": "a", "kto_tag": tag},
                "bad-tag: field 'kto_tag': expected true or false (got ",
            )
            for tag in (None, 1, 0, "true", [True])
        ),
    ],
)
def test_rows_without_a_judgement(row: dict[str, Any], says: str) -> None:
    with pytest.raises(RowError) as caught:
        AlpacaFormat(columns=KTO_TAG).to_example(row, "kto")
    assert f"{caught.value.code}: {caught.value}".startswith(says)


# ---------------------------------------------------------------------------------------------------------------------
# Prepared


def settings_of(folder: Path, rows: list[dict[str, Any]], **data: Any) -> Settings:
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return Settings(
        run=RunSettings(stage=data.pop("stage", "kto")),
        data=DataSettings(
            dataset=["rows.jsonl"], dataset_dir=str(folder), template="qwen3_nothink", on_bad_row="quarantine", **data
        ),
    )


def rows_of(tags: Sequence[object]) -> list[dict[str, Any]]:
    return [
        {"messages": [U, A, {**U, "content": f"question {i}"}, {**A, "content": f"answer {i}"}], "label": tag}
        for i, tag in enumerate(tags)
    ]


@pytest.fixture
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATUNE_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("_cache")
def test_tags_are_kept_beside_the_rows(tmp_path: Path) -> None:
    """Bad rows are named, held-out rows keep theirs, and only last answers are trained."""
    tags = [True, "yes", False, True, True, None, False, True, False]
    prepared = prepare(settings_of(tmp_path, rows_of(tags), val_size=2), TOKENIZER)
    assert prepared.evaluation is not None
    found = {}
    for part in (prepared.train, prepared.evaluation):
        for row, (document,) in enumerate(part):
            trained = TOKENIZER.decode(document.labels[document.labels != IGNORE_INDEX])
            number = int(trained.removeprefix("answer ").split("<")[0])
            found[number] = bool(part.extras([row])[DESIRABLE].values[0])
    assert found == {number: tag for number, tag in enumerate(tags) if isinstance(tag, bool)}
    (report,), train = prepared.report.datasets, prepared.report.train
    assert report.dropped == {"field 'label': expected true or false": 2}
    desirable = sum(found.values()) - int(prepared.evaluation.extras([0, 1])[DESIRABLE].values.sum())
    assert train.answer_counts == f"{desirable} desirable and {5 - desirable} undesirable answers"
    assert not any("desirable" in note for note in prepared.report.notes)
    assert train.answer_counts in "\n".join(prepared.report.lines())


@pytest.mark.usefixtures("_cache")
def test_partners_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When rows are prepared, not in every rank and worker."""
    prepared = prepare(settings_of(tmp_path, rows_of([True, False] * 4), val_size=2), TOKENIZER)
    monkeypatch.delattr(Companions, "find")
    rows = [CompanionRows(prepared.directory / part) for part in ("train", "evaluation")]
    assert [each._companions.partners.tolist() for each in rows] == [[1, 2, 3, 4, 5, 0], [1, 0]]
    assert [len(list(each)) for each in rows] == [6, 2]


@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize("tag", [True, False])
def test_answers_of_one_kind_are_noted(tmp_path: Path, tag: bool) -> None:
    prepared = prepare(settings_of(tmp_path, rows_of([tag] * 3)), TOKENIZER)
    kind = "desirable" if tag else "undesirable"
    assert prepared.report.notes[-1] == f"all answers are {kind}: training needs both kinds"


@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize("evaluation", [False, True])
def test_the_preview_says_the_tag(tmp_path: Path, evaluation: bool) -> None:
    settings = settings_of(tmp_path, rows_of([True, False, True]), val_size=2)
    preview = read_preview(settings, TOKENIZER, wanted=range(1, 3), evaluation=evaluation)
    file = io.StringIO()
    show_preview(preview, TOKENIZER, Console(file=file, width=200))
    titles = [line for line in file.getvalue().splitlines() if line.startswith("── ")]
    assert len(titles) == 2
    assert all(title.endswith(("trained, desirable ──", "trained, undesirable ──")) for title in titles)
    if not evaluation:
        assert [", undesirable" in title for title in titles] == [False, True]
    assert "⟦answer 1<|im_end|>" in file.getvalue() or evaluation


@pytest.mark.parametrize(
    ("rows", "stage", "says"),
    [
        ([{"messages": [U, A]}], "kto", "its rows do not state whether an answer is desirable, which stage kto needs"),
        (
            [{"prompt": "q", "chosen": "a", "rejected": "b", "label": True}],
            "kto",
            "its rows are preference pairs, which stage kto does not train",
        ),
    ],
)
def test_data_of_another_stage_is_refused(tmp_path: Path, rows: list[dict[str, Any]], stage: str, says: str) -> None:
    with pytest.raises(MegatuneError, match=says):
        prepare(settings_of(tmp_path, rows, stage=stage), TOKENIZER)


@pytest.mark.usefixtures("_cache")
def test_a_label_is_no_tag_in_another_stage(tmp_path: Path) -> None:
    prepared = prepare(settings_of(tmp_path, rows_of([1, "x"]), stage="sft"), TOKENIZER)
    assert len(prepared.train) == 2
    assert prepared.report.train.desirable is None


# ---------------------------------------------------------------------------------------------------------------------
# Answers to other prompts

# Prompt, its tokens, and those of the answer; the token of an answer names its row.
ROWS = [("p", 3, 2), ("q", 3, 4), ("q", 3, 1), ("r", 5, 3), ("r", 5, 2), ("r", 5, 6), ("s", 1, 2)]
PARTNERS = [1, 3, 4, 6, 6, 6, 0]


def write(
    folder: Path,
    rows: Sequence[tuple[str, int, int]],
    order: Sequence[int] | None = None,
    *,
    cutoff_len: int = 64,
    packing: bool = False,
) -> Path:
    with RowsBuilder(folder, RowShape("kto", cutoff_len, packing, 0)) as builder:
        for number, (prompt, size, answer) in enumerate(rows):
            ids = np.array([ord(prompt)] * size + [1000 + number] * answer, dtype=np.int32)
            labels = np.where(np.arange(len(ids)) < size, np.int32(IGNORE_INDEX), ids)
            builder.add([Document(ids, labels)], desirable=number % 2 == 0)
        builder.write_part("train", np.arange(len(rows)) if order is None else order)
    return folder / "train"


def partner(document: Document) -> int:
    return int(document.input_ids[-1]) - 1000


def test_a_prompt_gets_the_answer_to_another(tmp_path: Path) -> None:
    rows = CompanionRows(write(tmp_path, ROWS))
    found = [document for (document,) in rows]
    assert [partner(document) for document in found] == PARTNERS
    for (prompt, size, _), document in zip(ROWS, found, strict=True):
        assert document.input_ids[:size].tolist() == [ord(prompt)] * size
        assert document.labels[:size].tolist() == [IGNORE_INDEX] * size
        assert document.labels[size:].tolist() == document.input_ids[size:].tolist()
        assert len(document.labels) == size + ROWS[partner(document)][2]
    lengths = [len(document.input_ids) for document in found]
    assert rows.row_lengths().tolist() == rows.batch_lengths().tolist() == lengths
    assert rows.document_lengths([3, 0]).tolist() == [lengths[3], lengths[0]]


def test_what_is_too_long_is_cut(tmp_path: Path) -> None:
    rows = CompanionRows(write(tmp_path, ROWS, cutoff_len=6))
    assert [len(document.input_ids) for (document,) in rows] == rows.row_lengths().tolist()
    assert rows.row_lengths().max() == 6
    assert [partner(document) for (document,) in rows] == PARTNERS


@pytest.mark.parametrize("cutoff_len", [11, 12, 24])
def test_packed_rows_have_the_same_companions(tmp_path: Path, cutoff_len: int) -> None:
    """In the place of their documents, and with room for them: answers elsewhere may be longer."""
    (tmp_path / "single").mkdir()
    single = write(tmp_path / "single", ROWS, cutoff_len=cutoff_len)
    both = zip(TokenRows(single), CompanionRows(single), strict=True)
    wanted = {mine.input_ids.tobytes(): (other.input_ids.tolist(), other.labels.tolist()) for (mine,), (other,) in both}
    (tmp_path / "packed").mkdir()
    folder = write(tmp_path / "packed", ROWS, cutoff_len=cutoff_len, packing=True)
    own, companions = TokenRows(folder), CompanionRows(folder)
    assert own.is_packed
    assert len(own) == len(companions) < len(ROWS)
    assert max(*own.row_lengths(), *companions.row_lengths()) <= cutoff_len
    lengths = [len(other.input_ids) for row in companions for other in row]
    assert companions.document_lengths(range(len(companions))).tolist() == lengths
    assert [sum(len(other.input_ids) for other in row) for row in companions] == companions.row_lengths().tolist()
    for row, (mine, other) in enumerate(zip(own, companions, strict=True)):
        for each, companion in zip(mine, other, strict=True):
            assert (companion.input_ids.tolist(), companion.labels.tolist()) == wanted.pop(each.input_ids.tobytes())
        tags = [partner(each) % 2 == 0 for each in mine]
        assert (
            own.extras([row])[DESIRABLE].values.tolist() == companions.extras([row])[DESIRABLE].values.tolist() == tags
        )
    assert not wanted


def test_rows_in_another_order_and_twice(tmp_path: Path) -> None:
    """Copies next to each other have one prompt."""
    rows = CompanionRows(write(tmp_path, ROWS, [6, 6, 0, 3, 3, 1]))
    assert [partner(document) for (document,) in rows] == [0, 0, 3, 1, 1, 6]


@pytest.mark.parametrize(("number", "partners"), [(1, [0]), (3, [1, 2, 0])])
def test_one_prompt_alone(tmp_path: Path, number: int, partners: list[int]) -> None:
    rows = CompanionRows(write(tmp_path, [("p", 2, 2)] * number))
    assert [partner(document) for (document,) in rows] == partners


def test_pictures_are_those_of_the_prompt(tmp_path: Path) -> None:
    """And prompts that differ in nothing else are different ones."""
    measured = MediaShape((1, 2, 2), None, (), (), (28, 28))
    one, other = (packed(MediaSource("image", data=name), measured) for name in (b"one", b"other"))
    folder = tmp_path / "rows"
    folder.mkdir()
    with RowsBuilder(folder, RowShape("kto", 64, False, 0)) as builder:
        for number, content in enumerate((one, one, other)):
            ids = np.array([7, 7, 7, 1000 + number], dtype=np.int32)
            picture = DocumentMedia(1, 1, (1, 2, 2), None, False, content)
            builder.add([Document(ids, np.where(ids > 999, ids, np.int32(IGNORE_INDEX)), (picture,))], desirable=True)
        builder.write_part("train", np.arange(3))
    found = [document for (document,) in CompanionRows(folder / "train")]
    assert [partner(document) for document in found] == [2, 2, 0]
    assert [document.media[0].packed for document in found] == [one, one, other]
    assert [document.media[0].start for document in found] == [1, 1, 1]


def test_a_column_and_a_name_of_their_own(tmp_path: Path) -> None:
    folder = write(tmp_path / "", ROWS)
    np.save(tmp_path / "values.npy", np.arange(len(ROWS), dtype=np.float32))
    rows = CompanionRows(folder).with_column("values", tmp_path / "values.npy")
    again = pickle.loads(pickle.dumps(rows))
    assert again.extras([4, 2])["values"].values.tolist() == [4.0, 2.0]
    assert again[3][0].input_ids.tolist() == rows[3][0].input_ids.tolist()
    (tmp_path / "cut").mkdir()
    cut = CompanionRows(write(tmp_path / "cut", ROWS, cutoff_len=6))
    digests = {TokenRows(folder).digest, rows.digest, cut.digest}
    assert len(digests) == 3


@pytest.mark.parametrize("by_length", [False, True])
def test_steps_have_the_same_rows(tmp_path: Path, by_length: bool) -> None:
    """Micro-batch by micro-batch, also where rows are ordered by their lengths, in a loader's process as here."""
    folder = write(tmp_path, ROWS)
    steps = PreparedSteps(TokenRows(folder), 4, seed=3, group_by_length=by_length)
    others: PreparedSteps = pickle.loads(
        pickle.dumps(
            PreparedSteps(CompanionRows(folder), 4, 3, group_by_length=by_length, ordered_by=TokenRows(folder))
        )
    )
    collator = Collator(2, packed=False, sequence_multiple=1, document_multiple=1, pad_token_id=0)
    layout = {"data_parallel_rank": 1, "data_parallel_size": 2, "num_micro_batches": 1, "same_length": False}
    for step in range(4):
        assert steps.row_ids(step).tolist() == others.row_ids(step).tolist()
        mine, other = (step_batches(each, step, collator, **layout)[0] for each in (steps, others))
        prompts = [[row[0] for row in batch.input_ids.tolist()] for batch in (mine, other)]
        assert prompts[0] == prompts[1]
        assert (
            mine.extras[DESIRABLE].on_rank(None, "cpu").tolist()
            == other.extras[DESIRABLE].on_rank(None, "cpu").tolist()
        )
