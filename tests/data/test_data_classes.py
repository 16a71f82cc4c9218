"""Classified rows of every form, from files to micro-batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizer_kit import qwen_tokenizer

from megatune.config.settings import DataSettings, RunSettings, Settings
from megatune.data.bad_rows import RowError, UnsupportedRow
from megatune.data.conversation import Conversation, Message, RowMedia
from megatune.data.encode import Encoded, make_encoder
from megatune.data.formats import FORMATS, detect
from megatune.data.formats.labels import Labels
from megatune.data.formats.swift import SwiftFormat
from megatune.data.prepare import prepare
from megatune.data.preview import read_preview
from megatune.data.rows import LABEL

TOKENIZER = qwen_tokenizer()
U, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
QUESTION, ANSWER = Message("user", "q"), Message("assistant", "a")
CLASSES = Labels("single_label_classification", 3)


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": [U]}, (QUESTION,)),  # ms-swift
        ({"messages": [U, A]}, (QUESTION, ANSWER)),
        ({"conversations": [{"from": "human", "value": "q"}]}, (QUESTION,)),
        ({"text": "q"}, (QUESTION,)),
        ({"query": "q"}, (QUESTION,)),
        ({"query": "q", "response": "a"}, (QUESTION, ANSWER)),
        ({"instruction": "q", "input": ""}, (QUESTION,)),
    ],
)
def test_rows_of_every_form(row: dict[str, Any], messages: tuple[Message, ...]) -> None:
    row["label"] = 2
    form = detect(row)
    assert form is not None
    assert form.to_example(row, "cls", labels=CLASSES) == Conversation(messages, label=(2.0,))


def test_images_of_a_text_are_read() -> None:
    """They were dropped, and only the text was trained."""
    row = {"text": "q", "images": ["1.png"], "label": 2}
    found = FORMATS["text"].to_example(row, "cls", media=True, labels=CLASSES)
    asked, media = Message("user", "<image>q"), RowMedia("image", "1.png", tag_added=True)
    assert found == Conversation((asked,), media=(media,), label=(2.0,))
    with pytest.raises(UnsupportedRow, match="the model reads text only"):
        FORMATS["text"].to_example(row, "cls", labels=CLASSES)


def test_ms_swift_reads_them_alike() -> None:
    for version in (3, 4):
        form = SwiftFormat(swift_version=version, renames=(("sort", "label"),))
        found = form.to_example({"messages": [U], "sort": 1}, "cls", labels=CLASSES)
        assert found == Conversation((QUESTION,), label=(1.0,))


@pytest.mark.parametrize(
    ("labels", "value", "found"),
    [
        (CLASSES, 0, (0.0,)),
        (CLASSES, True, (1.0,)),
        (CLASSES, 2.0, (2.0,)),
        (CLASSES, "1", (1.0,)),
        (Labels("multi_label_classification", 4), [], (0.0, 0.0, 0.0, 0.0)),
        (Labels("multi_label_classification", 4), [3, 1], (0.0, 1.0, 0.0, 1.0)),
        (Labels("regression", 1), 0.75, (0.75,)),
        (Labels("regression", 1), [-2], (-2.0,)),
        (Labels("regression", 2), [1.5, 0], (1.5, 0.0)),
    ],
)
def test_labels(labels: Labels, value: Any, found: tuple[float, ...]) -> None:
    assert labels.read({"label": value}, "label") == found


_CLASS = "bad-label: field 'label': expected a class from 0 to 2"


@pytest.mark.parametrize(
    ("labels", "row", "says"),
    [
        (CLASSES, {"text": "q"}, "missing-field: field 'label' is missing (the row has 'text')"),
        (CLASSES, {"label": None}, "missing-field: field 'label' is missing (the row has 'label')"),
        *((CLASSES, {"label": value}, f"{_CLASS} (got {json.dumps(value)})")
          for value in (3, -1, 0.5, "good", [1], {})),
        (CLASSES, {"label": float("nan")}, f"{_CLASS} (got NaN)"),
        (Labels("multi_label_classification", 3), {"label": 1},
         "bad-label: field 'label': expected a list of classes (got 1)"),
        (Labels("multi_label_classification", 3), {"label": [1, 3]}, f"{_CLASS} (got 3)"),
        (Labels("regression", 1), {"label": "1"}, 'bad-label: field \'label\': expected a number (got "1")'),
        (Labels("regression", 1), {"label": 1e39}, "bad-label: field 'label': expected a number (got 1e+39)"),
        (Labels("regression", 2), {"label": [1.0]},
         "bad-label: field 'label': expected a list of 2 numbers (got [1.0])"),
    ],
)  # fmt: skip
def test_labels_that_are_none(labels: Labels, row: dict[str, Any], says: str) -> None:
    with pytest.raises(RowError) as caught:
        labels.read(row, "label")
    assert f"{caught.value.code}: {caught.value}" == says


def settings_of(folder: Path, rows: list[dict[str, Any]], num_labels: int = 3, **data: Any) -> Settings:
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    kind = data.pop("problem_type", None)
    return Settings(
        run=RunSettings(stage="cls", num_labels=num_labels, problem_type=kind),
        data=DataSettings(dataset=["rows.jsonl"], dataset_dir=str(folder), template="qwen3_nothink", **data),
    )


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("template", [None, "qwen3", "qwen3_nothink"])
def test_a_question_ends_where_an_answer_would_begin(template: str | None, thinking: bool) -> None:
    """As in Transformers' templates; a conversation that has its answer ends with what ends that. All of it counts."""
    data = DataSettings(template=template, enable_thinking=thinking)
    settings = Settings(run=RunSettings(stage="cls", num_labels=3), data=data)
    encoder = make_encoder(settings, TOKENIZER)
    asked = Conversation((QUESTION,), label=(1.0,))
    (short, whole) = encoder.encode([asked, Conversation((QUESTION, ANSWER), label=(1.0,))])
    assert isinstance(short, Encoded)
    assert isinstance(whole, Encoded)
    (document,), (other,) = short.documents, whole.documents
    text = TOKENIZER.decode(document.input_ids)
    ends = "<|im_start|>assistant\n" + ("" if thinking or template == "qwen3_nothink" else "<think>\n\n</think>\n\n")
    assert text.endswith("q<|im_end|>\n" + ends) or (template is None and text.endswith("<|im_start|>assistant\n"))
    assert "a<|im_end|>" in TOKENIZER.decode(other.input_ids)
    assert "-" not in text
    for each in (document, other):
        assert (each.labels == each.input_ids).all()
    assert short.label == (1.0,)


