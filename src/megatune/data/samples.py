"""Rows of a data set's files as examples, or as the reason why they are none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from megatune.data.formats import PLACEHOLDERS, Example, RowError, UnsupportedRow, fill_placeholders, to_example
from megatune.data.order import sample_order
from megatune.data.readers import RawRow
from megatune.data.sources import DatasetSource
from megatune.errors import ExitCode, Finding, MegatuneError


@dataclass(frozen=True, slots=True)
class Sample:
    """One row of a file on its way to tokens.

    Attributes:
        where: its place, as reports name it.
        example: what is trained on, or why the row is dropped.
        copies: how often it is trained in an epoch; more than 1 where num_samples exceeds the data set.
    """

    where: str
    example: Example | RowError
    copies: int


def read_samples(
    source: DatasetSource, *, stage: str, seed: int, max_samples: int | None, placeholders: Mapping[str, str | None]
) -> Iterator[Sample]:
    """The rows of one data set that num_samples and max_samples choose, in the order of its files.

    Args:
        placeholders: what {{name}} and {{author}} become; None where it is not set.

    Raises:
        MegatuneError: a file cannot be read, a row needs what is not built, or a placeholder has no value.
    """
    unfilled: dict[str, str] = {}
    for row, copies in islice(_chosen(source, seed), max_samples):
        example = _example(row, source, stage)
        if not isinstance(example, RowError):
            example, missing = fill_placeholders(example, placeholders)
            for placeholder in missing:
                unfilled.setdefault(placeholder, row.where)
        yield Sample(row.where, example, copies)
    if unfilled:
        raise MegatuneError(
            [
                Finding(
                    f"{placeholder} is in the data and {PLACEHOLDERS[placeholder]} is not set",
                    where,
                    mend=f"set {PLACEHOLDERS[placeholder]}",
                )
                for placeholder, where in unfilled.items()
            ],
            ExitCode.SETTINGS,
        )


def _example(row: RawRow, source: DatasetSource, stage: str) -> Example | RowError:
    if row.problem:
        return RowError(row.problem, row.detail)
    try:
        return to_example(row.fields, source, stage)
    except RowError as error:
        return error
    except UnsupportedRow as unsupported:
        what = f"dataset: {source.name} cannot be trained on: {unsupported}"
        raise MegatuneError(Finding(what, row.where), ExitCode.SETTINGS) from unsupported


def _chosen(source: DatasetSource, seed: int) -> Iterator[tuple[RawRow, int]]:
    """Rows with their number of copies: num_samples draws without replacement, as many rounds as it needs."""
    if source.num_samples is None:
        for row in source.rows():
            yield row, 1
        return
    rows = list(source.rows())
    if not rows:
        return
    rounds, rest = divmod(source.num_samples, len(rows))
    extra = set(sample_order(len(rows), seed)[:rest].tolist())
    for index, row in enumerate(rows):
        copies = rounds + (index in extra)
        if copies:
            yield row, copies
