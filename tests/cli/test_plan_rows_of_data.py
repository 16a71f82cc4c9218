"""`megatune plan FILE` looks at the data that the file names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatune.config.load import load
from megatune.config.settings import Settings
from megatune.data import sampled
from megatune.data.encode import load_tokenizer, make_encoder
from megatune.data.sampled import first_remote_dataset, sampled_lengths, text_counter
from megatune.demo.checkpoint import make_checkpoint
from megatune.families import load_architecture
from megatune.plan.case import Case, PlannedModel
from megatune.plan.catalogue import cpu_machine
from megatune.plan.read_question import stated_rows
from megatune.plan.rows import RowLengths
from megatune.plan.run.record import RunRecord, dump_records
from megatune.training.planning import data_rows

WORDS = ["the", "cat", "sat", "on", "the", "mat", "and", "looked", "at", "the", "moon", "for", "a", "long", "time"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "qwen3")


def settings_for(folder: Path, model: Path | str, *words: str) -> Settings:
    basics = [
        f"model_name_or_path={model}",
        f"dataset_dir={folder}",
        "template=qwen3",
        "output_dir=none",
        "cutoff_len=256",
    ]
    return load(None, [*basics, *words]).require_valid()


def planned(model: Path, stage: str = "sft") -> PlannedModel:
    return PlannedModel(name="tiny", architecture=load_architecture(model, stage))


def text(size: int) -> str:
    return " ".join(WORDS[place % len(WORDS)] for place in range(size))


def write(folder: Path, name: str, rows: list[dict]) -> None:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path) -> Path:
    chats = [{"instruction": "Say it.", "output": text(1 + 3 * (index % 40))} for index in range(600)]
    chats[333]["output"] = text(180)
    write(tmp_path, "chat.jsonl", chats)
    pair = {"instruction": "Say it.", "chosen": text(30), "rejected": text(3)}
    write(tmp_path, "pair.jsonl", [pair] * 8)
    write(tmp_path, "text.jsonl", [{"text": text(1000)}] * 3)
    info = {"pair": {"file_name": "pair.jsonl", "ranking": True,
                     "columns": {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}},
            "far": {"hf_hub_url": "owner/name"}}  # fmt: skip
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    return tmp_path


def test_lengths_are_about_those_of_the_template_and_the_longest_row_is_found(folder, model):
    settings = settings_for(folder, model, "dataset=chat.jsonl")
    exact = sampled_lengths(settings, encoder=make_encoder(settings, load_tokenizer(model)))
    found = sampled_lengths(settings, text_counter(model))
    assert (found.rows, found.is_whole, exact.is_exact) == (600, True, True)
    assert found.encoded == exact.encoded < 600
    assert max(exact.documents) > 180
    assert max(found.documents) == pytest.approx(max(exact.documents), abs=12)
    rows = data_rows(settings, planned(model)).lengths
    assert rows is not None
    assert rows.mean == pytest.approx(sum(exact.documents) / len(exact.documents), abs=12)
    assert rows.origin.startswith("of 4")


def test_without_a_tokenizer_texts_are_counted_and_it_is_said(folder, model):
    rows = data_rows(settings_for(folder, "Qwen/Qwen3-8B", "dataset=chat.jsonl"), planned(model)).lengths
    assert rows is not None
    assert rows.origin == "of all 600 rows, estimated with 4 bytes of text per token"
    assert rows.longest == pytest.approx(len(text(180)) / 4 + 10, abs=4)


def test_each_answer_of_a_pair_and_each_piece_of_a_text_is_a_document(folder, model):
    pairs = sampled_lengths(settings_for(folder, model, "dataset=pair", "stage=dpo"), text_counter(model))
    assert len(pairs.documents) == 16
    assert max(pairs.documents) > 2 * min(pairs.documents)
    texts = sampled_lengths(settings_for(folder, model, "dataset=text.jsonl", "stage=pt"), text_counter(model))
    assert texts.documents.count(256) >= 9
    packed = data_rows(settings_for(folder, model, "dataset=text.jsonl", "stage=pt"), planned(model)).lengths
    assert packed is not None
    assert (packed.longest, round(packed.mean)) == (256, 256)


def test_reading_ends_in_time(folder, model, monkeypatch):
    found = sampled_lengths(settings_for(folder, model, "dataset=chat.jsonl"), seconds=0.0)
    assert (found.rows, found.is_whole) == (1, False)
    monkeypatch.setattr(sampled, "_MOST_READ", 50)
    found = sampled_lengths(settings_for(folder, model, "dataset=chat.jsonl"), seconds=60.0)
    assert found.origin.startswith("of the first 50 rows")


@pytest.mark.parametrize("name", ["far", "hf::owner/name"])
def test_what_is_not_in_files_here_is_not_fetched(folder, model, name):
    settings = settings_for(folder, model, f"dataset=[chat.jsonl,'{name}']")
    assert first_remote_dataset(settings) == name
    found = data_rows(settings, planned(model))
    assert found.lengths is None
    assert found.note == (
        f"{name} is not in files here: rows are taken to be 256 tokens long, cutoff_len"
        " (--document_length and --longest_document say otherwise)"
    )


@pytest.mark.parametrize("name", ["chat.jsonl", "nothing.jsonl"])
def test_what_cannot_be_read_is_a_note(folder, model, name):
    (folder / "chat.jsonl").write_text("not json\n")
    found = data_rows(settings_for(folder, model, f"dataset={name}"), planned(model))
    assert found.lengths is None
    assert "(--document_length and --longest_document say otherwise)" in found.note


def test_an_earlier_run_of_the_same_data_has_noted_all(folder, model, tmp_path):
    settings = settings_for(folder, model, "dataset=chat.jsonl", f"output_dir={tmp_path / 'out'}")
    lengths, rows_of_file = RowLengths.of([10, 20, 40], "of all rows"), data_rows(settings, planned(model)).lengths
    case = Case(
        model=planned(model), settings=settings, world_size=1, machine=cpu_machine(2**33, 1, 1), lengths=lengths
    )
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "plan.json").write_text(dump_records([RunRecord(case=case)]))
    rows = data_rows(settings, planned(model)).lengths
    assert rows is not None
    assert (rows.longest, rows.slices) == (40, lengths.slices)
    other = settings_for(folder, model, "dataset=chat.jsonl", f"output_dir={tmp_path / 'out'}", "max_samples=5")
    rows = data_rows(other, planned(model)).lengths
    assert rows is not None
    assert rows.longest != 40
    (tmp_path / "out" / "plan.json").write_text('{"format": 0}')  # of another version
    assert data_rows(settings, planned(model)).lengths == rows_of_file
    assert rows_of_file != lengths


def test_stated_lengths_stay_below_cutoff_len():
    settings = Settings()
    assert stated_rows(settings, None, None).lengths is None
    assert stated_rows(settings, 5000, 9000).lengths is None
    rows = stated_rows(settings, 300, None).lengths
    assert rows is not None
    assert (round(rows.mean), rows.longest) == (300, settings.data.cutoff_len)
    rows = stated_rows(settings, None, 500).lengths
    assert rows is not None
    assert (round(rows.mean), rows.longest) == (500, 500)
