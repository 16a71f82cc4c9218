"""Prepare rows: read and tokenize every sample once, before the run, in one process of each machine.

val_size holds rows out by rank, a hash of the seed and of the row's texts, images and videos. Therefore the split does
not change when rows are added or sorted, or with the template, the tokenizer, cutoff_len or other data sets; only the
number of held-out rows does.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatune.data.bad_rows import BadRows, RowError
from megatune.data.build import RowsBuilder, RowShape
from megatune.data.cache import get_or_build, stored_key
from megatune.data.cache.key import prepared_key, versioned
from megatune.data.formats import AlpacaFormat
from megatune.data.order import mixed_order
from megatune.data.pipeline import DatasetReader, DatasetState, Pipeline
from megatune.data.report import HELD_OUT_COPY, DataReport, DatasetReport, LengthReport, TokenReport, check_bad_rows
from megatune.data.rows import TokenRows
from megatune.data.samples import Sample
from megatune.data.sources import DatasetSource
from megatune.data.templates import stop_note
from megatune.data.truncation import LengthError
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatune.config.settings import Settings
    from megatune.data.vision import VisionInput


TRAIN_FOLDER = "train"
EVALUATION_FOLDER = "evaluation"
REPORT_FILE = "report.json"


@dataclass(frozen=True, slots=True)
class Prepared:
    """The prepared rows of a run."""

    train: TokenRows
    evaluation: TokenRows | None  # None if nothing is held out and eval_dataset is not set
    report: DataReport
    directory: Path
    key: str  # cache key
    key_parts: Mapping[str, str] = field(default_factory=dict)  # see `RowsKey`; empty if rows are only opened
    each: Mapping[str, TokenRows] = field(default_factory=dict)  # with eval_on_each_dataset, by data set name


def prepare(settings: Settings, tokenizer: PreTrainedTokenizerBase, vision: VisionInput | None = None) -> Prepared:
    """Prepare the token rows of a run, or open them if they are cached.

    Args:
        vision: None for a language model.

    Raises:
        MegatuneError: settings do not match the data (exit code 64), a data set has no usable row, rows are refused by
            the settings, or a file cannot be parsed (65), a file is missing or the tokenizer does not match (66), the
            disk is full or read-only (73).
    """
    key = prepared_key(settings, tokenizer, vision)

    def build(folder: Path) -> None:
        _build(Pipeline.of(settings, tokenizer, vision), folder)

    prepared = get_or_build(settings, versioned(key.name), build, open_prepared, key.provenance())
    # max_bad_rows is not part of the key: the rows stay cached for a run with a higher limit.
    check_bad_rows(prepared.report.datasets, settings.data)
    return replace(prepared, key_parts=key.parts)


def open_prepared(directory: Path) -> Prepared:
    """Memory-map the rows that another process prepared.

    Raises:
        MegatuneError: they are missing or incomplete (exit code 66).
    """
    try:
        report = DataReport.load(directory / REPORT_FILE)
    except (OSError, ValueError) as error:
        raise MegatuneError(Finding("no prepared data", str(directory)), ExitCode.INPUT) from error
    evaluation = TokenRows(directory / EVALUATION_FOLDER) if (directory / EVALUATION_FOLDER).exists() else None
    key = (stored_key(directory) or "").partition("-")[0]
    folders = sorted(directory.glob(f"{EVALUATION_FOLDER}-*"))
    names = [dataset.name for dataset in report.datasets if dataset.evaluation]  # of `eval_dataset`
    each = {name: TokenRows(folder) for name, folder in zip(names, folders, strict=False)}
    return Prepared(TokenRows(directory / TRAIN_FOLDER), evaluation, report, directory, key, each=each)


@dataclass(slots=True)
class _Collected:
    """The usable rows of one data set, with a few bytes per row."""

    report: DatasetReport
    first: int  # index of the first one among all samples written; the others follow it
    copies: array[int] = field(default_factory=lambda: array("i"))  # how often each is trained in an epoch
    ranks: array[int] = field(default_factory=lambda: array("Q"))  # see `samples.rank`; empty if nothing is held out

    @property
    def numbers(self) -> np.ndarray:
        """Their indices among all samples written: int64 [rows]."""
        return np.arange(self.first, self.first + len(self.copies), dtype=np.int64)


def _build(pipeline: Pipeline, folder: Path) -> None:
    """Write every sample's tokens once, then the rows of each part, into an empty folder."""
    settings, data = pipeline.settings, pipeline.settings.data
    # Bad rows are also stored if they are only skipped, so that a later run with "quarantine" can use the cache.
    policy = "error" if data.on_bad_row == "error" else "quarantine"
    with RowsBuilder(folder, RowShape.of(settings)) as builder, pipeline.bad_rows(folder, policy) as bad_rows:
        lengths = array("i")  # before truncation, including samples that were too long
        sources = (*pipeline.training, *pipeline.evaluation)
        collected = [_collect(pipeline, source, builder, bad_rows, lengths) for source in sources]
        bad_rows.check(sum(one.report.read for one, _ in collected))
        if findings := [finding for _, finding in collected if finding is not None]:
            raise MegatuneError(findings, ExitCode.DATA)
        trained = [one for one, _ in collected[: len(pipeline.training)]]
        evaluated = [one for one, _ in collected[len(pipeline.training) :]]
        none = np.zeros(sum(len(one.copies) for one in trained), dtype=bool)
        ranks = (np.asarray(one.ranks) for one in trained)
        split = hold_out(np.concatenate(list(ranks)), data.val_size) if data.val_size else Split(none, none)
        order = _training_order(settings, trained, split)
        train = builder.write_part(TRAIN_FOLDER, order)
        report = DataReport(
            [one.report for one in (*trained, *evaluated)],
            train=train,
            lengths=LengthReport.of(np.asarray(lengths), data.cutoff_len),
            notes=list(_notes(pipeline, split, train)),
        )
        if data.val_size or evaluated:
            for one in evaluated:
                one.report.evaluation = len(one.copies)
            held_out = [np.flatnonzero(split.held_out), *(one.numbers for one in evaluated)]
            report.evaluation = builder.write_part(EVALUATION_FOLDER, np.concatenate(held_out))
            for number, one in enumerate(evaluated if settings.evaluation.eval_on_each_dataset else ()):
                builder.write_part(f"{EVALUATION_FOLDER}-{number:04}", one.numbers)
    report.save(folder / REPORT_FILE)


