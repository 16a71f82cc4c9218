"""What rows of data sets ask, without their answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatune.data.bad_rows import RowError, UnsupportedRow
from megatune.data.conversation import Conversation, Message, fill_placeholders
from megatune.data.formats import to_example, to_question
from megatune.data.formats.pictures import check_inside
from megatune.data.samples import Replacements, drawn_rows, not_filled, values_for
from megatune.data.sources import DatasetSource
from megatune.errors import ExitCode, Finding, MegatuneError

_SEED = 42  # of the rows that NAME#N draws, as in training


class Question(NamedTuple):
    """What a row asks.

    Attributes:
        conversation: its messages end before the assistant's.
        label: the row's own answer, None where it has none.
    """

    conversation: Conversation
    label: str | None


@dataclass(frozen=True, slots=True)
class Asked:
    """A row of a data set.

    Attributes:
        where: its place, as reports name it.
    """

    where: str
    question: Question


def read_questions(
    sources: Sequence[DatasetSource],
    placeholders: Replacements,
    leave_out: Callable[[str, object], None],
    *,
    pictures: bool,
    takes_texts: bool = False,
) -> Iterator[Asked]:
    """Yield what the rows ask.

    Args:
        placeholders: what {{name}} and {{author}} become, as in training.
        leave_out: gets the place of each row that cannot be read, and why.
        pictures: whether the model takes some.
        takes_texts: read a row that is a plain text as a question.

    Raises:
        MegatuneError: (SETTINGS) a data set asks nothing, or what the model does not take, or has a placeholder
            without a value; a file cannot be read.
    """
    for source in sources:
        for row, _, copies in drawn_rows(source, _SEED):
            try:
                if row.error is not None:
                    raise row.error
                if takes_texts and source.formatting == "text":
                    chat = Conversation((Message("user", str(to_example(row.fields, source, "pt"))),))
                else:
                    chat = to_question(row.fields, source, pictures=pictures)
                if source.fetched:
                    check_inside(chat.pictures)
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
            yield from [Asked(row.where, _question(filled))] * copies


def _question(chat: Conversation) -> Question:
    *asked, last = chat.messages
    if last.role != "assistant":
        return Question(chat, None)
    return Question(replace(chat, messages=tuple(asked)), last.content)
