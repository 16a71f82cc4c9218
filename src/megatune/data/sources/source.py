"""One data set, resolved: the files, and the form of their rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatune.data.formats.form import Form
from megatune.data.readers import Position, RawRow, read_rows


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """A place between two rows of a data set: index in the data set's files, and the place in that file."""

    file: int
    position: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSource(Form):
    """One data set, resolved: the files, and the form of their rows.

    Attributes:
        files: read in this order; all of one kind. Files of a hub lie in its library's cache.
        num_samples: rows to draw, None for all; more than there are repeats rows.
        fetched: from a hub: whoever wrote its rows is not asked what files of this machine they may name.
    """

    name: str
    files: tuple[Path, ...]
    num_samples: int | None = None
    fetched: bool = False

    def rows(self) -> Iterator[RawRow]:
        """Read every row of every file, in order."""
        for row, _ in self.rows_from():
            yield row

    def rows_from(self, position: SourcePosition | None = None) -> Iterator[tuple[RawRow, SourcePosition]]:
        """Read the rows after a position, all of them where it is None, each with the position after it."""
        first = position.file if position else 0
        for index in range(first, len(self.files)):
            after = position.position if position and index == first else None
            for row in read_rows(self.files[index], after):
                yield row, SourcePosition(index, row.next)


def source_of(
    name: str, files: tuple[Path, ...], form: Form, num_samples: int | None, *, fetched: bool = False
) -> DatasetSource:
    own = (form.formatting, form.columns, form.tags, form.ranking, form.swift_version, form.renames, form.fields)
    return DatasetSource(*own, name=name, files=files, num_samples=num_samples, fetched=fetched)
