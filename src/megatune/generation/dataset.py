"""Answers to the rows of data sets, each a line of results as ms-swift writes it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from megatune.data.bad_rows import RowError, UnsupportedRow
from megatune.data.conversation import Conversation, RowPicture, fill_placeholders, texts
from megatune.data.conversation import Message as TextMessage
from megatune.data.formats import Question, to_question
from megatune.data.formats.pictures import TAG, check_inside
from megatune.data.media.sources import picture_source
from megatune.data.readers import RawRow
from megatune.data.samples import Replacements, drawn_rows, not_filled, values_for
from megatune.data.sources import DatasetSource, resolve_datasets
from megatune.data.templates.chat_template import CALL_FORMS, ChatTemplate, as_dicts
from megatune.data.templates.tools import tool_schema
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.generation.generator import Generator
from megatune.generation.pictures import Picture
from megatune.generation.prompt import Prompt, Reply
from megatune.generation.prompter import Message
from megatune.generation.results import ResultFile

_SEED = 42  # of the rows that NAME#N draws, as in training


@dataclass(frozen=True, slots=True)
class Asked:
    """A row of a data set.

    Attributes:
        where: its place, as reports name it.
    """

    where: str
    question: Question


@dataclass(slots=True)
class Outcome:
    """What became of the rows: answered, equal to the row's own answer, with an answer of their own, left out."""

    answered: int = 0
    equal: int = 0
    labelled: int = 0
    left_out: int = 0

    @property
    def accuracy(self) -> float | None:
        """The share of answers that are the row's own; None where no row has one."""
        return self.equal / self.labelled if self.labelled else None


def open_datasets(names: Sequence[str], dataset_dir: str) -> list[DatasetSource]:
    """Find the data sets that are named as in training.

    Raises:
        MegatuneError: as `resolve_datasets`.
    """
    return resolve_datasets(names, dataset_dir, "sft")


def read_questions(
    sources: Sequence[DatasetSource], outcome: Outcome, placeholders: Replacements, *, pictures: bool
) -> Iterator[Asked]:
    """Yield what the rows ask; those that cannot be read are named on stderr and counted.

    Args:
        placeholders: what {{name}} and {{author}} become, as in training.
        pictures: whether the model takes some.

    Raises:
        MegatuneError: (SETTINGS) a data set asks nothing, or what the model does not take, or has a placeholder
            without a value; a file cannot be read.
    """
    for source in sources:
        for row, _, copies in drawn_rows(source, _SEED):
            try:
                if row.error is not None:
                    raise row.error
                question = _filled(to_question(row.fields, source, pictures=pictures), row, placeholders)
                if source.fetched:
                    check_inside(question.conversation.pictures)
            except RowError as error:
                _leave_out(row.where, error, outcome)
                continue
            except UnsupportedRow as unsupported:
                what = f"{source.name} cannot be answered: {unsupported}"
                raise MegatuneError(Finding(what, row.where, fix=unsupported.fix), ExitCode.SETTINGS) from unsupported
            yield from [Asked(row.where, question)] * copies


def _filled(question: Question, row: RawRow, placeholders: Replacements) -> Question:
    label = () if question.label is None else (TextMessage("assistant", question.label),)
    whole = replace(question.conversation, messages=(*question.conversation.messages, *label))
    if not any("{{" in text for text in texts(whole)):
        return question
    filled, missing = fill_placeholders(whole, values_for(row.fields, placeholders))
    if missing:
        raise not_filled(dict.fromkeys(missing, row.where))
    assert isinstance(filled, Conversation)
    *messages, last = filled.messages
    if not label:
        return Question(filled, None)
    return Question(replace(filled, messages=tuple(messages)), last.content)


def answer_rows(
    generator: Generator,
    rows: Iterable[Asked],
    results: ResultFile,
    outcome: Outcome,
    *,
    batch_size: int,
    media_dir: str = "",
    show: bool = False,
) -> None:
    """Answer rows and write each answer's line as soon as its batch is done.

    Args:
        batch_size: rows that are answered side by side.
        media_dir: where relative paths of pictures begin.
        show: print each row and its answer, which appears as it is written; batch_size is 1 then.

    Raises:
        MegatuneError: (DATA) no row could be answered; (CANNOT_WRITE) the results.
    """
    prompted = _prompted(generator, rows, outcome, media_dir)
    while batch := list(islice(prompted, batch_size)):
        if show:
            replies = [_shown(generator, *each) for each in batch]
        else:
            replies = generator.backend.write_all([prompt for _, prompt in batch], generator.options)
        for (asked, _), reply in zip(batch, replies, strict=True):
            label = asked.question.label
            outcome.answered += 1
            outcome.labelled += label is not None
            outcome.equal += label == reply.text
            results.add(_line(asked.question, reply))
    if not outcome.answered:
        what = f"no row could be answered, of {outcome.left_out}"
        raise MegatuneError(Finding(what, "--val_dataset", fix="correct the rows that are named above"), ExitCode.DATA)


