"""What `megatune data preview` shows: whole characters, what is trained, where rows come from and join."""

from __future__ import annotations

import io
import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tokenizer_kit import qwen_tokenizer

from megatune.config.settings import DataSettings, RunSettings, Settings
from megatune.data.bad_rows import RowError
from megatune.data.preview import Preview, PreviewRow, RowDocument, read_preview
from megatune.data.preview.show import shared_prompt, show_preview, token_texts, visible, write_page
from megatune.data.rows import IGNORE_INDEX, Arrangement, Document
from megatune.errors import ExitCode, MegatuneError

TOKENIZER = qwen_tokenizer()


def document(*stretches: tuple[str, bool]) -> Document:
    """Texts, and whether they are trained."""
    ids = [TOKENIZER.encode(text, add_special_tokens=False) for text, _ in stretches]
    labels = [[i if trained else IGNORE_INDEX for i in one] for one, (_, trained) in zip(ids, stretches, strict=True)]
    return Document(*(np.array([*chain(*lists)], dtype=np.int32) for lists in (ids, labels)))


def shown(
    arrangement: Arrangement, *parts: RowDocument, ids: bool = False, wraps: bool = False, **options: Any
) -> list[str]:
    preview = Preview(arrangement, [PreviewRow("demo", 7, parts)])
    file = io.StringIO()
    show_preview(preview, TOKENIZER, Console(file=file, **options), ids=ids, wraps=wraps)
    return file.getvalue().splitlines()


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=40), st.text(max_size=20))
def test_pieces_are_the_text(context: str, answer: str) -> None:
    one = document((context, False), (answer, True))
    pieces = token_texts(one, TOKENIZER)
    assert "".join(piece.text for piece in pieces) == context + answer
    assert [place for piece in pieces for place in range(piece.start, piece.stop)] == list(range(len(one.input_ids)))
    assert all(piece.trained for piece in pieces if piece.start >= max(1, len(TOKENIZER.encode(context))))
    assert not any(piece.trained for piece in pieces if piece.stop <= len(TOKENIZER.encode(context)))


def test_a_character_of_several_tokens_is_one_piece() -> None:
    pieces = token_texts(document(("a🤷b", True)), TOKENIZER)
    assert [piece.text for piece in pieces] == ["a", "🤷", "b"]
    assert pieces[1].stop - pieces[1].start == 4


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("a\nb", "a↵\nb"),
        ("a\tb", "a⇥\tb"),
        ("\r\x1b[31m\x00", "␍␛[31m␀"),
        ("\x7f\u202eabc\u2028", "\\u{7f}\\u{202e}abc\\u{2028}"),
        ("👩\u200d🚀", "👩\u200d🚀"),  # one emoji
    ],
)
def test_visible(text: str, seen: str) -> None:
    assert visible(text) == seen


CHAT = document(
    ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", False), ("It is sunny.<|im_end|>", True), ("\n", False)
)


def test_a_row_without_colours() -> None:
    assert shown("single", RowDocument("chat.jsonl:3", CHAT, length=50)) == [
        "⟦trained⟧ context",
        "",
        f"── demo row 7 (chat.jsonl:3): {len(CHAT.input_ids)} tokens, "
        f"{(CHAT.labels != IGNORE_INDEX).sum()} trained, cut from 50 ──",
        "<|im_start|>user↵",
        "Hi<|im_end|>↵",
        "<|im_start|>assistant↵",
        "⟦It is sunny.<|im_end|>⟧↵",
    ]


def test_a_trained_line_ends_where_it_ends() -> None:
    lines = shown("single", RowDocument("", document(("a", False), ("b\n", True), ("c", False))))
    assert lines[-2:] == ["a⟦b↵⟧", "c"]


def test_a_row_in_colours() -> None:
    lines = shown("single", RowDocument("chat.jsonl:3", CHAT), force_terminal=True, color_system="standard", width=80)
    assert "⟦" not in "".join(lines)
    assert lines[-1] == "\x1b[32mIt is sunny.\x1b[0m\x1b[1;32m<|im_end|>\x1b[0m↵"
    assert "\x1b[32m" not in "".join(lines[3:-1])


def test_no_color_keeps_the_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    lines = shown("single", RowDocument("", CHAT), force_terminal=True, width=80)
    assert lines[-1] == "⟦It is sunny.<|im_end|>⟧↵"
    assert "\x1b" not in "".join(lines)


