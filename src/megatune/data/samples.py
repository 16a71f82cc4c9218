"""Read the rows of a data set's files as examples, or as errors."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from megatune.config.groups.data import DataSettings
from megatune.data.bad_rows import RowError, UnsupportedRow
from megatune.data.conversation import PLACEHOLDERS, Conversation, Example, fill_placeholders, texts
from megatune.data.formats.fields import check_within_media_dir
from megatune.data.formats.labels import Labels
from megatune.data.readers import RawRow
from megatune.data.sources import DatasetSource, SourcePosition
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.config.settings import Settings
    from megatune.data.encode import Encoded  # which imports numpy

# The replacement of each placeholder in rows tagged as Chinese, and in all others; None if the setting is not set.
Replacements = Mapping[str, tuple[str, str] | None]
LANGUAGE_FIELD, CHINESE = "tag", "zh"  # of self-cognition data sets


class RowMetadata(NamedTuple):
    """What the pipeline needs of a row in addition to its tokens."""

    missing: tuple[str, ...] = ()  # placeholders in the row that have no value
    desirable: bool | None = None  # see `Conversation`
    rank: int = 0  # see `rank`; 0 if nothing is held out
    tags_added: bool = False  # whether it has images or videos without a tag


NO_METADATA = RowMetadata()


@dataclass(slots=True)
class Sample:
    """One row of a file, before encoding. Its fields are parsed when it is encoded, possibly in a worker process.

    Attributes:
        row: the row as read from the file.
        copies: how often it is trained in an epoch; more than 1 if num_samples exceeds the data set.
        position: the position of its data set after it.
        metadata: set when the row is parsed.
    """

    row: RawRow
    copies: int = 1
    position: SourcePosition | None = None
    metadata: RowMetadata = NO_METADATA


@dataclass(frozen=True, slots=True)
class RowReader:
    """Parses the rows of one data set to examples; picklable for worker processes.

    Attributes:
        placeholders: see `replacements`.
        media: whether the model accepts images or videos.
        seed: the seed of `rank`; None if nothing is held out.
        labels: the label encoding of stage cls.
    """

    source: DatasetSource
    stage: str
    placeholders: Replacements
    media: bool = False
    seed: int | None = None
    labels: Labels | None = None

    @classmethod
    def of(cls, source: DatasetSource, settings: Settings, *, media: bool, seed: int | None = None) -> RowReader:
        """Return the reader of a data set."""
        return cls(source, settings.run.stage, replacements(settings.data), media, seed, Labels.of(settings.run))

    def read(self, fields: Mapping[str, Any]) -> tuple[Example | RowError | UnsupportedRow, RowMetadata]:
        """Return the example of a row, or why it cannot be trained on, and the row's metadata."""
        try:
            example = self.source.format.to_example(fields, self.stage, media=self.media, labels=self.labels)
            if self.source.fetched and not isinstance(example, str):
                check_within_media_dir(example.media)
            missing: list[str] = []
            if any("{{" in text for text in texts(example)):
                example, missing = fill_placeholders(example, values_for(fields, self.placeholders))
        except (RowError, UnsupportedRow) as error:
            return error, NO_METADATA
        desirable = example.desirable if isinstance(example, Conversation) else None
        added = not isinstance(example, str) and any(item.tag_added for item in example.media)
        ranked = 0 if self.seed is None else rank(example, self.seed)
        return example, RowMetadata(tuple(missing), desirable, ranked, added)

    def examples(self, samples: Iterator[Sample]) -> Iterator[tuple[Sample, Example | RowError]]:
        """Yield samples with their examples or errors.

        Raises:
            MegatuneError: a row needs an unsupported feature (exit code 64).
        """
        for sample in samples:
            example = sample.row.error or self.read(sample.row.fields)[0]
            if isinstance(example, UnsupportedRow):
                raise self.refused(sample.row.where, example)
            yield sample, example

    def refused(self, where: str, unsupported: UnsupportedRow) -> MegatuneError:
        """Return the error that ends a run because of a row that needs an unsupported feature."""
        what = f"dataset: {self.source.name} cannot be trained on: {unsupported}"
        return MegatuneError(Finding(what, where, fix=unsupported.fix), ExitCode.SETTINGS)


