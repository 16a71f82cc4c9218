"""Rows of a data set's files as examples, or as the reason why they are none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from megatune.data.bad_rows import RowError, UnsupportedRow
from megatune.data.conversation import PLACEHOLDERS, Example, fill_placeholders, texts
from megatune.data.formats import to_example
from megatune.data.order import sample_order
from megatune.data.readers import RawRow
from megatune.data.sources import DatasetSource, SourcePosition
from megatune.errors import ExitCode, Finding, MegatuneError


@dataclass(frozen=True, slots=True)
class Sample:
    """One row of a file on its way to tokens.

    Attributes:
        where: its place, as reports name it.
        example: what is trained on, or why the row is dropped.
        copies: how often it is trained in an epoch; more than 1 where num_samples exceeds the data set.
        row: as it was read.
        position: from where its data set goes on after it.
    """

    where: str
    example: Example | RowError
    copies: int
    row: RawRow
    position: SourcePosition | None = None


def read_samples(
    source: DatasetSource,
    *,
    stage: str,
    seed: int,
    max_samples: int | None,
    placeholders: Mapping[str, str | None],
    after: SourcePosition | None = None,
    taken: int = 0,
) -> Iterator[Sample]:
    """The rows of one data set that num_samples and max_samples choose, in the order of its files.

    Args:
        max_samples: the first so many of those that num_samples draws.
        placeholders: what {{name}} and {{author}} become; None where it is not set.
        after: the position of the sample to go on after.
        taken: how many samples there are up to it.

    Raises:
        MegatuneError: a file cannot be read, a row needs what is not built, or a placeholder has no value.
    """
    unfilled: dict[str, str] = {}
    left = None if max_samples is None else max(0, max_samples - taken)
    for row, position, copies in islice(_chosen(source, seed, after), left):
        example = _example(row, source, stage)
        if not isinstance(example, RowError) and any("{{" in text for text in texts(example)):
            example, missing = fill_placeholders(example, placeholders)
            for placeholder in missing:
                unfilled.setdefault(placeholder, row.where)
        yield Sample(row.where, example, copies, row, position)
    if unfilled:
        raise MegatuneError(
            [
                Finding(
                    f"{placeholder} is in the data and {PLACEHOLDERS[placeholder]} is not set",
                    where,
                    fix=f"set {PLACEHOLDERS[placeholder]}",
                )
                for placeholder, where in unfilled.items()
            ],
            ExitCode.SETTINGS,
        )


def _example(row: RawRow, source: DatasetSource, stage: str) -> Example | RowError:
    if row.error is not None:
        return row.error
    try:
        return to_example(row.fields, source, stage)
    except RowError as error:
        return error
    except UnsupportedRow as unsupported:
        what = f"dataset: {source.name} cannot be trained on: {unsupported}"
        raise MegatuneError(Finding(what, row.where, fix=unsupported.fix), ExitCode.SETTINGS) from unsupported


def _chosen(
    source: DatasetSource, seed: int, after: SourcePosition | None
) -> Iterator[tuple[RawRow, SourcePosition, int]]:
    """Rows with their number of copies: num_samples draws without replacement, as many rounds as it needs."""
    if source.num_samples is None:
        for row, position in source.rows_from(after):
            yield row, position, 1
        return
    # Read twice, so that no more than one row has to be kept.
    num_rows = sum(1 for _ in source.rows())
    if not num_rows:
        return
    rounds, rest = divmod(source.num_samples, num_rows)
    extra = set(sample_order(num_rows, seed)[:rest].tolist())
    passed = after is None
    for index, (row, position) in enumerate(source.rows_from(None)):
        copies = rounds + (index in extra)
        if passed and copies:
            yield row, position, copies
        passed = passed or position == after
