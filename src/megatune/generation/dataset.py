"""Answers rows of data sets, and writes them as JSON lines in ms-swift's form, each as soon as it is complete."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from megatune.data.bad_rows import RowError
from megatune.data.conversation import RowMedia
from megatune.data.formats.fields import TAG
from megatune.data.media import media_source
from megatune.data.prompts import Question
from megatune.data.templates.chat_template import CALL_FORMS, ChatTemplate, to_openai
from megatune.data.templates.tools import tool_schema
from megatune.data.text_scores import Scored
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.generation.generator import Generator, Message
from megatune.generation.media import MediaItem
from megatune.generation.prompt import Prompt, Reply


def default_path(folder: Path) -> Path:
    """Return the default file of answers: infer_result/TIMESTAMP.jsonl in the model's folder."""
    return folder / "infer_result" / f"{datetime.now():%Y%m%d-%H%M%S}.jsonl"


class ResultFile(AbstractContextManager["ResultFile"]):
    """A new file of answers.

    Raises:
        MegatuneError: (CANNOT_WRITE) it exists already, or cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "x", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        except FileExistsError as error:
            why, fix = "existing answers are never overwritten", "give another --result_path, or move the file away"
            raise MegatuneError(Finding("exists already", str(path), why, fix), ExitCode.CANNOT_WRITE) from error
        except OSError as error:
            raise self._unwritten(error) from error

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._file.close()
        if kind is not None and os.path.getsize(self.path) == 0:  # so that a command without any answer can be repeated
            self.path.unlink()

    def add(self, row: Mapping[str, Any]) -> None:
        """Write one line."""
        try:
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._unwritten(error) from error

    def add_turn(self, messages: Sequence[Mapping[str, Any]], response: str) -> None:
        """Write a chat turn: the response, and all messages including it."""
        self.add({"response": response, "messages": [*messages, {"role": "assistant", "content": response}]})

    def _unwritten(self, error: OSError) -> MegatuneError:
        what, why = "cannot write the answers", error.strerror or str(error)
        return MegatuneError(Finding(what, str(self.path), why, "--result_path FILE"), ExitCode.CANNOT_WRITE)


@dataclass(slots=True)
class Outcome:
    """Numbers of answered and skipped rows, and the answers to rows that have a label, for scoring."""

    answered: int = 0
    left_out: int = 0
    scored: list[Scored] = field(default_factory=list)

    def leave_out(self, where: str, why: object) -> None:
        """Count a skipped row, and print it to stderr."""
        self.left_out += 1
        print(f"{where}: left out: {why}", file=sys.stderr)


def answer_rows(
    generator: Generator,
    rows: Iterable[Question],
    results: ResultFile,
    outcome: Outcome,
    *,
    batch_size: int,
    media_dir: str = "",
    show: bool = False,
) -> None:
    """Answer rows, and write the answers of each batch as soon as it is done.

    Args:
        batch_size: number of rows per batch.
        media_dir: folder of relative paths of images and videos.
        show: whether to print each row and stream its answer; batch_size must be 1 then.

    Raises:
        MegatuneError: (DATA) no row could be answered; (CANNOT_WRITE) the results.
    """
    prompted = _prompted(generator, rows, outcome, media_dir)
    while batch := list(islice(prompted, batch_size)):
        if show:
            replies = [_print_row(generator, *each) for each in batch]
        else:
            replies = generator.backend.write_all([prompt for _, prompt in batch], generator.options)
        for (question, _), reply in zip(batch, replies, strict=True):
            label = question.label
            outcome.answered += 1
            if label is not None:
                outcome.scored.append(Scored(reply.text, label))
            results.add(_line(question, reply))
    if not outcome.answered:
        what = f"no row could be answered, of {outcome.left_out}"
        raise MegatuneError(Finding(what, "--val_dataset", fix="correct the rows that are named above"), ExitCode.DATA)


def _prompted(
    generator: Generator, rows: Iterable[Question], outcome: Outcome, media_dir: str
) -> Iterator[tuple[Question, Prompt]]:
    """Yield rows with their prompts, and record rows without a valid prompt, for example too long ones."""
    template = ChatTemplate(generator.tokenizer)
    for question in rows:
        try:
            prompt = _prompt(generator, template, question, media_dir)
        except RowError as error:
            outcome.leave_out(question.where, error)
        except MegatuneError as error:
            outcome.leave_out(question.where, "; ".join(f"{each.what}: {each.why}" for each in error.findings))
        else:
            yield question, prompt


def _prompt(generator: Generator, template: ChatTemplate, question: Question, media_dir: str) -> Prompt:
    """Render a row's question with the chat template, with images and videos at their tags.

    Raises:
        RowError: an image or video cannot be read, a tool has no name, or the template drops tool calls.
        MegatuneError: as `Generator.chat_prompt`.
    """
    conversation = question.conversation
    messages: list[Message] = list(template.chat_of(conversation))
    media: tuple[MediaItem, ...] = ()
    if conversation.media:
        messages, media = _place_media(generator, messages, conversation.media, media_dir)
    return generator.chat_prompt(messages, media, [tool_schema(each) for each in conversation.tools])


def _place_media(
    generator: Generator, messages: list[Message], of_row: Sequence[RowMedia], media_dir: str
) -> tuple[list[Message], tuple[MediaItem, ...]]:
    """Replace tags in messages by placeholders of the images and videos, and return these; the answer's are not
    read."""
    assert generator.media is not None
    remaining, media, placed = iter(of_row), [], []
    for message in messages:
        parts = TAG.split(message["content"] or "")
        text = parts[0]
        for part in parts[1:]:
            item = next(remaining)
            media.append(generator.media.read(media_source(item.value, item.kind, media_dir)))
            text += media[-1].placeholder + part
        placed.append({**message, "content": text} if len(parts) > 1 else message)
    return placed, tuple(media)


def _print_row(generator: Generator, question: Question, prompt: Prompt) -> Reply:
    """Print a row and its answer in ms-swift's form."""
    print(f"[QUERY] {question.conversation.messages[-1].content}")
    if question.label is not None:
        print(f"[LABELS] {question.label}")
    print("[RESPONSE] ", end="", flush=True)
    reply = generator.backend.write(prompt, generator.options, lambda text: print(text, end="", flush=True))
    print(f"\n{'-' * 50}", flush=True)
    return reply


def _line(question: Question, reply: Reply) -> dict[str, Any]:
    """Return the line of an answer with ms-swift's fields; images and videos are named by path, not copied."""
    conversation = question.conversation
    messages = to_openai(conversation.messages, conversation.system or "", CALL_FORMS[0])
    line: dict[str, Any] = {
        "response": reply.text,
        "labels": question.label,
        "logprobs": None,
        "messages": [*messages, {"role": "assistant", "content": reply.text}],
    }
    for kind in ("image", "video"):
        if of_kind := [_name(each) for each in conversation.media if each.kind == kind]:
            line[f"{kind}s"] = of_kind
    if conversation.tools:
        line["tools"] = list(conversation.tools)
    return line


def _name(item: RowMedia) -> str | None:
    """Return the path of an image or video, None if the row contains its bytes."""
    value = item.value.get("path") if isinstance(item.value, dict) else item.value
    return str(value) if isinstance(value, str | Path) and len(str(value)) < 4096 else None  # longer ones are base64
