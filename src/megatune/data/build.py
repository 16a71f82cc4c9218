"""Encoded samples to token rows: tokens are written once, then rows over them, for each part of the data."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatune.data.packing import concatenate, pack
from megatune.data.report import TokenReport
from megatune.data.rows import IGNORE_INDEX, Arrangement, Document, TokenWriter, write_rows

_FLUSH_TOKENS = 2**20


@dataclass(frozen=True, slots=True)
class RowShape:
    """How samples become rows.

    Attributes:
        stage: "sft": a sample is a document. "pt": a text, cut into pieces. "dpo": a pair of documents.
        cutoff_len: tokens of the longest document, and of a packed row.
        packing: rows hold several documents.
        seed: of the packing.
    """

    stage: str
    cutoff_len: int
    packing: bool
    seed: int


class RowsBuilder:
    """Fills a folder: `add` every sample, then `write_part` for each part; use as a context manager.

    Args:
        folder: exists and is empty.
    """

    def __init__(self, folder: Path, shape: RowShape) -> None:
        self._folder, self._shape = folder, shape
        self._writer = TokenWriter(folder)
        # Flat arrays, a few bytes a sample, so that tens of millions of samples fit.
        self._ends = array("q", [0])  # of each document's tokens
        self._samples = array("q", [0])  # where each sample's documents begin
        self._trained = array("i")  # tokens of each document
        self._largest = array("i")  # token id of each document
        self._unwritten: list[Document] = []
        self._num_unwritten = 0  # tokens

    def __enter__(self) -> RowsBuilder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._flush()
        finally:
            self._writer.__exit__(kind, error, trace)

    def __len__(self) -> int:
        """Samples added."""
        return len(self._samples) - 1

    def add(self, documents: Sequence[Document]) -> int:
        """Write one sample's tokens: one document, or a pair's chosen and rejected ones. Answers its number.

        Raises:
            ValueError: a document is empty, or has more or fewer labels than tokens.
        """
        for document in documents:
            size = len(document.input_ids)
            if size != len(document.labels) or not size:
                raise ValueError(f"a document of {size} tokens with {len(document.labels)} labels")
            self._unwritten.append(document)
            self._ends.append(self._ends[-1] + size)
            self._num_unwritten += size
        self._samples.append(len(self._ends) - 1)
        if self._num_unwritten >= _FLUSH_TOKENS:
            self._flush()
        return len(self) - 1

    def _flush(self) -> None:
        """Write what was added, and count it: many documents at once, since numpy's cost is by the call."""
        if not self._unwritten:
            return
        tokens, labels = self._writer.extend(self._unwritten)
        starts = np.cumsum([0, *(len(document.input_ids) for document in self._unwritten[:-1])])
        trained = labels != IGNORE_INDEX
        trained[starts] = False  # see num_trained_tokens
        self._trained.frombytes(np.add.reduceat(trained, starts, dtype=np.int32).tobytes())
        self._largest.frombytes(np.maximum.reduceat(tokens, starts).tobytes())
        self._unwritten, self._num_unwritten = [], 0

    def write_part(self, name: str, samples: Sequence[int] | np.ndarray) -> TokenReport:
        """Write the rows of these samples.

        Args:
            samples: numbers that `add` answered, in the order of the rows; one may come several times.
        """
        self._flush()
        samples = np.asarray(samples, dtype=np.int64)
        starts = np.asarray(self._samples, dtype=np.int64)
        per_sample = starts[samples + 1] - starts[samples]
        documents = np.repeat(starts[samples] - np.cumsum(per_sample) + per_sample, per_sample)
        documents += np.arange(len(documents))
        ends = np.asarray(self._ends)
        spans = np.stack((ends[documents], ends[documents + 1]), axis=1)
        arranged, rows, arrangement = self._arranged(spans)
        write_rows(self._folder / name, arranged, rows, arrangement)
        report = TokenReport(
            samples=len(samples),
            documents=len(arranged),
            rows=len(rows) - 1,
            capacity=self._shape.cutoff_len if arrangement == "packed" else None,
            tokens=int((arranged[:, 1] - arranged[:, 0]).sum()),
            trained=int(np.asarray(self._trained)[documents].sum(dtype=np.int64)),
            longest=int((arranged[:, 1] - arranged[:, 0]).max(initial=0)),
            largest_id=int(np.asarray(self._largest)[documents].max(initial=0)),
        )
        _sync(self._folder / name)
        return report

    def _arranged(self, spans: np.ndarray) -> tuple[np.ndarray, np.ndarray, Arrangement]:
        """Documents row by row, where rows begin among them, and what a row is."""
        shape = self._shape
        if shape.stage == "dpo":
            return spans, np.arange(0, len(spans) + 1, 2), "pairs"
        if shape.stage == "pt":
            spans, rows = concatenate(spans, shape.cutoff_len, joined=shape.packing)
            return spans, rows, "packed" if shape.packing else "single"
        if not shape.packing:
            return spans, np.arange(len(spans) + 1), "single"
        order, rows = pack(spans[:, 1] - spans[:, 0], shape.cutoff_len, shape.seed)
        return spans[order], rows, "packed"


def _sync(directory: Path) -> None:
    """A folder that is renamed must not be able to come back from a crash with empty files."""
    for path in directory.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
