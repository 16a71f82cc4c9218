"""From settings to rows on disk: nothing lost, nothing moved."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizer_kit import llama3_tokenizer, qwen_tokenizer

from megatune.config.groups.data import DataSettings
from megatune.config.groups.run import RunSettings
from megatune.config.settings import Settings
from megatune.data.prepare import Prepared, open_prepared, prepare, prepared_key
from megatune.data.rows import Document, TokenRows
from megatune.errors import ExitCode, MegatuneError

TOKENIZER = qwen_tokenizer()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three data sets: good (40 rows), mixed (7 rows, 3 of them usable) and broken (none usable)."""
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
    chosen = settings(folder, *dataset, **options)
    return prepare(chosen, TOKENIZER, folder / "out" / prepared_key(chosen, TOKENIZER))


def documents(rows: TokenRows | None) -> list[Document]:
    return [document for row in rows for document in row] if rows is not None else []


def texts(rows: TokenRows | None) -> list[str]:
    return [TOKENIZER.decode(document.input_ids) for document in documents(rows)]


def answers(rows: TokenRows | None) -> list[str]:
    """What each document trains."""
    return [TOKENIZER.decode([t for t in labels if t != -100]).strip() for _, labels in documents(rows)]


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
        f"{place}:3: invalid JSON (Expecting ',' delimiter at column 86)",
        f"{place}:4: the last message is not the assistant's (it is the user's)",
        f"{place}:6: field 'messages': expected a list of messages, got a string",
    ]


def test_the_report_in_words(folder: Path) -> None:
    lines = list(prepared(folder, "mixed").report.lines())
    assert lines[0] == "mixed: 7 rows read, 3 trained, 0 held out, 4 dropped, 0 cut to cutoff_len"
    assert lines[1] == "    dropped 2: field 'messages': expected a list of messages, got a string"
    tokens = sum(prepared(folder, "mixed").train.document_lengths(range(3)))
    assert lines[-1] == f"train: 3 token rows, {tokens} tokens, 9 of them trained"


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
        f"train: {report.documents} samples packed into {report.rows} rows of up to 400 tokens, "
        f"{report.packing_efficiency:.1%} full; {report.tokens} tokens, {report.trained} of them trained"
    )


def test_nothing_usable_is_an_error_with_reasons(folder: Path) -> None:
    with pytest.raises(MegatuneError) as caught:
        prepared(folder, "good", "broken")
    assert str(caught.value).replace(f"{folder}/", "") == (
        "broken: 0 usable of 2 rows\n"
        "    why: 1 x field 'output' is missing; 1 x invalid JSON\n"
        "    mend: the first: broken.jsonl:1: field 'output' is missing (the row has 'instruction')"
    )
    assert caught.value.exit_code == ExitCode.DATA
    assert list((folder / "out").iterdir()) == []


def test_evaluation_rows_depend_on_the_seed_and_the_rows_alone(folder: Path) -> None:
    first = prepared(folder, "good", val_size=5.0)
    assert len(first.evaluation or ()) == 5
    assert sorted(texts(first.train) + texts(first.evaluation)) == sorted(texts(prepared(folder, "good").train))
    # Another budget, another share of the loss, more rows held out: the same rows, and the same first.
    longer = prepared(folder, "good", val_size=0.25, train_on_prompt=True, cutoff_len=999)
    assert len(longer.evaluation or ()) == 10
    assert set(texts(first.evaluation)) < set(texts(longer.evaluation))
    assert texts(prepared(folder, "good", val_size=5.0, seed=1).evaluation) != texts(first.evaluation)


def test_holding_out_everything_is_refused(folder: Path) -> None:
    with pytest.raises(MegatuneError, match="val_size: 40 leaves nothing to train on") as caught:
        prepared(folder, "good", val_size=40.0)
    assert caught.value.exit_code == ExitCode.SETTINGS


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


