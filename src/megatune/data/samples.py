"""Rows of a data set's files as examples, or as the reason why they are none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from megatune.config.groups.data import DataSettings
from megatune.data.bad_rows import RowError, UnsupportedRow
from megatune.data.conversation import PLACEHOLDERS, Example, fill_placeholders, texts
from megatune.data.formats import to_example
from megatune.data.readers import RawRow
from megatune.data.sources import DatasetSource, SourcePosition
from megatune.errors import ExitCode, Finding, MegatuneError

_Row = tuple[RawRow, SourcePosition, int]  # the position is behind it; the number is that of its copies
# What each placeholder becomes in rows that are tagged as Chinese, and in all others; None where it is not set.
Replacements = Mapping[str, tuple[str, str] | None]
LANGUAGE_FIELD, CHINESE = "tag", "zh"  # of self-cognition data sets


@dataclass(frozen=True, slots=True)
class Sample:
    """One row of a file on its way to tokens."""

    where: str  # its place, as reports name it
    example: Example | RowError  # what is trained on, or why the row is dropped
    copies: int  # how often it is trained in an epoch; more than 1 where num_samples exceeds the data set
    row: RawRow  # as it was read
    position: SourcePosition | None = None  # where its data set continues after it


def replacements(data: DataSettings) -> Replacements:
    """Return what placeholders become: of a setting with two values the first in Chinese rows, the second in others."""
    return {placeholder: _both(getattr(data, setting)) for placeholder, setting in PLACEHOLDERS.items()}


def _both(value: str | list[str] | None) -> tuple[str, str] | None:
    if value is None:
        return None
    return (value, value) if isinstance(value, str) else (value[0], value[-1])


def read_samples(
    source: DatasetSource,
    *,
    stage: str,
    seed: int,
    shuffle: bool = True,
    max_samples: int | None,
    placeholders: Replacements,
    pictures: bool = False,
) -> Iterator[Sample]:
    """Yield the rows of one data set that num_samples and max_samples choose, in the order of its files.

    Args:
        shuffle: num_samples draws at random; False takes the first rows.
        max_samples: the first ones of those that num_samples draws.
        placeholders: see `replacements`.
        pictures: whether the model takes some.

    Raises:
        MegatuneError: a file cannot be read, a row needs what is not built, or a placeholder has no value (said at the
            end, for all of them).
    """
    unfilled: dict[str, str] = {}
    drawn = drawn_rows(source, seed if shuffle else None)
    for sample, missing in _samples(islice(drawn, max_samples), source, stage, placeholders, pictures):
        for placeholder in missing:
            unfilled.setdefault(placeholder, sample.where)
        yield sample
    if unfilled:
        raise _unfilled(unfilled)


def stream_samples(
    source: DatasetSource,
    *,
    stage: str,
    max_samples: int | None,
    placeholders: Replacements,
    pictures: bool = False,
    after: SourcePosition | None,
    taken: int,
) -> Iterator[Sample]:
    """Yield the rows of one data set from a place on; of those num_samples and max_samples leave the first.

    Args:
        pictures: as of `read_samples`.
        after: the position of the sample to continue after.
        taken: how many samples there are up to it.

    Raises:
        MegatuneError: as `read_samples`, a placeholder without a value before its row can be trained.
    """
    limits = [limit for limit in (source.num_samples, max_samples) if limit is not None]
    left = max(0, min(limits) - taken) if limits else None
    rows = ((row, position, 1) for row, position in islice(source.rows_from(after), left))
    for sample, missing in _samples(rows, source, stage, placeholders, pictures):
        if missing:
            raise _unfilled({missing[0]: sample.where})
        yield sample


def _samples(
    rows: Iterable[_Row],
    source: DatasetSource,
    stage: str,
    placeholders: Replacements,
    pictures: bool,
) -> Iterator[tuple[Sample, list[str]]]:
    """Yield the sample of each row, and the placeholders in it that have no value."""
    for row, position, copies in rows:
        example: Example | RowError
        missing: list[str] = []
        try:
            example = row.error or to_example(row.fields, source, stage, pictures=pictures)
            if not isinstance(example, RowError) and any("{{" in text for text in texts(example)):
                chosen = 0 if row.fields.get(LANGUAGE_FIELD) == CHINESE else 1
                filled = {placeholder: both and both[chosen] for placeholder, both in placeholders.items()}
                example, missing = fill_placeholders(example, filled)
        except RowError as error:
            example = error
        except UnsupportedRow as unsupported:
            what = f"dataset: {source.name} cannot be trained on: {unsupported}"
            raise MegatuneError(Finding(what, row.where, fix=unsupported.fix), ExitCode.SETTINGS) from unsupported
        yield Sample(row.where, example, copies, row, position), missing


def _unfilled(where: Mapping[str, str]) -> MegatuneError:
    findings = [
        Finding(f"{name} is in the data and {PLACEHOLDERS[name]} is not set", place, fix=f"set {PLACEHOLDERS[name]}")
        for name, place in where.items()
    ]
    return MegatuneError(findings, ExitCode.SETTINGS)


def drawn_rows(source: DatasetSource, seed: int | None) -> Iterator[_Row]:
    """Yield rows with their number of copies: num_samples draws without replacement, as many rounds as it needs.

    Args:
        seed: of the draw; None takes the first rows.
    """
    if source.num_samples is None:
        yield from ((row, position, 1) for row, position in source.rows_from())
        return
    from megatune.data.order import sample_order  # numpy, which a look at the first rows does without

    # Read twice, so that no more than one row has to be kept.
    num_rows = sum(1 for _ in source.rows())
    if not num_rows:
        return
    rounds, rest = divmod(source.num_samples, num_rows)
    extra = set(range(rest) if seed is None else sample_order(num_rows, seed)[:rest].tolist())
    for index, (row, position) in enumerate(source.rows_from()):
        if copies := rounds + (index in extra):
            yield row, position, copies
