"""From settings to rows on disk: nothing lost, nothing moved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_kit import qwen_tokenizer

from megatune.config.groups.data import DataSettings
from megatune.config.groups.run import RunSettings
from megatune.config.settings import Settings
from megatune.data.conversation import Conversation, Message
from megatune.data.prepare import Prepared, hold_out, open_prepared, prepare
from megatune.data.report import DataReport
from megatune.data.rows import Document, TokenRows
from megatune.data.samples import rank
from megatune.errors import ExitCode, MegatuneError

TOKENIZER = qwen_tokenizer()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three data sets: good (40 rows), mixed (7 rows, 3 of them usable) and broken (none usable)."""
    monkeypatch.setenv("MEGATUNE_CACHE", str(tmp_path / "cache"))
    good = [{"instruction": f"What is {i}?", "output": f"It is {i}."} for i in range(40)]
    mixed = [
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}',
        '{"messages": "hello"}',
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}',
        '{"messages": [{"role": "user", "content": "q"}]}',
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "b"}]}',
        '{"messages": "hello again"}',
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "c"}]}',
    ]
    info = {
        "good": {"file_name": "good.json"},
        "mixed": {"file_name": "mixed.jsonl", "formatting": "openai"},
        "broken": {"file_name": "broken.jsonl"},
        "some": {"file_name": "good.json", "num_samples": 10},
        "more": {"file_name": "good.json", "num_samples": 100},
        "who": {"file_name": "who.json"},
    }
    (tmp_path / "good.json").write_text(json.dumps(good))
    (tmp_path / "mixed.jsonl").write_text("\n".join(mixed))
    (tmp_path / "broken.jsonl").write_text('{"instruction": "a"}\n{"output": 1\n')
    (tmp_path / "who.json").write_text('[{"instruction": "Who?", "output": "{{name}} of {{author}}"}]')
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    return tmp_path


def settings(folder: Path, *dataset: str, stage: str = "sft", seed: int = 42, **data: Any) -> Settings:
    return Settings(
        run=RunSettings(stage=stage, seed=seed),
        data=DataSettings(dataset=list(dataset), dataset_dir=str(folder), **data),
    )


def prepared(folder: Path, *dataset: str, **options: Any) -> Prepared:
    return prepare(settings(folder, *dataset, **options), TOKENIZER)


def refusal(folder: Path, *dataset: str, **options: Any) -> tuple[ExitCode, str]:
    """How preparing ends, with the folder's name left out; and nothing is left of it."""
    with pytest.raises(MegatuneError) as caught:
        prepared(folder, *dataset, **options)
    assert not [path for path in (folder / "cache" / "rows").glob("*") if path.suffix != ".lock"]
    return caught.value.exit_code, str(caught.value).replace(f"{folder}/", "")


def files(result: Prepared) -> dict[str, bytes]:
    """What was written, by name."""
    paths = [path for path in sorted(result.directory.rglob("*")) if path.is_file()]
    return {str(path.relative_to(result.directory)): path.read_bytes() for path in paths}


def documents(rows: TokenRows | None) -> list[Document]:
    return [document for row in rows for document in row] if rows is not None else []


def texts(rows: TokenRows | None) -> list[str]:
    return [TOKENIZER.decode(document.input_ids) for document in documents(rows)]


def answers(rows: TokenRows | None) -> list[str]:
    """What each document trains."""
    return [TOKENIZER.decode([t for t in labels if t != -100]).strip() for _, labels, _ in documents(rows)]


def test_rows_are_in_the_order_of_the_files(folder: Path) -> None:
    result = prepared(folder, "good", "mixed")
    assert answers(result.train) == [f"It is {i}.<|im_end|>" for i in range(40)] + [f"{x}<|im_end|>" for x in "abc"]
    assert result.evaluation is None


def test_no_row_is_lost_silently(folder: Path) -> None:
    result = prepared(folder, "mixed", "good", val_size=4.0)
    mixed, good = result.report.datasets
    for dataset in (mixed, good):
        assert dataset.read == dataset.trained + dataset.evaluation + dataset.dropped.total()
    assert (mixed.read, good.read) == (7, 40)
    assert len(result.train) == mixed.trained + good.trained
    assert len(texts(result.evaluation)) == mixed.evaluation + good.evaluation == 4
    place = f"{folder}/mixed.jsonl"
    assert mixed.dropped == {
        "field 'messages': expected a list of messages, got a string": 2,
        "invalid JSON": 1,
        "the last message is not the assistant's": 1,
    }
    assert mixed.examples == [
        f"{place}:2: field 'messages': expected a list of messages, got a string",
        f"{place}:3: invalid JSON (expected ',' delimiter at column 86)",
        f"{place}:4: the last message is not the assistant's (message 1 is 'user')",
        f"{place}:6: field 'messages': expected a list of messages, got a string",
    ]