@pytest.mark.parametrize("version", [3, 4])
def test_ms_swifts_template_writes_a_question_alone(version: int) -> None:
    data = DataSettings(conversation_rules=f"ms_swift_{version}", template="qwen2_5", truncation_strategy="drop")
    settings = Settings(run=RunSettings(stage="cls", num_labels=3), data=data)
    (found,) = make_encoder(settings, TOKENIZER).encode([Conversation((QUESTION,), label=(1.0,))])
    assert isinstance(found, Encoded)
    assert TOKENIZER.decode(found.documents[0].input_ids).endswith("q<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("packing", [False, True])
def test_labels_stay_with_their_rows(tmp_path: Path, packing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held out, packed and trained; bad ones are left out."""
    monkeypatch.setenv("MEGATUNE_CACHE", str(tmp_path / "cache"))
    rows: list[dict[str, Any]] = [
        {"text": f"number {number} {'x ' * (number % 7)}", "label": [number % 4, 3]} for number in range(40)
    ]
    rows.insert(5, {"text": "bad", "label": [4]})
    settings = settings_of(
        tmp_path, rows, 4, problem_type="multi_label_classification", packing=packing, val_size=8, on_bad_row="skip",
        cutoff_len=128,
    )  # fmt: skip
    prepared = prepare(settings, TOKENIZER)
    assert prepared.evaluation is not None
    seen = 0
    for part in (prepared.train, prepared.evaluation):
        for row in range(len(part)):
            for document, label in zip(part[row], part.extras([row])[LABEL].values, strict=True):
                number = int(TOKENIZER.decode(document.input_ids).split("number ")[1].split(" ")[0])
                assert np.flatnonzero(label).tolist() == sorted({number % 4, 3})
                seen += 1
    assert seen == 40


def test_a_preview_shows_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATUNE_CACHE", str(tmp_path / "cache"))
    settings = settings_of(tmp_path, [{"text": "a", "label": 2}])
    preview = read_preview(settings, TOKENIZER, wanted=range(1, 2))
    assert preview.rows[0].documents[0].label == (2.0,)