def test_repeated_rows_are_never_on_both_sides(folder: Path) -> None:
    result = prepared(folder, "more", val_size=8.0)
    assert not set(answers(result.train)) & set(answers(result.evaluation))
    assert len(answers(result.evaluation)) == 8


def test_placeholders_without_a_value_are_refused(folder: Path) -> None:
    with pytest.raises(MegatuneError) as caught:
        prepared(folder, "who")
    assert str(caught.value).replace(f"{folder}/", "").splitlines() == [
        "who.json:row 1: {{name}} is in the data and model_name is not set",
        "    mend: set model_name",
        "who.json:row 1: {{author}} is in the data and model_author is not set",
        "    mend: set model_author",
    ]
    assert caught.value.exit_code == ExitCode.SETTINGS
    assert answers(prepared(folder, "who", model_name="Mia", model_author="us").train) == ["Mia of us<|im_end|>"]


def test_images_refuse_the_data_set(folder: Path) -> None:
    (folder / "pictures.json").write_text('[{"instruction": "a", "output": "b", "images": ["1.jpg"]}]')
    with pytest.raises(MegatuneError, match=r"pictures\.json:row 1: .* training on images is not built") as caught:
        prepared(folder, "pictures.json")
    assert caught.value.exit_code == ExitCode.SETTINGS


def test_settings_that_exclude_each_other(folder: Path) -> None:
    with pytest.raises(MegatuneError) as caught:
        prepared(
            folder, "mixed", stage="pt", val_size=1.0, eval_dataset=["good"], train_on_prompt=True, mask_history=True
        )
    assert [finding.what for finding in caught.value.findings] == [
        "val_size and eval_dataset exclude each other",
        "train_on_prompt and mask_history exclude each other",
        "dataset: mixed has conversations, stage pt trains text",
    ]


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
    alone = prepare(settings(folder, "many.json"), TOKENIZER, folder / "alone")
    both = prepare(settings(folder, "many.json", preprocessing_num_workers=2), TOKENIZER, folder / "both")
    for name in ("tokens.bin", "labels.bin", "offsets.npy"):
        assert (folder / "alone" / "train" / name).read_bytes() == (folder / "both" / "train" / name).read_bytes()
    assert alone.report == both.report


def test_other_processes_open_what_one_prepared(folder: Path) -> None:
    chosen = settings(folder, "good", val_size=3.0)
    made = prepare(chosen, TOKENIZER, folder / "out")
    opened = open_prepared(folder / "out")
    assert texts(opened.train) == texts(made.train)
    assert texts(opened.evaluation) == texts(made.evaluation)
    assert opened.report == made.report
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["evaluation", "report.json", "train"]
    (folder / "good.json").unlink()
    with pytest.raises(MegatuneError, match="no such file or folder"):
        prepare(chosen, TOKENIZER, folder / "other")
    with pytest.raises(MegatuneError, match="no prepared data"):
        open_prepared(folder / "other")


def test_what_is_prepared_is_not_prepared_again(folder: Path) -> None:
    made = prepare(settings(folder, "good"), TOKENIZER, folder / "out")
    (folder / "dataset_info.json").unlink()
    assert texts(prepare(settings(folder, "good"), TOKENIZER, folder / "out").train) == texts(made.train)


def test_the_key_changes_with_all_that_determines_rows(folder: Path) -> None:
    def key(tokenizer: Any = TOKENIZER, **options: Any) -> str:
        return prepared_key(settings(folder, "good", **options), tokenizer)

    keys = [
        key(),
        key(seed=1),
        key(cutoff_len=9),
        key(packing=True),
        key(template="qwen"),
        key(val_size=1.0),
        key(tokenizer=llama3_tokenizer()),
    ]
    keys += [key(eval_dataset=["mixed"]), key(tokenizer=qwen_tokenizer("qwen3"))]
    os.utime(folder / "good.json", ns=(0, 0))
    keys.append(key())
    assert len(set(keys)) == len(keys)
    assert key() == key(preprocessing_num_workers=4) == key(dataloader_num_workers=2) == keys[-1]