def _collect(
    pipeline: Pipeline, source: DatasetSource, builder: RowsBuilder, bad_rows: BadRows, lengths: array[int]
) -> tuple[_Collected, Finding | None]:
    """Write the usable rows of one data set; also return the finding if it has none."""

    def on_bad_row(sample: Sample, error: RowError) -> None:
        bad_rows.add(sample, error)
        if isinstance(error, LengthError):
            lengths.append(error.length)

    settings = pipeline.settings
    collected = _Collected(DatasetReport(source.name), len(builder))
    reader = DatasetReader(collected.report, lambda *_: pipeline.read(source), DatasetState())
    reader.on_bad_row = on_bad_row
    while (taken := reader.take()) is not None:
        sample, encoded = taken
        builder.add(encoded.documents, encoded.margin, sample.metadata.desirable, encoded.label)
        lengths.append(encoded.length)
        collected.report.tokens += sum(len(document.input_ids) for document in encoded.documents)
        collected.copies.append(sample.copies)
        if settings.data.val_size:
            collected.ranks.append(sample.metadata.rank)
    return collected, reader.nothing_usable()


@dataclass(frozen=True, slots=True)
class Split:
    """The split of the usable rows of the training data."""

    held_out: np.ndarray  # bool [rows]
    left_out: np.ndarray  # bool [rows]; neither trained nor held out, because a row with the same texts is held out
    on_both_sides: int = 0  # trained rows with the same texts as a held-out row, since there are no others


