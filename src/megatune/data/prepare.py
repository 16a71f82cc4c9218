"""From a user's settings to token rows on disk: read, render, tokenise, hold out rows for evaluation, report.

One process a node prepares; all others open what it made.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatune.data.encode import Encoder, check_pretraining_tokenizer
from megatune.data.formats import RowError
from megatune.data.key import prepared_key
from megatune.data.order import split_order
from megatune.data.report import DataReport, DatasetReport, TokenReport
from megatune.data.rows import Document, RowWriter, TokenRows, atomic_directory, num_trained_tokens
from megatune.data.samples import read_samples
from megatune.data.sources import DatasetSource, resolve_datasets
from megatune.data.templates import load_template
from megatune.data.workers import encode_all
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatune.config.settings import Settings

__all__ = ["Prepared", "open_prepared", "prepare", "prepared_key"]

TRAIN_FOLDER = "train"
EVALUATION_FOLDER = "evaluation"
REPORT_FILE = "report.json"


@dataclass(frozen=True, slots=True)
class Prepared:
    """The rows of a run.

    Attributes:
        evaluation: None where nothing is held out and no eval_dataset is set.
    """

    train: TokenRows
    evaluation: TokenRows | None
    report: DataReport


def prepare(settings: Settings, tokenizer: PreTrainedTokenizerBase, directory: Path) -> Prepared:
    """Make the token rows of a run in `directory`, or open them where they are made already.

    Args:
        directory: named by `prepared_key`, so that what is there is what would be made.

    Raises:
        MegatuneError: settings that do not fit the data (exit code 64), a data set without one usable row or a file
            that cannot be read as a whole (65), a missing file or a tokenizer that does not fit (66), a full or
            read-only disk (73).
    """
    if (directory / REPORT_FILE).exists():
        return open_prepared(directory)
    train = resolve_datasets(settings.data.dataset, settings.data.dataset_dir)
    evaluation = resolve_datasets(settings.data.eval_dataset, settings.data.dataset_dir)
    _check(settings, [*train, *evaluation])
    encoder = _encoder(settings, tokenizer)
    with atomic_directory(directory) as folder:
        preparation = _Preparation(settings, encoder, folder)
        preparation.add_training(train)
        if evaluation:
            preparation.add_evaluation(evaluation)
        preparation.report.save(folder / REPORT_FILE)
    return open_prepared(directory)


def open_prepared(directory: Path) -> Prepared:
    """Map the rows that another process prepared.

    Raises:
        MegatuneError: there are none, or they are not whole (exit code 66).
    """
    if not (directory / REPORT_FILE).exists():
        raise MegatuneError(Finding("no prepared data", str(directory)), ExitCode.INPUT)
    evaluation = directory / EVALUATION_FOLDER
    return Prepared(
        TokenRows(directory / TRAIN_FOLDER),
        TokenRows(evaluation) if evaluation.exists() else None,
        DataReport.load(directory / REPORT_FILE),
    )


def _check(settings: Settings, sources: Sequence[DatasetSource]) -> None:
    data = settings.data
    findings = []
    if not data.dataset:
        findings.append(Finding("dataset: no data set to train on", mend="name one of dataset_info.json, or a path"))
    if data.eval_dataset and data.val_size:
        findings.append(Finding("val_size and eval_dataset exclude each other", mend="remove one of them"))
    if data.train_on_prompt and data.mask_history:
        findings.append(Finding("train_on_prompt and mask_history exclude each other", mend="remove one of them"))
    if settings.run.stage == "pt":
        findings += [
            Finding(f"dataset: {source.name} has conversations, stage pt trains text", mend="stage: sft")
            for source in sources
            if source.formatting != "alpaca"
        ]
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)


def _encoder(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> Encoder:
    data = settings.data
    if settings.run.stage == "pt":
        check_pretraining_tokenizer(tokenizer)
        return Encoder(tokenizer, None, data.cutoff_len)
    template = load_template(data.template, tokenizer, data.default_system)
    return Encoder(tokenizer, template, data.cutoff_len, data.train_on_prompt, data.mask_history, data.enable_thinking)


@dataclass(frozen=True, slots=True)
class _Usable:
    """A row of a file that gave documents.

    Attributes:
        index: its number among all rows read, dropped ones included.
    """

    index: int
    dataset: DatasetReport
    copies: int
    documents: Sequence[Document]


class _Preparation:
    """Fills a folder with train/ and evaluation/, counting as it goes."""

    def __init__(self, settings: Settings, encoder: Encoder, folder: Path) -> None:
        self._settings = settings
        self._encoder = encoder
        self._folder = folder
        self.report = DataReport([], TokenReport())

    def add_training(self, sources: Sequence[DatasetSource]) -> None:
        """Write train/, and evaluation/ where val_size holds rows out."""
        if self._settings.data.val_size:
            self._write_divided(sources)
            return
        with self._writer(TRAIN_FOLDER, self.report.train) as writer:
            for usable in self._encoded(sources):
                self._train_on(usable, writer)

    def add_evaluation(self, sources: Sequence[DatasetSource]) -> None:
        """Write evaluation/ from data sets of its own."""
        self.report.evaluation = evaluation = TokenReport()
        with self._writer(EVALUATION_FOLDER, evaluation) as writer:
            for usable in self._encoded(sources):
                self._evaluate_on(usable, writer, evaluation)

    @contextmanager
    def _writer(self, name: str, report: TokenReport) -> Iterator[RowWriter]:
        """Writes rows, packed where the settings say so, and counts them."""
        data, seed = self._settings.data, self._settings.run.seed
        report.capacity = data.cutoff_len if data.packing else None
        with RowWriter(self._folder / name, report.capacity, seed) as writer:
            yield writer
        report.rows = writer.num_rows

    def _write_divided(self, sources: Sequence[DatasetSource]) -> None:
        """Which rows are usable is known at the end only, so all are written to one side first."""
        aside = self._folder / "undivided"
        written: list[tuple[int, DatasetReport, int, range]] = []
        num_documents = 0
        with RowWriter(aside) as writer:
            for usable in self._encoded(sources):
                for document in usable.documents:
                    writer.append(*document)
                ids = range(num_documents, num_documents + len(usable.documents))
                num_documents = ids.stop
                written.append((usable.index, usable.dataset, usable.copies, ids))
        rows = TokenRows(aside)
        held_out = self._held_out([index for index, *_ in written])
        self.report.evaluation = evaluation = TokenReport()
        with (
            self._writer(TRAIN_FOLDER, self.report.train) as train,
            self._writer(EVALUATION_FOLDER, evaluation) as held,
        ):
            for index, dataset, copies, ids in written:
                usable = _Usable(index, dataset, copies, [rows[i][0] for i in ids])
                if index in held_out:
                    self._evaluate_on(usable, held, evaluation)
                else:
                    self._train_on(usable, train)
        shutil.rmtree(aside)

    def _held_out(self, usable: list[int]) -> set[int]:
        """The rows that val_size holds out: the first usable ones in an order that seed and rows read determine."""
        val_size = self._settings.data.val_size
        count = int(val_size) if val_size >= 1 else ceil(val_size * len(usable))
        if count >= len(usable):
            raise MegatuneError(
                Finding(
                    f"val_size: {val_size:g} leaves nothing to train on",
                    why=f"{len(usable)} rows are usable",
                    mend=f"at most {len(usable) - 1}",
                ),
                ExitCode.SETTINGS,
            )
        num_read = sum(dataset.read for dataset in self.report.datasets)
        rank = np.empty(num_read, dtype=np.int64)
        rank[split_order(num_read, self._settings.run.seed)] = np.arange(num_read)
        return set(sorted(usable, key=rank.__getitem__)[:count])

    def _train_on(self, usable: _Usable, writer: RowWriter) -> None:
        usable.dataset.trained += 1
        for _ in range(usable.copies):
            _append(usable.documents, writer, self.report.train)

    def _evaluate_on(self, usable: _Usable, writer: RowWriter, report: TokenReport) -> None:
        usable.dataset.evaluation += 1
        _append(usable.documents, writer, report)

    def _encoded(self, sources: Sequence[DatasetSource]) -> Iterator[_Usable]:
        """Usable rows of all data sets, in order; the others are counted.

        Raises:
            MegatuneError: data sets without a usable row (exit code 65), all of them named.
        """
        first = len(self.report.datasets)
        index = 0
        data = self._settings.data
        for source in sources:
            dataset = DatasetReport(source.name)
            self.report.datasets.append(dataset)
            samples = read_samples(
                source,
                stage=self._settings.run.stage,
                seed=self._settings.run.seed,
                max_samples=data.max_samples,
                placeholders={"{{name}}": data.model_name, "{{author}}": data.model_author},
            )
            for sample, encoded in encode_all(self._encoder, samples, data.preprocessing_num_workers or 1):
                dataset.read += 1
                index += 1
                if isinstance(encoded, RowError):
                    dataset.drop(sample.where, encoded.reason, encoded.detail)
                    continue
                dataset.truncated += encoded.truncated
                yield _Usable(index - 1, dataset, sample.copies, encoded.documents)
        _check_usable(self.report.datasets[first:])


def _check_usable(datasets: Sequence[DatasetReport]) -> None:
    findings = [
        Finding(
            f"{dataset.name}: 0 usable of {dataset.read} rows",
            why="; ".join(f"{count} x {reason}" for reason, count in dataset.dropped.most_common()),
            mend=f"the first: {dataset.examples[0]}" if dataset.examples else "the files have no rows",
        )
        for dataset in datasets
        if dataset.read == dataset.dropped.total()
    ]
    if findings:
        raise MegatuneError(findings, ExitCode.DATA)


def _append(documents: Sequence[Document], writer: RowWriter, report: TokenReport) -> None:
    for document in documents:
        writer.append(*document)
        report.add(document.input_ids, num_trained_tokens(document.labels))
