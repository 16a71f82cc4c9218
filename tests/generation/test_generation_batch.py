"""Answers side by side are those of one by one; data sets are answered into files as ms-swift writes them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from PIL import Image
from tiny_models import tiny_model

from megatune.cli.main import main
from megatune.data import text_scores
from megatune.data.prompts import read_questions
from megatune.data.sources import resolve_datasets
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import ExitCode
from megatune.generation import dataset
from megatune.generation.dataset import Outcome
from megatune.generation.generator import Generator
from megatune.generation.options import GenerationOptions

QUESTIONS = ("Hi", "Who are you? 你是谁？", "Tell me of the river and the sea, in many words.", "7")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory, "qwen3")


def rows_file(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
    return path


def asking(*contents: str) -> dict[str, object]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]}


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("family", ["qwen3", "mixtral", "deepseek_v3", "qwen2_5_vl"])
def test_a_batch_answers_as_one_by_one(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = make_checkpoint(family, tmp_path_factory.mktemp("models") / family, num_layers=2)
    generator = Generator.load(folder, GenerationOptions(max_new_tokens=16))
    prompts = [generator.chat_prompt([{"role": "user", "content": text}]) for text in QUESTIONS]
    for penalty in (None, 1.5):
        sampling = generator.options.model_copy(update={"repetition_penalty": penalty})
        alone = [generator.backend.write(each, sampling) for each in prompts]
        assert generator.backend.write_all(prompts, sampling) == alone
    # A row that a stop word ends leaves the others as they are.
    middle = alone[1].text[4:7]
    sampling = sampling.model_copy(update={"stop_words": [middle]})
    together = generator.backend.write_all(prompts, sampling)
    assert together == [generator.backend.write(each, sampling) for each in prompts]
    assert together[1].stopped
    assert together[1].text.endswith(middle)


@pytest.mark.parametrize("most", [30, 10**9])
def test_prompts_near_the_end_of_the_context_are_answered_as_alone(qwen3: Path, most: int) -> None:
    generator = Generator.load(qwen3, GenerationOptions(max_new_tokens=most))
    prompts = [generator.chat_prompt([{"role": "user", "content": text}]) for text in ("Hi", "word " * 30, "Ho")]
    replies = generator.backend.write_all(prompts, generator.options)
    assert [each.num_tokens for each in replies] == [min(most, 64 - len(each.token_ids)) for each in prompts]
    assert replies == [generator.backend.write(each, generator.options) for each in prompts]


def test_a_data_set_is_answered_in_order_with_labels(
    qwen3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = rows_file(
        tmp_path / "q.jsonl",
        asking("Hi", "Hello"),
        asking("Hi", "Hello", "Who are you?"),
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
        asking(""),
        asking("word " * 200),
    )
    alpaca = rows_file(
        tmp_path / "a.jsonl", {"instruction": "Add", "input": "1 and 2"}, {"query": "Q", "response": "A"}
    )
    answers = tmp_path / "out" / "answers.jsonl"
    command = [
        "infer",
        "--model",
        str(qwen3),
        "--val_dataset",
        str(questions),
        str(alpaca),
        "--result_path",
        str(answers),
    ]
    command += ["--max_new_tokens", "6", "--metric", "acc"]
    assert main([*command, "--max_batch_size", "3"]) == ExitCode.DONE
    printed = capsys.readouterr()
    generator = Generator.load(qwen3, GenerationOptions(max_new_tokens=6))
    lines = lines_of(answers)
    for line in lines:
        assert set(line) == {"response", "labels", "logprobs", "messages"}
        *asked, answer = line["messages"]
        assert answer == {"role": "assistant", "content": line["response"]}
        assert line["response"] == generator.answer(asked).text
    assert [line["messages"][0]["content"] for line in lines[:4]] == ["Hi", "Hi", "Be brief.", "Add\n1 and 2"]
    assert [line["labels"] for line in lines[:4]] == ["Hello", None, None, None]
    assert "q.jsonl:4: left out: an empty user message" in printed.err
    assert "q.jsonl:5: left out: the prompt has" in printed.err
    assert f"{len(lines)} answers are in {answers}, {7 - len(lines)} left out" in printed.err
    assert printed.out == "acc: 0.0000\n"
    # Answers are not written over others.
    before = answers.read_bytes()
    assert main(command) == ExitCode.CANNOT_WRITE
    assert "exists already" in capsys.readouterr().err
    assert answers.read_bytes() == before


@pytest.mark.parametrize("source", ["flags", "run.yaml", "a settings file"])
def test_placeholders_become_what_they_were_in_training(
    source: str, qwen3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chinese = {"query": "你是谁？", "response": "我是{{NAME}}。", "tag": "zh"}
    rows = rows_file(
        tmp_path / "rows.jsonl", {"query": "Are you {{name}}?", "response": "I am, by {{author}}."}, chinese
    )
    model, flags = qwen3, []
    names = {"model_name": ["小团", "Tuna, Inc."], "model_author": "us"}
    if source == "run.yaml":
        model = tmp_path / "out" / "checkpoint-1"
        shutil.copytree(qwen3, model)
        (model.parent / "run.yaml").write_text(yaml.safe_dump(names))
    elif source == "a settings file":
        model = tmp_path / "model.yaml"
        model.write_text(yaml.safe_dump({"model_name_or_path": str(qwen3), **names}))
    else:
        flags = ["--model_name", *names["model_name"], "--model_author", "us"]
    answers = tmp_path / "answers.jsonl"
    command = ["infer", str(model), "--val_dataset", str(rows), *flags, "--result_path", str(answers)]
    assert main([*command, "--max_new_tokens", "2"]) == ExitCode.DONE
    first, second = lines_of(answers)
    assert first["messages"][0]["content"] == "Are you Tuna, Inc.?"
    assert [first["labels"], second["labels"]] == ["I am, by us.", "我是小团。"]


def test_streamed_rows_are_printed_and_land_beside_the_model(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model(tmp_path_factory, "qwen3")
    questions = rows_file(tmp_path / "q.jsonl", *(asking(text, "label") for text in QUESTIONS))
    assert main(["infer", str(model), "--val_dataset", f"{questions}#2", "--max_new_tokens", "4", "--stream"]) == 0
    (answers,) = (model / "infer_result").glob("*.jsonl")
    lines = lines_of(answers)
    assert len(lines) == 2
    expected = "".join(
        f"[QUERY] {line['messages'][0]['content']}\n[LABELS] label\n[RESPONSE] {line['response']}\n{'-' * 50}\n"
        for line in lines
    )
    assert capsys.readouterr().out == expected


def test_pictures_of_rows_are_shown_where_their_tags_are(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    model = make_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("models") / "vl", num_layers=2)
    for name, colour in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
        Image.new("RGB", (56, 56), colour).save(tmp_path / f"{name}.png")
    texts = ("Look at <image>.", "I see.", "And <image>?")
    rows = [{**asking(*texts), "images": images} for images in (["red.png", "blue.png"], ["blue.png", "red.png"])]
    questions, answers = rows_file(tmp_path / "q.jsonl", *rows), tmp_path / "answers.jsonl"
    flags = ["--dataset_dir", str(tmp_path), "--result_path", str(answers), "--max_batch_size", "2"]
    assert main(["infer", str(model), "--val_dataset", str(questions), *flags, "--max_new_tokens", "12"]) == 0
    first, second = lines_of(answers)
    assert first["images"] == ["red.png", "blue.png"]
    assert first["response"] != second["response"]
    assert [each["content"] for each in first["messages"][:3]] == list(texts)


def test_a_row_that_ends_with_a_call_has_no_label(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    asked = {"role": "user", "content": "Look!"}
    rows = [{"messages": [asked, {"role": "assistant", "content": "", "tool_calls": [call]}]}, {"messages": [asked]}]
    sources = resolve_datasets([str(rows_file(tmp_path / "q.jsonl", *rows))], "", "sft")
    questions = list(read_questions(sources, {}, Outcome().leave_out, media=False))
    assert [(each.label, len(each.conversation.messages)) for each in questions] == [(None, 1), (None, 1)]


def test_tools_are_offered_and_calls_written(tmp_path: Path) -> None:
    """Of a row with calls, the prompt is that of the tokenizer's chat template."""
    tool = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
    calls = [{"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}]
    messages = [
        {"role": "user", "content": "Sky?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "blue"},
        {"role": "assistant", "content": "Blue."},
    ]
    rows = rows_file(tmp_path / "q.jsonl", {"messages": messages, "tools": [tool]})
    generator = Generator.load(make_checkpoint("qwen3", tmp_path / "m", num_layers=1), GenerationOptions())
    ((_, prompt),) = dataset._prompted(
        generator,
        read_questions(resolve_datasets([str(rows)], "", "sft"), {}, Outcome().leave_out, media=False),
        Outcome(),
        "",
    )
    schema = {"type": "function", "function": tool}
    expected = generator.tokenizer.apply_chat_template(messages[:3], tools=[schema], add_generation_prompt=True)
    assert prompt.token_ids == expected["input_ids"]
    assert "sky" in generator.tokenizer.decode(prompt.token_ids)


def test_data_sets_that_cannot_be_answered(
    qwen3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: Callable[..., str] = lambda *flags: _refused(capsys, qwen3, *flags)  # noqa: E731
    texts = rows_file(tmp_path / "t.jsonl", {"text": "once"})
    assert "its rows are plain texts" in refused(ExitCode.SETTINGS, "--val_dataset", str(texts))
    empty = rows_file(tmp_path / "e.jsonl", asking(""))
    placeholders = rows_file(tmp_path / "p.jsonl", {"query": "Who?", "response": "I am {{name}}."})
    said = refused(ExitCode.SETTINGS, "--val_dataset", str(placeholders))
    assert "p.jsonl:1: {{name}} is in the data and model_name is not set" in said
    assert "no row could be answered, of 1" in refused(ExitCode.DATA, "--val_dataset", str(empty))
    assert not list((qwen3 / "infer_result").glob("*"))
    said = refused(
        ExitCode.SETTINGS, "--val_dataset", str(texts), "--prompt", "x", "--stream", "true", "--max_batch_size", "2"
    )
    assert "--prompt: has no effect" in said
    assert "--max_batch_size: has no effect" in said
    assert "--metric: has no effect" in refused(ExitCode.SETTINGS, "--metric", "acc", "--prompt", "x")
    monkeypatch.setattr(text_scores, "LIBRARIES", {"no_such_module": "no-such-library"})
    said = refused(ExitCode.UNAVAILABLE, "--val_dataset", str(texts), "--metric", "rouge")
    assert "--metric rouge: no-such-library not installed" in said
    assert "fix: pip install 'megatune[evaluate]'" in said


def _refused(capsys: pytest.CaptureFixture[str], model: Path, code: ExitCode, *flags: str) -> str:
    assert main(["infer", str(model), *flags]) == code
    return capsys.readouterr().err
