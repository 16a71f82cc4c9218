"""Read prompts for generation: questions of data sets without their answers, and tokenized prompts, either cut from
token rows or rendered with the run's template."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatune.config.settings import Settings
from megatune.data.bad_rows import RowError, UnsupportedRow
from megatune.data.conversation import Conversation, Message, fill_placeholders
from megatune.data.encode import make_encoder
from megatune.data.formats import TextFormat
from megatune.data.formats.fields import check_within_media_dir
from megatune.data.media_table import DocumentMedia
from megatune.data.rows import DESIRABLE, IGNORE_INDEX, Document, TokenRows
from megatune.data.samples import Replacements, drawn_samples, not_filled, replacements, values_for
from megatune.data.sources import DatasetSource, prompt_sources
from megatune.data.vision import VisionInput
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SEED = 42  # for drawing the rows of NAME#N; the default seed of training
_NO_ANSWER = "-"  # dummy answer of a question without one, which is cut off later


class Question(NamedTuple):
    """The question of a row.

    Attributes:
        where: the place of the row, as in reports.
        conversation: the messages before the last answer.
        label: the row's answer; None if it has none.
    """

    where: str
    conversation: Conversation
    label: str | None


def read_questions(
    sources: Sequence[DatasetSource],
    placeholders: Replacements,
    leave_out: Callable[[str, object], None],
    *,
    media: bool,
    takes_texts: bool = False,
) -> Iterator[Question]:
    """Yield the questions of rows.

    Args:
        placeholders: replacements of {{name}} and {{author}}, as in training.
        leave_out: called with the place of each row that cannot be read, and the error.
        media: whether the model accepts images or videos.
        takes_texts: read rows of plain text as questions.

    Raises:
        MegatuneError: (SETTINGS) a data set has no questions or unsupported ones, or a placeholder has no value; a file
            cannot be read.
    """
    for source in sources:
        for sample in drawn_samples(source, _SEED):
            row = sample.row
            try:
                if row.error is not None:
                    raise row.error
                if isinstance(source.format, TextFormat) and not takes_texts:
                    what = "its rows are plain texts without questions"
                    raise UnsupportedRow(what, "name a data set of conversations")
                chat = source.format.to_question(row.fields, media=media)
                if source.fetched:
                    check_within_media_dir(chat.media)
                filled, missing = fill_placeholders(chat, values_for(row.fields, placeholders))
                assert isinstance(filled, Conversation)
            except RowError as error:
                leave_out(row.where, error)
                continue
            except UnsupportedRow as unsupported:
                what = f"{source.name} cannot be answered: {unsupported}"
                raise MegatuneError(Finding(what, row.where, fix=unsupported.fix), ExitCode.SETTINGS) from unsupported
            if missing:
                raise not_filled(dict.fromkeys(missing, row.where))
            *asked, last = filled.messages
            question = Question(row.where, filled, None)
            if last.role == "assistant":
                question = Question(row.where, replace(filled, messages=tuple(asked)), last.content or None)
            yield from [question] * sample.copies


class AnswerPrompt(NamedTuple):
    """A tokenized prompt.

    Attributes:
        token_ids: int32 [p], the tokens before the answer.
        label_ids: int32 [r], the reference answer; None if there is none.
        media: images and videos of the prompt.
        where: the place of its row.
    """

    token_ids: np.ndarray
    label_ids: np.ndarray | None
    media: tuple[DocumentMedia, ...]
    where: str


def prompts_of_rows(rows: TokenRows, count: int) -> list[AnswerPrompt]:
    """Cut the first documents of rows before their last answers, which become the reference answers. Of pairs only the
    chosen document is used; undesirable answers (stage kto) are not used as references.

    Args:
        count: maximum number of documents.
    """
    return list(islice(_cut_rows(rows), count))


def _cut_rows(rows: TokenRows) -> Iterator[AnswerPrompt]:
    for number, documents in enumerate(rows):
        extras = rows.extras([number])
        for place, document in enumerate(documents):
            if rows.is_pairs and place % 2:
                continue
            is_desirable = DESIRABLE not in extras or bool(extras[DESIRABLE].values[place])
            if (found := _cut(document, f"row {number + 1}")) is not None:
                yield found if is_desirable else found._replace(label_ids=None)


def _cut(document: Document, where: str) -> AnswerPrompt | None:
    """Cut a document before its last run of trained tokens; None if there is none, or nothing before it."""
    trained = np.flatnonzero(document.labels != IGNORE_INDEX)
    if not len(trained):
        return None
    stop = int(trained[-1]) + 1
    (masked,) = np.nonzero(document.labels[:stop] == IGNORE_INDEX)
    if not len(masked):
        return None
    start = int(masked[-1]) + 1
    media = tuple(each for each in document.media if each.start < start)
    return AnswerPrompt(np.array(document.input_ids[:start]), np.array(document.input_ids[start:stop]), media, where)


def prompts_of_file(
    settings: Settings, name: str, count: int, tokenizer: PreTrainedTokenizerBase, vision: VisionInput | None
) -> list[AnswerPrompt]:
    """Read the first questions of a data set, or of a text file with one question per line, and render them with the
    run's template; in stage pt read texts to continue.

    Args:
        name: a data set as in eval_dataset, or a file.
        count: maximum number of questions.

    Raises:
        MegatuneError: the data set or its template is missing (exit codes 64 and 66), or has no usable question (65).
    """
    bad: list[str] = []
    questions = read_questions(
        prompt_sources(settings, name),
        replacements(settings.data),
        lambda where, why: bad.append(f"{where}: {why}"),
        media=vision is not None,
        takes_texts=True,
    )
    is_text = settings.run.stage == "pt"
    written = _texts(tokenizer, questions) if is_text else _questions(settings, tokenizer, vision, questions, bad)
    if found := list(islice(written, count)):
        return found
    what, why = f"eval_generate_prompts: {name} has no usable question", bad[0] if bad else "it has no questions"
    raise MegatuneError(Finding(what, why=why, fix="correct the rows, or name another file"), ExitCode.DATA)


def _texts(tokenizer: PreTrainedTokenizerBase, questions: Iterable[Question]) -> Iterator[AnswerPrompt]:
    for question in questions:
        text = question.conversation.messages[-1].content
        yield AnswerPrompt(np.array(tokenizer(text)["input_ids"], np.int32), None, (), question.where)


def _questions(
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
    vision: VisionInput | None,
    questions: Iterable[Question],
    bad: list[str],
) -> Iterator[AnswerPrompt]:
    """Encode questions like training rows, and cut off the answers."""
    encoder = replace(make_encoder(settings, tokenizer, vision), train_on_prompt=False)
    for question in questions:
        answer = Message("assistant", question.label or _NO_ANSWER)
        whole = replace(question.conversation, messages=(*question.conversation.messages, answer))
        (encoded,) = encoder.encode([whole])
        found = None if isinstance(encoded, RowError) else _cut(encoded.documents[0], question.where)
        if found is None:
            bad.append(f"{question.where}: {encoded if isinstance(encoded, RowError) else 'it has no question'}")
        else:
            yield found if question.label else found._replace(label_ids=None)
