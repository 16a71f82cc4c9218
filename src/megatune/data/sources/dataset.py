"""What a data set is once it is found: its files, and how their rows read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from megatune.data.readers import Position, RawRow, read_rows

Formatting = Literal["alpaca", "sharegpt", "openai", "query_response", "text"]
FORMATTINGS: tuple[Formatting, ...] = get_args(Formatting)


@dataclass(frozen=True, slots=True)
class Columns:
    """Where a row keeps what (the `columns` block of dataset_info.json); None turns a column off."""

    prompt: str | None = "instruction"
    query: str | None = "input"
    response: str | None = "output"
    history: str | None = "history"
    messages: str | None = "conversations"
    system: str | None = "system"
    tools: str | None = "tools"
    images: str | None = "images"
    videos: str | None = "videos"
    audios: str | None = "audios"
    chosen: str | None = "chosen"
    rejected: str | None = "rejected"


@dataclass(frozen=True, slots=True)
class Tags:
    """How messages are written (the `tags` block of dataset_info.json)."""

    role_tag: str = "from"
    content_tag: str = "value"
    user_tag: str = "human"
    assistant_tag: str = "gpt"
    observation_tag: str = "observation"
    function_tag: str = "function_call"
    system_tag: str = "system"


OPENAI_COLUMNS = Columns(messages="messages")
OPENAI_TAGS = Tags("role", "content", "user", "assistant", "tool", "function_call", "system")
# Which of their usual names the rows have is looked up in each row.
QUERY_RESPONSE_COLUMNS = Columns(prompt=None, query=None, response=None)
TEXT_COLUMNS = Columns(prompt="text")


def default_columns(formatting: Formatting) -> Columns:
    """The columns of a form, where nothing else is said."""
    own = {"openai": OPENAI_COLUMNS, "query_response": QUERY_RESPONSE_COLUMNS, "text": TEXT_COLUMNS}
    return own.get(formatting, Columns())


def default_tags(formatting: Formatting) -> Tags:
    """The tags of a form, where nothing else is said."""
    return OPENAI_TAGS if formatting == "openai" else Tags()


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """A place between two rows of a data set.

    Attributes:
        file: index in the data set's files.
        position: the place in that file.
    """

    file: int
    position: Position


@dataclass(frozen=True, slots=True)
class DatasetSource:
    """One data set, resolved: which files, and how their rows read.

    Attributes:
        files: read in this order; all of one kind. Files of a hub lie in its library's cache.
        num_samples: rows to draw, None for all; more than there are repeats rows.
        ranking: rows are preference pairs.
    """

    name: str
    files: tuple[Path, ...]
    formatting: Formatting = "alpaca"
    columns: Columns = Columns()
    tags: Tags = Tags()
    num_samples: int | None = None
    ranking: bool = False

    def rows(self) -> Iterator[RawRow]:
        """Every row of every file, in order."""
        for row, _ in self.rows_from():
            yield row

    def rows_from(self, position: SourcePosition | None = None) -> Iterator[tuple[RawRow, SourcePosition]]:
        """The rows after a position, all of them where it is None, each with the position after it."""
        first = position.file if position else 0
        for index in range(first, len(self.files)):
            after = position.position if position and index == first else None
            for row in read_rows(self.files[index], after):
                yield row, SourcePosition(index, row.next)