def test_the_report_in_words(folder: Path) -> None:
    result = prepared(folder, "mixed", "good", cutoff_len=69, truncation_strategy="drop", val_size=2.0)
    assert [line.replace(f"{folder}/", "") for line in result.report.lines()] == [
        "data set  rows read  trained  held out  dropped  cut  samples an epoch",
        "mixed             7        2         1        4    0                 2",
        "good             40        9         1       30    0                 9",
        "mixed: dropped 2: field 'messages': expected a list of messages, got a string [messages-not-a-list]",
        "mixed: dropped 1: invalid JSON [invalid-json]",
        "mixed: dropped 1: the last message is not the assistant's [no-answer]",
        "    mixed.jsonl:2: field 'messages': expected a list of messages, got a string",
        "    mixed.jsonl:3: invalid JSON (expected ',' delimiter at column 86)",
        "    mixed.jsonl:4: the last message is not the assistant's (message 1 is 'user')",
        "    mixed.jsonl:6: field 'messages': expected a list of messages, got a string",
        "good: dropped 30: longer than cutoff_len [too-long]",
        "    good.json:row 11: longer than cutoff_len (70 tokens, cutoff_len is 69)",
        "    good.json:row 12: longer than cutoff_len (70 tokens, cutoff_len is 69)",
        "    good.json:row 13: longer than cutoff_len (70 tokens, cutoff_len is 69)",
        "lengths: |      ▁▃¦█| to 70 tokens, p50 70, p90 70, p99 70, mean 69; 30 (69.8%) over cutoff_len 69",
        "train: 11 token rows, 730 tokens, 69 of them trained",
        "evaluation: 2 token rows, 127 tokens, 10 of them trained",
        "warning: cutoff_len 69 leaves out 30 of 47 rows (64%); cutoff_len: 70 keeps 99 % of them whole",
    ]
    assert DataReport.load(result.directory / "report.json") == result.report
    mixed, good, cut = (line.replace(f"{folder}/", "") for line in result.report.warnings())
    assert good == (
        "good: 30 of 40 rows are dropped: "
        "30 x longer than cutoff_len (good.json:row 11, good.json:row 12, good.json:row 13)"
    )
    assert mixed.startswith("mixed: 4 of 7 rows are dropped: 2 x field 'messages': expected a list of messages, got ")
    assert cut == result.report.cut_warning()
    assert result.report.summary() == "11 rows of mixed, good, 2 for evaluation, 34 dropped"


@pytest.mark.parametrize(("cutoff_len", "is_warned"), [(60, True), (69, True), (70, False)])
def test_rows_that_are_cut(cutoff_len: int, is_warned: bool, folder: Path) -> None:
    report = prepared(folder, "good", cutoff_len=cutoff_len).report
    cut = report.datasets[0].truncated
    words = f"cutoff_len {cutoff_len} cuts {cut} of 40 rows ({cut / 40:.0%}); cutoff_len: 70 keeps 99 % of them whole"
    assert report.cut_warning() == (words if is_warned else "")


def test_a_cutoff_in_which_no_answer_has_room(folder: Path) -> None:
    with pytest.raises(MegatuneError, match="cutoff_len: 20 leaves no room for an answer") as refused:
        prepared(folder, "good", cutoff_len=20)
    assert refused.value.exit_code == ExitCode.SETTINGS


