"""From a user's settings to token rows on disk: read, render, tokenise, hold out rows for evaluation, mix, report.

One process a node prepares; all others open what it made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatune.data.bad_rows import BadRows
from megatune.data.build import RowsBuilder, RowShape
from megatune.data.cache.folder import KEY_FILE, built
from megatune.data.cache.key import prepared_key
from megatune.data.collect import Collected, Collector
from megatune.data.encode import Encoder, make_encoder
from megatune.data.hold_out import Split, hold_out
from megatune.data.lengths import LengthReport
from megatune.data.mixing import mixed_order
from megatune.data.report import DataReport
from megatune.data.rows import TokenRows
from megatune.data.sources import DatasetSource, resolve_datasets
from megatune.data.templates import stop_note
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatune.config.settings import Settings

TRAIN_FOLDER = "train"
EVALUATION_FOLDER = "evaluation"
REPORT_FILE = "report.json"


@dataclass(frozen=True, slots=True)
class Prepared:
    """The rows of a run.

    Attributes:
        evaluation: None where nothing is held out and no eval_dataset is set.
        directory: where they are.
        key: names all that determined them.
    """

    train: TokenRows
    evaluation: TokenRows | None
    report: DataReport
    directory: Path
    key: str


def prepare(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> Prepared:
    """Make the token rows of a run, or open them where they are made already.

    Raises:
        MegatuneError: settings that do not fit the data (exit code 64), a data set without one usable row, rows that
            the settings refuse or a file that cannot be read as a whole (65), a missing file or a tokenizer that does
            not fit (66), a full or read-only disk (73).
    """
    key = prepared_key(settings, tokenizer)
    return open_prepared(built(settings, key, lambda folder: _build(settings, tokenizer, folder)))


def open_prepared(directory: Path) -> Prepared:
    """Map the rows that another process prepared.

    Raises:
        MegatuneError: there are none, or they are not whole (exit code 66).
    """
    try:
        key = (directory / KEY_FILE).read_text(encoding="ascii").strip()
        report = DataReport.load(directory / REPORT_FILE)
    except (OSError, ValueError) as error:
        raise MegatuneError(Finding("no prepared data", str(directory)), ExitCode.INPUT) from error
    evaluation = directory / EVALUATION_FOLDER
    return Prepared(
        TokenRows(directory / TRAIN_FOLDER),
        TokenRows(evaluation) if evaluation.exists() else None,
        report,
        directory,
        key,
    )


def _build(settings: Settings, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Fill an empty folder: every sample's tokens once, then the rows of each part."""
    data, run = settings.data, settings.run
    training = resolve_datasets(data.dataset, data.dataset_dir, run.stage)
    evaluation = resolve_datasets(data.eval_dataset, data.dataset_dir, run.stage)
    encoder = make_encoder(settings, tokenizer)
    shape = RowShape(run.stage, data.cutoff_len, settings.packing, run.seed)
    # A run that only skips bad rows keeps them, too: one that asks for them later finds these rows prepared.
    policy = "error" if data.on_bad_row == "error" else "quarantine"
    with (
        RowsBuilder(folder, shape) as builder,
        BadRows(policy, data.truncation_strategy, folder) as bad_rows,
    ):
        collector = Collector(settings, encoder, builder, bad_rows)
        trained = [collector.collect(source) for source in training]
        evaluated = [collector.collect(source) for source in evaluation]
        collector.check()
        split = _split(trained, data.val_size)
        order = _training_order(settings, trained, split)
        report = DataReport(
            [one.report for one in (*trained, *evaluated)],
            train=builder.write_part(TRAIN_FOLDER, order),
            lengths=LengthReport.of(collector.lengths, data.cutoff_len),
            notes=[*_notes(encoder, split), *_unread_answers(training, run.stage)],
        )
        if data.val_size or evaluated:
            for one in evaluated:
                one.report.evaluation = len(one)
            held_out = [np.flatnonzero(split.held_out), *(one.numbers for one in evaluated)]
            report.evaluation = builder.write_part(EVALUATION_FOLDER, np.concatenate(held_out))
    report.save(folder / REPORT_FILE)


def _split(trained: Sequence[Collected], val_size: float) -> Split:
    """Over all training data: its samples are numbered from 0."""
    if val_size:
        return hold_out(np.concatenate([np.asarray(one.ranks) for one in trained]), val_size)
    none = np.zeros(sum(map(len, trained)), dtype=bool)
    return Split(none, none)


def _training_order(settings: Settings, trained: Sequence[Collected], split: Split) -> np.ndarray:
    """Numbers of the samples of an epoch, copies and mixing included; fills in the reports.

    Raises:
        MegatuneError: val_size leaves nothing of a data set that is drawn from (exit code 64).
    """
    data = settings.data
    lists = []
    for one in trained:
        held_out, left_out = split.held_out[one.numbers], split.left_out[one.numbers]
        kept = ~(held_out | left_out)
        one.report.trained, one.report.evaluation = int(kept.sum()), int(held_out.sum())
        one.report.leave_out(int(left_out.sum()), "held-out-copy", "the same texts as a held-out row")
        lists.append(np.repeat(one.numbers[kept], np.asarray(one.copies)[kept]))
    sizes = [len(numbers) for numbers in lists]
    if data.mix_strategy != "concat":
        findings = [
            Finding(
                f"val_size: {data.val_size:g} leaves nothing of {one.report.name} to train on",
                why=f"mix_strategy: {data.mix_strategy} draws from every data set",
                fix="hold out fewer rows, or name an eval_dataset",
            )
            for one, size in zip(trained, sizes, strict=True)
            if not size
        ]
        if findings:
            raise MegatuneError(findings, ExitCode.SETTINGS)
    mixed = mixed_order(sizes, data.mix_strategy, data.interleave_probs, data.dataset_weights, settings.run.seed)
    counts, _ = np.histogram(mixed, bins=np.cumsum([0, *sizes]))
    for one, count in zip(trained, counts.tolist(), strict=True):
        one.report.samples = count
    return np.concatenate(lists)[mixed]


def _notes(encoder: Encoder, split: Split) -> list[str]:
    notes = []
    if encoder.template is not None and (note := stop_note(encoder.template, encoder.tokenizer)):
        notes.append(note)
    if split.on_both_sides:
        notes.append(f"all rows have the same texts: {split.on_both_sides} are trained, the others held out")
    return notes


def _unread_answers(sources: Sequence[DatasetSource], stage: str) -> Iterator[str]:
    """Stage pt reads one column, and a user may expect the answers to be trained, too."""
    for source in sources if stage == "pt" else ():
        row = next((row.fields for row in source.rows() if row.error is None), {})
        if source.formatting == "alpaca" and row.get(source.columns.response or ""):
            prompt, response = source.columns.prompt, source.columns.response
            yield f"{source.name}: stage pt trains the column {prompt!r} alone; {response!r} is not read"