def _prompted(
    generator: Generator, rows: Iterable[Asked], outcome: Outcome, media_dir: str
) -> Iterator[tuple[Asked, Prompt]]:
    """Yield rows with their prompts; those that have none, because they are too long, say, are left out."""
    template = ChatTemplate(generator.tokenizer)
    for asked in rows:
        try:
            prompt = _prompt(generator, template, asked.question, media_dir)
        except RowError as error:
            _leave_out(asked.where, error, outcome)
        except MegatuneError as error:
            _leave_out(asked.where, "; ".join(f"{each.what}: {each.why}" for each in error.findings), outcome)
        else:
            yield asked, prompt


def _prompt(generator: Generator, template: ChatTemplate, question: Question, media_dir: str) -> Prompt:
    """Write a row's question by the chat template, with its pictures in the places of their tags.

    Raises:
        RowError: a picture cannot be read, a tool has no name, or the template leaves calls of tools out.
        MegatuneError: as `Generator.chat_prompt`.
    """
    conversation = question.conversation
    messages: list[Message] = list(template.chat_of(conversation))
    shown: tuple[Picture, ...] = ()
    if conversation.pictures:
        messages, shown = _placed(generator, messages, conversation.pictures, media_dir)
    return generator.chat_prompt(messages, shown, [tool_schema(each) for each in conversation.tools])


def _placed(
    generator: Generator, messages: list[Message], pictures: Sequence[RowPicture], media_dir: str
) -> tuple[list[Message], tuple[Picture, ...]]:
    """Write pictures in the places of the messages' tags, and return them; those of a left-out answer are not read."""
    assert generator.pictures is not None
    left, shown, placed = iter(pictures), [], []
    for message in messages:
        parts = TAG.split(message["content"] or "")
        text = parts[0]
        for part in parts[1:]:
            picture = next(left)
            shown.append(generator.pictures.read(picture_source(picture.value, picture.kind, media_dir)))
            text += shown[-1].placeholder + part
        placed.append({**message, "content": text} if len(parts) > 1 else message)
    return placed, tuple(shown)


def _shown(generator: Generator, asked: Asked, prompt: Prompt) -> Reply:
    """Print a row and its answer, as ms-swift does."""
    print(f"[QUERY] {asked.question.conversation.messages[-1].content}")
    if asked.question.label is not None:
        print(f"[LABELS] {asked.question.label}")
    print("[RESPONSE] ", end="", flush=True)
    reply = generator.backend.write(prompt, generator.options, lambda text: print(text, end="", flush=True))
    print(f"\n{'-' * 50}", flush=True)
    return reply


def _line(question: Question, reply: Reply) -> dict[str, Any]:
    """Return the line of an answer: ms-swift's fields; pictures are named by their paths, not copied."""
    conversation = question.conversation
    messages = as_dicts(conversation.messages, conversation.system or "", CALL_FORMS[0])
    line: dict[str, Any] = {
        "response": reply.text,
        "labels": question.label,
        "logprobs": None,
        "messages": [*messages, {"role": "assistant", "content": reply.text}],
    }
    for kind in ("image", "video"):
        if of_kind := [_name(each) for each in conversation.pictures if each.kind == kind]:
            line[f"{kind}s"] = of_kind
    if conversation.tools:
        line["tools"] = list(conversation.tools)
    return line


def _name(picture: RowPicture) -> str | None:
    """Return the path of a picture, None of one that the row holds itself."""
    value = picture.value.get("path") if isinstance(picture.value, dict) else picture.value
    return str(value) if isinstance(value, str | Path) and len(str(value)) < 4096 else None  # longer ones are base64


def _leave_out(where: str, why: object, outcome: Outcome) -> None:
    outcome.left_out += 1
    print(f"{where}: left out: {why}", file=sys.stderr)