def test_packed_rows_hold_the_same_documents(folder: Path) -> None:
    """On both sides, and the same ones held out; the report counts rows and how full they are."""
    plain = prepared(folder, "more", "mixed", val_size=8.0)
    packed = prepared(folder, "more", "mixed", val_size=8.0, packing=True, cutoff_len=400)
    assert (plain.train.is_packed, packed.train.is_packed) == (False, True)
    for side in ("train", "evaluation"):
        rows, before, after = getattr(packed, side), getattr(plain.report, side), getattr(packed.report, side)
        assert sorted(texts(rows)) == sorted(texts(getattr(plain, side)))
        assert (before.documents, before.rows) == (len(getattr(plain, side)),) * 2
        assert (after.documents, after.rows, after.capacity) == (before.documents, len(rows), 400)
        assert (after.tokens, after.trained) == (before.tokens, before.trained)
        assert all(rows.document_lengths([row]).sum() <= 400 for row in range(len(rows)))
    report = packed.report.train
    assert report.rows < report.documents / 3
    assert report.packing_efficiency == report.tokens / (report.rows * 400) > 0.8
    assert list(packed.report.lines())[-2] == (
        f"train: {report.samples} samples packed into {report.rows} rows of up to 400 tokens, "
        f"{report.packing_efficiency:.1%} full; {report.tokens} tokens, {report.trained} of them trained"
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "broken",
            None,
            "broken: 0 usable of 2 rows\n"
            "    why: 1 x field 'output' is missing; 1 x invalid JSON; "
            "the first: broken.jsonl:1: field 'output' is missing (the row has 'instruction')\n"
            "    fix: correct the rows, or remove the data set",
        ),
        ("empty.jsonl", "", "empty.jsonl: the file is empty\n    fix: write rows into it, or remove it from the data"),
        (
            "blank.jsonl",
            "\n  \n\n",
            "blank.jsonl: there are no rows\n    fix: write rows into its files, or remove it from the data",
        ),
        (
            "invalid.jsonl",
            '{"instruction": "a"\n' * 5,
            "invalid.jsonl: 0 usable of 5 rows\n    why: 5 x invalid JSON; "
            "the first: invalid.jsonl:1: invalid JSON (expected ',' delimiter at column 20)\n"
            "    fix: correct the rows, or remove the data set",
        ),
    ],
)
def test_nothing_usable_is_an_error_with_reasons(folder: Path, name: str, content: str | None, message: str) -> None:
    if content is not None:
        (folder / name).write_text(content)
    assert refusal(folder, "good", name) == (ExitCode.DATA, message)


def test_evaluation_rows_depend_on_the_seed_and_the_rows_alone(folder: Path) -> None:
    first = prepared(folder, "good", val_size=5.0)
    assert len(first.evaluation or ()) == 5
    assert sorted(texts(first.train) + texts(first.evaluation)) == sorted(texts(prepared(folder, "good").train))
    # Another budget, another share of the loss, more rows held out: the same rows, and the same first.
    longer = prepared(folder, "good", val_size=0.25, train_on_prompt=True, cutoff_len=999)
    assert len(longer.evaluation or ()) == 10
    assert set(texts(first.evaluation)) < set(texts(longer.evaluation))
    assert texts(prepared(folder, "good", val_size=5.0, seed=1).evaluation) != texts(first.evaluation)


@pytest.mark.parametrize(
    ("rows", "val_size", "fix"),
    [(None, 40.0, "write val_size: 39, or less"), (1, 0.2, "add rows, or remove val_size and eval_strategy")],
)
def test_holding_out_everything_is_refused(folder: Path, rows: int | None, val_size: float, fix: str) -> None:
    with pytest.raises(MegatuneError, match=f"val_size: {val_size:g} leaves nothing to train on") as caught:
        prepared(folder, "good", val_size=val_size, max_samples=rows)
    assert caught.value.exit_code == ExitCode.SETTINGS
    assert [each.fix for each in caught.value.findings] == [fix]


def test_evaluation_from_a_data_set_of_its_own(folder: Path) -> None:
    result = prepared(folder, "good", eval_dataset=["mixed"])
    assert answers(result.evaluation) == [f"{x}<|im_end|>" for x in "abc"]
    assert (len(result.train), result.report.datasets[1].evaluation) == (40, 3)


def test_max_samples_takes_the_first(folder: Path) -> None:
    assert answers(prepared(folder, "good", "mixed", max_samples=2).train) == [
        "It is 0.<|im_end|>",
        "It is 1.<|im_end|>",
        "a<|im_end|>",
    ]


def test_num_samples_draws(folder: Path) -> None:
    every = answers(prepared(folder, "good").train)
    some = answers(prepared(folder, "some").train)
    assert len(set(some)) == 10
    assert set(some) < set(every)
    assert some != every[:10]
    more = answers(prepared(folder, "more").train)
    assert len(more) == 100
    assert sorted({more.count(answer) for answer in every}) == [2, 3]