def rank(example: Example, seed: int) -> int:
    """Return a hash of an example, 0 to 2^64 - 1; rows with the lowest ranks are held out first."""
    state = hashlib.blake2b("\0".join((str(seed), *texts(example))).encode(), digest_size=8)
    for _, value, _ in () if isinstance(example, str) else example.media:
        named = value.get("bytes") or value.get("path") if isinstance(value, Mapping) else value
        state.update(named if isinstance(named, bytes) else repr(named).encode())
    return int.from_bytes(state.digest(), "little")


def replacements(data: DataSettings) -> Replacements:
    """Return the replacements of placeholders; a setting with two values has the first for Chinese rows."""
    return {placeholder: _both(getattr(data, setting)) for placeholder, setting in PLACEHOLDERS.items()}


def values_for(fields: Mapping[str, Any], placeholders: Replacements) -> dict[str, str | None]:
    """Return the replacements of placeholders in a row."""
    chosen = 0 if fields.get(LANGUAGE_FIELD) == CHINESE else 1
    return {placeholder: both and both[chosen] for placeholder, both in placeholders.items()}


def _both(value: str | list[str] | None) -> tuple[str, str] | None:
    if value is None:
        return None
    return (value, value) if isinstance(value, str) else (value[0], value[-1])


def read_samples(source: DatasetSource, settings: Settings) -> Iterator[Sample]:
    """Yield the rows of one data set that num_samples and max_samples select, in the order of its files.

    num_samples draws at random unless dataset_shuffle is off, and max_samples takes the first of those.

    Raises:
        MegatuneError: a file cannot be read.
    """
    data = settings.data
    return islice(drawn_samples(source, settings.run.seed if data.dataset_shuffle else None), data.max_samples)


def stream_samples(
    source: DatasetSource, settings: Settings, after: SourcePosition | None, taken: int
) -> Iterator[Sample]:
    """Yield the rows of one data set after a position; num_samples and max_samples limit their number.

    Args:
        after: the position of the last sample taken.
        taken: the number of samples before this position.

    Raises:
        MegatuneError: as `read_samples`.
    """
    limits = [limit for limit in (source.num_samples, settings.data.max_samples) if limit is not None]
    remaining = max(0, min(limits) - taken) if limits else None
    return (Sample(row, position=position) for row, position in islice(source.rows_from(after), remaining))


Result: TypeAlias = "tuple[Sample, Encoded | RowError]"


def all_filled(results: Generator[Result, None, None], *, at_once: bool = False) -> Generator[Result, None, None]:
    """Yield encoded samples, and raise if placeholders have no value.

    Args:
        at_once: raise before the first such row, for streamed data; otherwise at the end, with all placeholders.

    Raises:
        MegatuneError: a placeholder has no value (exit code 64).
    """
    unfilled: dict[str, str] = {}
    with closing(results):
        for result in results:
            sample, _ = result
            if sample.metadata.missing:
                for placeholder in sample.metadata.missing[: 1 if at_once else None]:
                    unfilled.setdefault(placeholder, sample.row.where)
                if at_once:
                    break
            yield result
    if unfilled:
        raise not_filled(unfilled)


def not_filled(where: Mapping[str, str]) -> MegatuneError:
    """Return the error for placeholders without a value, given the first place of each."""
    findings = [
        Finding(f"{name} is in the data and {PLACEHOLDERS[name]} is not set", place, fix=f"set {PLACEHOLDERS[name]}")
        for name, place in where.items()
    ]
    return MegatuneError(findings, ExitCode.SETTINGS)


def drawn_samples(source: DatasetSource, seed: int | None) -> Iterator[Sample]:
    """Yield rows with their number of copies: num_samples draws without replacement, in as many rounds as needed.

    Args:
        seed: the seed of the draw; None takes the first rows.
    """
    if source.num_samples is None:
        yield from (Sample(row, position=position) for row, position in source.rows_from())
        return
    import numpy as np  # not needed to read the first rows

    from megatune.data.order import sample_order

    # Read twice, so that no more than one row is in memory.
    num_rows = sum(1 for _ in source.rows())
    if not num_rows:
        return
    rounds, rest = divmod(source.num_samples, num_rows)
    extra = np.zeros(num_rows, dtype=bool)  # one byte per row; a set of ints takes 60
    extra[slice(rest) if seed is None else sample_order(num_rows, seed)[:rest]] = True
    for index, (row, position) in enumerate(source.rows_from()):
        if copies := rounds + int(extra[index]):
            yield Sample(row, copies, position)
