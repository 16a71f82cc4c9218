"""Write encoded samples as token rows: tokens once, then rows that refer to them, for each part of the data.

Packing is best-fit decreasing over all documents: longest first, each into the fullest row that has room for it. The
number of rows tends to at most 11/9 of the minimum (Johnson, "Near-optimal bin packing algorithms", 1973); with many
short documents rows are almost full.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatune.config.groups.run import PAIR_STAGES
from megatune.data.companions import Companions
from megatune.data.media_table import MediaWriter
from megatune.data.order import packing_order
from megatune.data.report import TokenReport
from megatune.data.rows import (
    DESIRABLE,
    IGNORE_INDEX,
    LABEL,
    MARGIN,
    TOKENS_FILE,
    TRAINED_FILE,
    Arrangement,
    Document,
    write_rows,
)
from megatune.data.store import ColumnWriter

if TYPE_CHECKING:
    from megatune.config.settings import Settings
_FLUSH_TOKENS = 2**20


def pack(lengths: Sequence[int] | np.ndarray, capacity: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack whole documents into rows of at most `capacity` tokens.

    Deterministic; takes O(documents + capacity) time after the sort.

    Args:
        lengths: length of each document, 1 to `capacity`.
        seed: orders documents of the same length, so that neighbours in a file do not end up in one row.

    Returns:
        Document ids, row by row and ascending within a row: int64 [documents]; and the start of each row in them, with
        the end of the last: int64 [rows + 1].
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= capacity:
        raise ValueError(f"documents of {lengths.min()} to {lengths.max()} tokens for rows of {capacity}")
    shuffled = packing_order(len(lengths), seed)
    longest_first = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    rows = np.empty(len(lengths), dtype=np.int64)
    rows[longest_first] = _best_fit(lengths[longest_first].tolist(), capacity)
    documents = np.argsort(rows, kind="stable")
    return documents, np.concatenate(([0], np.cumsum(np.bincount(rows)))).astype(np.int64)


def _best_fit(lengths: list[int], capacity: int) -> list[int]:
    """Return the row of each document; lengths are in descending order.

    Rows with room for the present document are a stack with the fullest on top; rows without room wait until documents
    are short enough. Rows that return from waiting are fuller than all rows on the stack, and so is a row that is
    pushed back after a document was added.
    """
    waiting: list[list[int]] = [[] for _ in range(capacity)]  # by remaining room
    with_room: list[tuple[int, int]] = []  # (room, row)
    chosen: list[int] = []
    num_rows, previous = 0, capacity
    for length in lengths:
        for room in range(previous - 1, length - 1, -1):
            with_room += [(room, row) for row in waiting[room]]
        previous = length
        if with_room:
            room, row = with_room.pop()
        else:
            room, row = capacity, num_rows
            num_rows += 1
        chosen.append(row)
        room -= length
        if room >= length:
            with_room.append((room, row))
        else:
            waiting[room].append(row)
    return chosen


def concatenate(spans: np.ndarray, capacity: int, *, joined: bool) -> tuple[np.ndarray, np.ndarray]:
    """Split texts into rows of at most `capacity` tokens, in order and without loss.

    A piece that continues a text starts with the last token of the previous piece: the first token of a document is
    never predicted, so each token of a text except its first is predicted exactly once.

    Args:
        spans: int64 [texts, 2], start and end of each text's tokens; two tokens or more.
        joined: fill each row with consecutive texts; otherwise every text begins a new row.

    Returns:
        Pieces in order: int64 [pieces, 2]; and the start of each row in them: int64 [rows + 1].
    """
    pieces = array("q")  # flattened pairs: a list of ten million pairs would take a gigabyte
    rows = array("q", [0])
    room = capacity
    for start, stop in chain.from_iterable(part.tolist() for part in np.array_split(spans, len(spans) // 65536 + 1)):
        if room < 2 or not joined:
            if 2 * rows[-1] < len(pieces):
                rows.append(len(pieces) // 2)
            room = capacity
        while True:
            end = min(start + room, stop)
            pieces.extend((start, end))
            room -= end - start
            if end == stop:
                break
            rows.append(len(pieces) // 2)
            room, start = capacity, end - 1
    if 2 * rows[-1] < len(pieces):
        rows.append(len(pieces) // 2)
    return np.asarray(pieces, dtype=np.int64).reshape(-1, 2), np.asarray(rows, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class RowShape:
    """How samples are arranged in rows."""

    # sft, kto, cls: a sample is a document; pt: a text, which is split; dpo, rm: a pair of documents
    stage: str
    cutoff_len: int  # maximum document length in tokens
    packing: bool  # rows hold several samples
    seed: int  # of the packing

    @classmethod
    def of(cls, settings: Settings) -> RowShape:
        """Return the shape for these settings."""
        return cls(settings.run.stage, settings.data.cutoff_len, settings.packing, settings.run.seed)

    @property
    def capacity(self) -> int:
        """Tokens of a packed row: twice cutoff_len for pairs, so that both documents of a pair fit."""
        return 2 * self.cutoff_len if self.stage in PAIR_STAGES else self.cutoff_len

    def arranged(self, spans: np.ndarray) -> tuple[np.ndarray, np.ndarray, Arrangement]:
        """Return documents row by row, the start of each row in them, and the arrangement.

        Args:
            spans: [documents, 2], start and end of the tokens of each document of the samples.
        """
        if self.stage in PAIR_STAGES:
            if not self.packing:
                return spans, np.arange(0, len(spans) + 1, 2), "pairs"
            pairs, rows = pack((spans[:, 1] - spans[:, 0]).reshape(-1, 2).sum(axis=1), self.capacity, self.seed)
            return spans.reshape(-1, 2, 2)[pairs].reshape(-1, 2), 2 * rows, "packed_pairs"
        if self.stage == "pt":
            spans, rows = concatenate(spans, self.cutoff_len, joined=self.packing)
            return spans, rows, "packed" if self.packing else "single"
        order, rows, arrangement = self.ordered(spans[:, 1] - spans[:, 0])
        return spans[order], rows, arrangement

    def ordered(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, Arrangement]:
        """Return single-document samples row by row, int64 [documents], the start of each row, and the arrangement.

        Args:
            sizes: int64 [documents], the number of tokens that each occupies in a packed row.
        """
        if not self.packing:
            return np.arange(len(sizes)), np.arange(len(sizes) + 1), "single"
        return *pack(sizes, self.capacity, self.seed), "packed"


class RowsBuilder:
    """Writes token rows into a folder: `add` every sample, then `write_part` for each part; a context manager.

    Args:
        folder: an existing folder without token files.
    """

    def __init__(self, folder: Path, shape: RowShape) -> None:
        self._folder, self._shape = folder, shape
        self._tokens = ColumnWriter(folder / TOKENS_FILE, np.int32)
        self._labelled = ColumnWriter(folder / TRAINED_FILE, np.uint8)
        self._media = MediaWriter(folder)
        self._columns = (self._tokens, self._labelled, *self._media.columns)
        # Flat arrays with a few bytes per sample, for tens of millions of samples.
        self._ends = array("q", [0])  # end of each document's tokens
        self._samples = array("q", [0])  # start of each sample's documents
        self._trained = array("i")  # trained tokens of each document, without its first
        self._largest = array("i")  # largest token id of each document
        self._desirable = array("b")  # for each document in stage kto
        self._margins = array("f")  # the margin of the pair, for each document
        self._labels = array("f")  # for each document in stage cls, with a fixed number of values
        self._unwritten: list[Document] = []
        self._num_unwritten = 0  # tokens

    def __enter__(self) -> RowsBuilder:
        return self

    def __exit__(self, *_: object) -> None:
        for column in self._columns:
            column.close()

    def __len__(self) -> int:
        """Return the number of samples added."""
        return len(self._samples) - 1

    def add(
        self,
        documents: Sequence[Document],
        margin: float = 0.0,
        desirable: bool | None = None,
        label: tuple[float, ...] | None = None,
    ) -> int:
        """Write one sample's tokens: one document, or the chosen and rejected ones of a pair; return its index.

        Args:
            desirable: whether the answer is desirable (stage kto).
            label: the encoded label (stage cls).

        Raises:
            ValueError: a document is empty, or its numbers of labels and tokens differ.
        """
        for document in documents:
            size = len(document.input_ids)
            if size != len(document.labels) or not size:
                raise ValueError(f"a document of {size} tokens with {len(document.labels)} labels")
            self._media.add(self._ends[-1], document.media)
            self._unwritten.append(document._replace(media=()))  # written already, and may be large
            self._ends.append(self._ends[-1] + size)
            self._margins.append(margin)
            self._num_unwritten += size
        self._samples.append(len(self._ends) - 1)
        if desirable is not None:
            self._desirable.append(desirable)
        if label is not None:
            self._labels.extend(label)
        if self._num_unwritten >= _FLUSH_TOKENS:
            self._flush()
        return len(self) - 1

    def _flush(self) -> None:
        """Write and count the buffered documents, many at once, since numpy's overhead is per call."""
        if self._unwritten:
            tokens = np.concatenate([document.input_ids for document in self._unwritten], dtype=np.int32)
            labels = np.concatenate([document.labels for document in self._unwritten], dtype=np.int32)
            trained = labels != IGNORE_INDEX
            self._tokens.append(tokens)
            self._labelled.append(trained)
            starts = np.cumsum([0, *(len(document.input_ids) for document in self._unwritten[:-1])])
            trained[starts] = False  # a document's first token is never predicted
            self._trained.frombytes(np.add.reduceat(trained, starts, dtype=np.int32).tobytes())
            self._largest.frombytes(np.maximum.reduceat(tokens, starts).tobytes())
            self._unwritten, self._num_unwritten = [], 0

    def write_part(self, name: str, samples: Sequence[int] | np.ndarray) -> TokenReport:
        """Write the rows of these samples.

        Args:
            samples: indices returned by `add`, in the order of the rows; may contain repeats.
        """
        self._flush()
        for column in self._columns:
            column.seal()
        samples = np.asarray(samples, dtype=np.int64)
        starts = np.asarray(self._samples, dtype=np.int64)
        per_sample = starts[samples + 1] - starts[samples]
        documents = np.repeat(starts[samples] - np.cumsum(per_sample) + per_sample, per_sample)
        documents += np.arange(len(documents))
        ends = np.asarray(self._ends)
        spans = np.stack((ends[documents], ends[documents + 1]), axis=1)
        extras: dict[str, np.ndarray] = {}
        companions: Companions | None = None
        if self._shape.stage == "kto":
            companions = Companions.find(self._folder, spans, self._shape.cutoff_len)
            # A companion gets the same row as its document, so rows need room for the longer of the two.
            order, rows, arrangement = self._shape.ordered(np.maximum(spans[:, 1] - spans[:, 0], companions.sizes))
            spans, companions = spans[order], companions.reordered(order)
            extras[DESIRABLE] = np.asarray(self._desirable, dtype=bool)[documents[order]]
        else:
            spans, rows, arrangement = self._shape.arranged(spans)
        of_spans = np.searchsorted(ends, spans[:, 0], side="right") - 1
        if self._shape.stage == "rm":
            extras[MARGIN] = np.asarray(self._margins)[of_spans]
        elif self._shape.stage == "cls":
            extras[LABEL] = np.asarray(self._labels).reshape(len(self), -1)[of_spans]
        written = write_rows(self._folder / name, spans, rows, arrangement, extras)
        if companions is not None:
            companions.write(self._folder / name)
        lengths = spans[:, 1] - spans[:, 0]
        return TokenReport(
            samples=len(samples),
            documents=len(spans),
            rows=len(rows) - 1,
            capacity=self._shape.capacity if self._shape.packing else None,
            tokens=int(lengths.sum()),
            trained=int(np.asarray(self._trained)[documents].sum(dtype=np.int64)),
            longest=int(lengths.max(initial=0)),
            largest_id=int(np.asarray(self._largest)[documents].max(initial=0)),
            media=written.count_media(),
            desirable=int(extras[DESIRABLE].sum()) if DESIRABLE in extras else None,
        )