def test_the_first_rows_are_taken_where_drawing_is_off(folder: Path) -> None:
    assert answers(prepared(folder, "good#3", dataset_shuffle=False).train) == [
        f"It is {i}.<|im_end|>" for i in (0, 1, 2)
    ]
    more = answers(prepared(folder, "more", dataset_shuffle=False).train)
    assert [more.count(f"It is {i}.<|im_end|>") for i in range(40)] == [3] * 20 + [2] * 20


def test_a_name_in_two_languages(folder: Path) -> None:
    row = {"query": "{{NAME}}?", "response": "{{NAME}} of {{AUTHOR}}"}
    tags = [{"tag": "zh"}, {"tag": "en"}, {}]
    (folder / "self.jsonl").write_text("".join(f"{json.dumps(row | tag)}\n" for tag in tags))
    assert "{{NAME}} is in the data and model_name is not set" in refusal(folder, "self.jsonl", model_author="us")[1]
    read = prepared(folder, "self.jsonl", model_name=["小黄", "Xiao Huang"], model_author="us").train
    assert answers(read) == ["小黄 of us<|im_end|>", *["Xiao Huang of us<|im_end|>"] * 2]
    assert "Xiao Huang?" in texts(read)[1]
    one = prepared(folder, "self.jsonl", model_name=["Mia"], model_author=["魔搭", "ModelScope"]).train
    assert answers(one) == ["Mia of 魔搭<|im_end|>", *["Mia of ModelScope<|im_end|>"] * 2]


def test_repeated_rows_are_never_on_both_sides(folder: Path) -> None:
    result = prepared(folder, "more", val_size=8.0)
    assert not set(answers(result.train)) & set(answers(result.evaluation))
    assert len(answers(result.evaluation)) == 8


def test_placeholders_without_a_value_are_refused(folder: Path) -> None:
    with pytest.raises(MegatuneError) as caught:
        prepared(folder, "who")
    assert str(caught.value).replace(f"{folder}/", "").splitlines() == [
        "who.json:row 1: {{name}} is in the data and model_name is not set",
        "    fix: set model_name",
        "who.json:row 1: {{author}} is in the data and model_author is not set",
        "    fix: set model_author",
    ]
    assert caught.value.exit_code == ExitCode.SETTINGS
    assert answers(prepared(folder, "who", model_name="Mia", model_author="us").train) == ["Mia of us<|im_end|>"]


def test_pictures_refuse_the_data_set_of_a_model_without_vision(folder: Path) -> None:
    (folder / "pictures.json").write_text('[{"instruction": "a", "output": "b", "images": ["1.jpg"]}]')
    with pytest.raises(MegatuneError, match=r"pictures\.json:row 1: .* text only") as caught:
        prepared(folder, "pictures.json")
    assert caught.value.exit_code == ExitCode.SETTINGS


def test_conversations_are_no_text(folder: Path) -> None:
    code, message = refusal(folder, "mixed", stage="pt")
    assert code == ExitCode.SETTINGS
    assert "stage pt trains text" in message


def test_pretraining_cuts_texts_and_keeps_them_whole_in_the_split(folder: Path) -> None:
    (folder / "books.txt").write_text("\n".join(f"Book {i}. " + f"word{i} " * 40 for i in range(6)))
    result = prepared(folder, "books.txt", stage="pt", cutoff_len=32, val_size=2.0)
    books = result.report.datasets[0]
    assert (books.read, books.trained, books.evaluation) == (6, 4, 2)
    assert len(result.train) > 4
    assert result.train.document_lengths(range(len(result.train))).max() == 32
    for i in range(6):
        sides = [any(f"word{i}" in text for text in texts(rows)) for rows in (result.train, result.evaluation)]
        assert sides.count(True) == 1


def test_worker_processes_change_nothing(folder: Path) -> None:
    rows = [{"instruction": f"q{i}", "output": f"a{i}"} if i % 5 else {"instruction": f"q{i}"} for i in range(600)]
    (folder / "many.json").write_text(json.dumps(rows))
    options: dict[str, Any] = {"on_bad_row": "quarantine", "max_bad_rows": 120, "val_size": 0.1, "template": "qwen"}
    alone = files(prepared(folder, "many.json", tokenized_path=str(folder / "alone"), **options))
    both = prepared(folder, "many.json", tokenized_path=str(folder / "both"), preprocessing_num_workers=2, **options)
    assert files(both) == alone
    assert "bad_rows.jsonl" in alone