def test_a_table_of_tokens() -> None:
    lines = shown("single", RowDocument("", document(("<|im_end|>a", False), (" é\n", True))), ids=True)
    rows = [line.split() for line in lines[4:]]
    assert lines[0] == "label -100: not trained"
    assert lines[3] == "position       id    label  token"
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "4", "5"]
    assert [row[2] for row in rows] == ["-100", "-100", *(row[1] for row in rows[2:])]
    assert [" ".join(row[3:]) for row in rows] == ["<|im_end|>", "a", "␣", "é (1 of 2)", "é (2 of 2)", "↵"]


def test_where_samples_join() -> None:
    lines = shown("packed", RowDocument("a.jsonl:1", CHAT), RowDocument("b.jsonl:2", document(("ab", True)), start=900))
    size = len(CHAT.input_ids)
    assert lines[2] == f"── row 7: 2 samples, {size + 2} tokens, 6 trained ──"
    assert lines[3] == f"╌╌ sample 1 (a.jsonl:1): {size} tokens, positions 0 to {size - 1} ╌╌"
    assert lines[-2:] == [
        "╌╌ sample 2 (b.jsonl:2): 2 tokens, positions 0 to 1, from token 900 of its text ╌╌",
        "a⟦b⟧",  # nothing comes before the first token of a sample to predict it from
    ]


def test_a_pair_says_its_prompt_once() -> None:
    chosen = document(("question\n", False), ("answer a<|im_end|>", True))
    rejected = document(("question\n", False), ("answer<|im_end|>", True))
    prompt = shared_prompt(chosen, rejected)
    assert prompt == len(TOKENIZER.encode("question\n"))
    lines = shown("pairs", RowDocument("p.json:1", chosen), RowDocument("p.json:1", rejected))
    assert [line for line in lines if "question" in line] == ["question↵"]
    assert lines[-4:] == [
        f"╌╌ chosen: {len(chosen.input_ids) - prompt} tokens, {len(chosen.input_ids) - prompt} trained ╌╌",
        "⟦answer a<|im_end|>⟧",
        f"╌╌ rejected: {len(rejected.input_ids) - prompt} tokens, {len(rejected.input_ids) - prompt} trained ╌╌",
        "⟦answer<|im_end|>⟧",
    ]


def test_a_pair_says_by_how_much_its_chosen_answer_is_better() -> None:
    parts = [RowDocument("p.json:1", document(("q", False), (text, True)), margin=1.5) for text in ("a", "b")]
    assert any("row 7 (p.json:1): 2 and 2 tokens, margin 1.5 ──" in line for line in shown("pairs", *parts))


SIZES = {"chosen": len(TOKENIZER.encode("answer a<|im_end|>")), "rejected": len(TOKENIZER.encode("answer<|im_end|>"))}
PAIR = (document(("question\n", False), ("answer a<|im_end|>", True)),
        document(("question\n", False), ("answer<|im_end|>", True)))  # fmt: skip


@pytest.mark.parametrize("options", [{"wraps": True}, {"force_terminal": True}], ids=str)
def test_answers_are_side_by_side_where_lines_are_wide_enough(options: dict[str, bool]) -> None:
    parts = [RowDocument("p.json:1", each) for each in PAIR]
    lines = shown("pairs", *parts, **options, width=80, no_color=True)
    (names,) = (line for line in lines if "chosen" in line)
    assert names.split("╌╌")[1::2] == [f" {name}: {size} tokens, {size} trained " for name, size in SIZES.items()]
    assert lines[-1].split("   ")[0] == "⟦answer a<|im_end|>⟧"
    assert lines[-1].rstrip()[names.index("╌╌ rejected") :] == "⟦answer<|im_end|>⟧"
    assert [line for line in lines if "question" in line] == ["question↵"]
    narrow = shown("pairs", *parts, **options, width=79, no_color=True)
    assert not any("chosen" in line and "rejected" in line for line in narrow)
    table = shown("pairs", *parts, ids=True, **options, width=80, no_color=True)
    assert sum(line.startswith("position") for line in table) == 3


def test_long_answers_side_by_side_are_whole() -> None:
    words = " ".join(f"word{number}" for number in range(40))
    long = document(("question\n", False), (words, True))
    lines = shown("pairs", *(RowDocument("", each) for each in (PAIR[0], long)), wraps=True, width=80)
    answers = lines[-1 - next(i for i, line in enumerate(reversed(lines)) if "rejected" in line) :][1:]
    start = max(line.index("word0") for line in answers if "word0 " in line)
    assert " ".join(" ".join(line[start - 1 :] for line in answers).split()).strip("⟦⟧") == words