def hold_out(ranks: np.ndarray, val_size: float) -> Split:
    """Hold out the rows with the lowest ranks.

    Rows with the same texts have the same rank, and earlier ones are held out first. Further copies of a held-out row
    are left out of training, unless all rows are copies.

    Args:
        ranks: uint64 [rows], see `samples.rank`.
        val_size: a number of rows, or a fraction below 1, rounded up.

    Raises:
        MegatuneError: no training rows would remain (exit code 64).
    """
    num_rows = len(ranks)
    count = int(val_size) if val_size >= 1 else ceil(val_size * num_rows)
    if count >= num_rows:
        what, why = f"val_size: {val_size:g} leaves nothing to train on", f"usable rows: {num_rows}"
        fewer = f"write val_size: {num_rows - 1}, or less"
        fix = fewer if num_rows > 1 else "add rows, or remove val_size and eval_strategy"
        raise MegatuneError(Finding(what, why=why, fix=fix), ExitCode.SETTINGS)
    order = np.argsort(ranks, kind="stable")
    held_out = np.zeros(num_rows, dtype=bool)
    held_out[order[:count]] = True
    copies = (ranks == ranks[order[count - 1]]) & ~held_out
    if (copies | held_out).all():
        return Split(held_out, np.zeros(num_rows, dtype=bool), on_both_sides=int(copies.sum()))
    return Split(held_out, copies)


def _training_order(settings: Settings, trained: Sequence[_Collected], split: Split) -> np.ndarray:
    """Return the sample indices of an epoch, with copies and mixing, and complete the reports.

    Raises:
        MegatuneError: val_size leaves no rows of an interleaved data set (exit code 64).
    """
    data = settings.data
    lists = []
    for one in trained:
        held_out, left_out = split.held_out[one.numbers], split.left_out[one.numbers]
        kept = ~(held_out | left_out)
        one.report.trained, one.report.evaluation = int(kept.sum()), int(held_out.sum())
        one.report.leave_out(int(left_out.sum()), HELD_OUT_COPY, "the same texts as a held-out row")
        lists.append(np.repeat(one.numbers[kept], np.asarray(one.copies)[kept]))
    sizes = [len(numbers) for numbers in lists]
    if data.mix_strategy != "concat" and not all(sizes):
        why = f"mix_strategy: {data.mix_strategy} draws from every data set"
        fix = "hold out fewer rows, or name an eval_dataset"
        names = (one.report.name for one, size in zip(trained, sizes, strict=True) if not size)
        wrong = [f"val_size: {data.val_size:g} leaves nothing of {name} to train on" for name in names]
        raise MegatuneError([Finding(what, why=why, fix=fix) for what in wrong], ExitCode.SETTINGS)
    mixed = mixed_order(sizes, data.mix_strategy, data.interleave_probs, data.dataset_weights, settings.run.seed)
    counts, _ = np.histogram(mixed, bins=np.cumsum([0, *sizes]))
    for one, count in zip(trained, counts.tolist(), strict=True):
        one.report.samples = count
    return np.concatenate(lists)[mixed]


def _notes(pipeline: Pipeline, split: Split, train: TokenReport) -> Iterator[str]:
    encoder = pipeline.encoder
    if encoder.template is not None and (note := stop_note(encoder.template, encoder.tokenizer)):
        yield note
    if split.on_both_sides:
        yield f"all rows have the same texts: {split.on_both_sides} are trained on, the others are held out"
    if train.desirable in (0, train.samples):
        yield f"all answers are {'' if train.desirable else 'un'}desirable: training needs both kinds"
    # Stage pt reads only one column, but users may expect that answers are trained, too.
    for source in pipeline.training if pipeline.settings.run.stage == "pt" else ():
        row = next((row.fields for row in source.rows() if row.error is None), {})
        prompt, response = source.format.columns.prompt, source.format.columns.response
        if isinstance(source.format, AlpacaFormat) and row.get(response or ""):
            yield f"{source.name}: stage pt trains on the column {prompt!r} only; {response!r} is not read"