def test_other_processes_open_what_one_prepared(folder: Path) -> None:
    chosen = settings(folder, "good", val_size=3.0)
    made = prepare(chosen, TOKENIZER)
    opened = open_prepared(made.directory)
    assert texts(opened.train) == texts(made.train)
    assert texts(opened.evaluation) == texts(made.evaluation)
    assert (opened.report, opened.key, opened.directory) == (made.report, made.key, made.directory)
    assert made.directory.name.startswith(f"{made.key}-")
    with pytest.raises(MegatuneError, match="no prepared data"):
        open_prepared(folder / "other")


def test_what_is_prepared_is_not_prepared_again(folder: Path) -> None:
    made = prepared(folder, "good")
    before = (made.directory / "tokens.npy").stat().st_ino
    assert (prepared(folder, "good").directory / "tokens.npy").stat().st_ino == before


def test_tokens_are_on_disk_once(folder: Path) -> None:
    """Also of rows that are trained several times, and of those that are held out."""
    result = prepared(folder, "more", val_size=8.0, mix_strategy="concat", dataset_weights=[2.0])
    every = documents(prepared(folder, "good").train)
    assert len(result.train) == result.report.datasets[0].samples == 160
    assert len(np.load(result.directory / "tokens.npy")) == sum(len(ids) for ids, *_ in every)


def test_mixing_draws_from_what_is_trained(folder: Path) -> None:
    """Each data set in its own order, what is held out left out; the report counts what an epoch trains."""
    options: dict[str, Any] = {"mix_strategy": "interleave_over", "interleave_probs": [0.5, 0.5], "val_size": 2.0}
    result = prepared(folder, "good", "mixed", **options)
    trained, held_out = answers(result.train), answers(result.evaluation)
    assert not set(trained) & set(held_out)
    good, mixed = result.report.datasets
    assert (good.samples, mixed.samples) == (
        sum("It is" in answer for answer in trained),
        sum("It is" not in answer for answer in trained),
    )
    assert mixed.samples > mixed.trained
    assert (good.trained, good.evaluation) == (40 - sum("It is" in answer for answer in held_out), 40 - good.trained)
    weighted = prepared(folder, "good", "mixed", dataset_weights=[0.5, 3])
    assert [report.samples for report in weighted.report.datasets] == [20, 9]
    assert len(weighted.train) == 29


def test_a_data_set_that_is_drawn_from_cannot_be_held_out_whole(folder: Path) -> None:
    (folder / "one.json").write_text('[{"instruction": "a", "output": "b"}]')
    ranks = [rank(Conversation((Message("user", "a"), Message("assistant", "b"))), seed) for seed in range(200)]
    seed = ranks.index(min(ranks))  # of 40 rows and this one, it is the first
    code, message = refusal(folder, "good", "one.json", mix_strategy="interleave_once", val_size=1.0, seed=seed)
    assert code == ExitCode.SETTINGS
    assert message.splitlines()[:2] == [
        "val_size: 1 leaves nothing of one.json to train on",
        "    why: mix_strategy: interleave_once draws from every data set",
    ]


def test_the_split_follows_the_texts(folder: Path) -> None:
    """The same rows are held out with another template or tokenizer, in another order, and beside other data sets."""
    held_out = set(answers(prepared(folder, "good", val_size=5.0).evaluation))
    assert len(held_out) == 5
    rows = json.loads((folder / "good.json").read_text())
    (folder / "backwards.json").write_text(json.dumps(rows[::-1]))
    for options in ({"template": "qwen3_nothink"}, {"cutoff_len": 60}, {"packing": True}):
        assert set(answers(prepared(folder, "good", val_size=5.0, **options).evaluation)) == held_out
    assert set(answers(prepared(folder, "backwards.json", val_size=5.0).evaluation)) == held_out
    beside = set(answers(prepared(folder, "mixed", "good", val_size=6.0).evaluation))
    assert len(beside & held_out) >= 3  # of the 43 rows, at most 3 others are before them