def test_pairs_of_a_packed_row() -> None:
    parts = [RowDocument(f"p.json:{1 + number // 2}", each) for number, each in enumerate([*PAIR, *PAIR])]
    lines = shown("packed_pairs", *parts)
    sizes = [len(each.input_ids) for each in PAIR]
    assert lines[2] == f"── row 7: 2 pairs, {2 * sum(sizes)} tokens, {2 * sum(SIZES.values())} trained ──"
    headings = [line for line in lines if line.startswith("╌╌ pair")]
    assert headings == [f"╌╌ pair {n} (p.json:{n}): {sizes[0]} and {sizes[1]} tokens ╌╌" for n in (1, 2)]
    assert lines.count("question↵") == 2
    assert lines.count("⟦answer a<|im_end|>⟧") == lines.count("⟦answer<|im_end|>⟧") == 2


@pytest.mark.parametrize("arrangement", ["pairs", "packed_pairs"])
def test_pairs_on_a_page(tmp_path: Path, arrangement: Arrangement) -> None:
    parts = tuple(RowDocument("p.json:1", each) for each in PAIR * (1 + (arrangement == "packed_pairs")))
    write_page(Preview(arrangement, [PreviewRow("demo", 7, parts)]), TOKENIZER, tmp_path / "page.html")
    content = (tmp_path / "page.html").read_text(encoding="utf-8")
    pairs = len(parts) // 2
    assert content.count("question") == content.count("prompt of both") == pairs
    for name, size in SIZES.items():
        assert content.count(f"{name}: {size} tokens, {size} trained") == pairs
    assert content.count("pair 2 (p.json:1)") == pairs - 1
    assert content.count(">answer a</span>") == pairs


def test_packed_pairs_are_read_whole(tmp_path: Path) -> None:
    """A row holds twice cutoff_len tokens, and both answers of every pair in it."""
    rows = [{"instruction": f"question {n}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(60)]
    write(tmp_path / "rows.jsonl", rows)
    found = read_preview(
        make_settings(tmp_path, "dpo", packing=True, cutoff_len=64), TOKENIZER, wanted=range(1, 100)
    )  # fmt: skip
    assert found.arrangement == "packed_pairs"
    assert found.notes[1] == f"packed from 60 pairs into {len(found.rows)} rows"
    seen = []
    for row in found.rows:
        assert 64 < sum(len(each.document.input_ids) for each in row.documents) <= 128
        for chosen, rejected in row.pairs:
            texts = [TOKENIZER.decode(each.document.input_ids) for each in (chosen, rejected)]
            assert chosen.where == rejected.where
            number = int(chosen.where.rpartition(":")[2]) - 1
            assert f"good {number}<" in texts[0]
            assert f"bad {number}<" in texts[1]
            seen.append(number)
    assert sorted(seen) == list(range(60))


def test_bad_rows_by_reason() -> None:
    preview = Preview("single", read=9)
    preview.bad = [(f"x.jsonl:{n}", RowError("missing-field", "field 'output' is missing")) for n in range(1, 6)]
    preview.bad.append(("x.jsonl:8", RowError("not-json", "the line is not JSON", "at \x1b")))
    file = io.StringIO()
    show_preview(preview, TOKENIZER, Console(file=file))
    assert file.getvalue().splitlines()[1:] == [
        "",
        "6 of the 9 rows read cannot be trained on:",
        "    5 × missing-field: field 'output' is missing",
        "        x.jsonl:1",
        "        x.jsonl:2",
        "        x.jsonl:3",
        "    1 × not-json: the line is not JSON",
        "        x.jsonl:8: at ␛",
    ]


def make_settings(folder: Path, stage: str = "sft", **data: object) -> Settings:
    names = data.pop("dataset", ["rows.jsonl"])
    return Settings(
        run=RunSettings(stage=stage),
        data=DataSettings(dataset=names, dataset_dir=str(folder), template="chatml", **data),
    )


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def alpaca(number: int) -> dict[str, object]:
    return {"instruction": f"question {number}", "output": f"answer {number}"}


def test_as_few_rows_as_are_wanted_are_read(tmp_path: Path) -> None:
    rows = [alpaca(n) for n in range(1, 2000)]
    rows[1] = {"instruction": "no answer"}
    write(tmp_path / "rows.jsonl", rows)
    preview = read_preview(make_settings(tmp_path), TOKENIZER, wanted=range(2, 4))
    assert [(row.name, row.number) for row in preview.rows] == [("rows.jsonl", 2), ("rows.jsonl", 3)]
    assert [row.documents[0].where.rpartition("/")[2] for row in preview.rows] == ["rows.jsonl:3", "rows.jsonl:4"]
    assert [(where.rpartition("/")[2], error.code) for where, error in preview.bad] == [
        ("rows.jsonl:2", "missing-field")
    ]
    assert preview.read == 4


def test_rows_of_each_data_set(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write(tmp_path / name, [alpaca(n) for n in range(3)])
    preview = read_preview(make_settings(tmp_path, dataset=["a.jsonl", "b.jsonl"]), TOKENIZER, wanted=range(1, 3))
    assert [(row.name, row.number) for row in preview.rows] == [
        ("a.jsonl", 1), ("a.jsonl", 2), ("b.jsonl", 1), ("b.jsonl", 2)
    ]  # fmt: skip


def test_packed_rows_are_those_of_the_first_samples(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [alpaca(n) for n in range(1, 1500)])
    preview = read_preview(make_settings(tmp_path, packing=True, cutoff_len=128), TOKENIZER, wanted=range(1, 3))
    assert preview.arrangement == "packed"
    assert preview.notes[1].startswith("packed from the first 1,000 samples")
    for row in preview.rows:
        assert len(row.documents) > 1
        assert sum(len(part.document.input_ids) for part in row.documents) <= 128
        assert all(part.where for part in row.documents)


@pytest.mark.parametrize("packing", [None, False])
def test_texts_are_cut_to_pieces(tmp_path: Path, packing: bool | None) -> None:
    texts = ["The quick brown fox jumps over the lazy dog. " * 4, "It is sunny and warm."]
    write(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
    preview = read_preview(
        make_settings(tmp_path, "pt", packing=packing, cutoff_len=24), TOKENIZER, wanted=range(1, 100)
    )
    pieces = [part for row in preview.rows for part in row.documents]
    for line, text in enumerate(texts, 1):
        mine = sorted((part for part in pieces if part.where.endswith(f":{line}")), key=lambda part: part.start)
        assert mine[0].start == 0
        ids = [token for part in mine for token in part.document.input_ids[bool(part.start) :].tolist()]
        assert ids == [*TOKENIZER.encode(text), TOKENIZER.eos_token_id]
    assert {len(row.documents) for row in preview.rows} == ({1, 2} if packing is None else {1})


def test_held_out_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATUNE_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "rows.jsonl", [alpaca(n) for n in range(20)])
    settings = make_settings(tmp_path, val_size=2.0)
    preview = read_preview(settings, TOKENIZER, wanted=range(1, 10), evaluation=True)
    assert [row.number for row in preview.rows] == [1, 2]
    assert not (tmp_path / "cache" / "nothing").exists()
    assert "--eval shows them" in read_preview(settings, TOKENIZER, wanted=range(1, 2)).notes[-1]


@pytest.mark.parametrize(
    ("rows", "wanted", "evaluation", "code", "says"),
    [
        ([alpaca(1)], range(5, 6), False, ExitCode.SETTINGS, "--row 5 of 1 row"),
        ([alpaca(1)], range(1, 2), True, ExitCode.SETTINGS, "the run has no evaluation rows"),
        ([{"instruction": "a"}], range(1, 2), False, ExitCode.DATA, "0 usable of the first 1 rows"),
    ],
)
def test_nothing_to_show(
    tmp_path: Path, rows: list[dict[str, object]], wanted: range, evaluation: bool, code: ExitCode, says: str
) -> None:
    write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(MegatuneError) as caught:
        read_preview(make_settings(tmp_path), TOKENIZER, wanted=wanted, evaluation=evaluation)
    assert caught.value.exit_code == code
    assert says in str(caught.value)


def test_placeholders_that_nothing_fills(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [{"instruction": "Who?", "output": "I am {{name}}, by {{author}}."}])
    preview = read_preview(make_settings(tmp_path, model_name="Bot"), TOKENIZER, wanted=range(1, 2))
    text = TOKENIZER.decode(preview.rows[0].documents[0].document.input_ids)
    assert "I am Bot, by {{author}}." in text
    assert preview.unfilled == {"{{author}}"}