@hypothesis.settings(deadline=None)
@given(st.lists(st.integers(0, 6), min_size=2, max_size=30), st.data())
def test_a_split_is_exact_and_clean(texts: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(texts) - 1))
    ranks = np.array([rank(str(text), 1) for text in texts], dtype=np.uint64)
    split = hold_out(ranks, float(count))
    assert split.held_out.sum() == count
    assert not (split.held_out & split.left_out).any()
    sides = [set(np.array(texts)[rows]) for rows in (split.held_out, ~(split.held_out | split.left_out))]
    assert sides[1]
    assert not sides[0] & sides[1] or (split.on_both_sides and len(sides[1]) == 1)
    more = hold_out(ranks, float(min(count + 1, len(texts) - 1)))
    assert (more.held_out | ~split.held_out).all()


def test_copies_of_a_held_out_row_are_not_trained(folder: Path) -> None:
    (folder / "twice.json").write_text(
        json.dumps([{"instruction": f"{i % 4}", "output": f"{i % 4}"} for i in range(8)])
    )
    report = prepared(folder, "twice.json", val_size=3.0).report.datasets[0]
    assert (report.read, report.trained, report.evaluation) == (8, 4, 3)
    assert report.dropped == {"the same texts as a held-out row": 1}
    (folder / "same.json").write_text(json.dumps([{"instruction": "q", "output": "a"}] * 8))
    result = prepared(folder, "same.json", val_size=3.0)
    assert (len(result.train), len(result.evaluation or ())) == (5, 3)
    assert result.report.notes == ["all rows have the same texts: 5 are trained on, the others are held out"]


def test_a_data_set_that_is_named_twice_is_trained_twice(folder: Path) -> None:
    once = answers(prepared(folder, "good").train)
    assert sorted(answers(prepared(folder, "good", "good").train)) == sorted(2 * once)


def test_a_note_says_what_ends_an_answer(folder: Path) -> None:
    other = qwen_tokenizer()
    other.eos_token = "<|endoftext|>"
    notes = prepare(settings(folder, "good", template="qwen"), other).report.notes
    assert len(notes) == 1
    assert notes[0].startswith("answers end with <|im_end|>")
    assert prepared(folder, "good", template="qwen").report.notes == []


def test_a_note_says_that_pretraining_leaves_answers_out(folder: Path) -> None:
    notes = prepared(folder, "good", stage="pt").report.notes
    assert notes == ["good: stage pt trains on the column 'instruction' only; 'output' is not read"]
    (folder / "books.txt").write_text("A book.")
    assert prepared(folder, "books.txt", stage="pt").report.notes == []


def test_pairs_are_prepared(folder: Path) -> None:
    pairs = [
        {"instruction": "Which?", "chosen": f"{i} it is.", "rejected": "No." if i else "0 it is."} for i in range(4)
    ]
    info = json.loads((folder / "dataset_info.json").read_text())
    info["pairs"] = {
        "file_name": "pairs.json",
        "ranking": True,
        "columns": {"chosen": "chosen", "rejected": "rejected"},
    }
    (folder / "dataset_info.json").write_text(json.dumps(info))
    (folder / "pairs.json").write_text(json.dumps(pairs))
    result = prepared(folder, "pairs", stage="dpo", val_size=1.0)
    assert result.train.arrangement == "pairs"
    assert (len(result.train), len(result.evaluation or ())) == (2, 1)
    assert result.report.datasets[0].dropped.total() == 1
    both = [*result.train, *(result.evaluation or ())]
    said = [tuple(TOKENIZER.decode(labels[labels != -100]) for _, labels, _ in row) for row in both]
    assert sorted(said) == [(f"{i} it is.<|im_end|>\n", "No.<|im_end|>\n") for i in range(1, 4)]


def test_damaged_rows_are_prepared_again(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Damage that changes no size shows when the rows are opened, or when a step reads the tokens."""
    first = prepared(folder, "good", template="qwen")
    whole = files(first)
    for name in ("train/documents.npy", "report.json", "tokens.npy"):
        path = first.directory / name
        content = bytearray(path.read_bytes())
        content[-3] ^= 0x7F
        path.write_bytes(content)
        if name == "tokens.npy":
            with pytest.raises(MegatuneError, match="differs from what was written"):
                list(TokenRows(first.directory / "train"))
        again = prepared(folder, "good", template="qwen")
        assert files(again) == whole
        assert "are damaged and are recreated" in capfd.readouterr().err
