"""Tokenized rows on disk, memory-mapped by every rank and worker. Each sample's tokens are stored once; rows refer to
them.

    FOLDER/tokens.npy                   int32, the tokens of all samples, concatenated
    FOLDER/trained.npy                  uint8, 1 if the token is trained
    FOLDER/media.npy, sources.npy, files.npy    images and videos, see `data.media_table`
    FOLDER/PART/documents.npy           int64 [documents, 2]: start and end of each document in tokens.npy, row by row
    FOLDER/PART/rows.npy                int64 [rows + 1]: start of each row in documents.npy
    FOLDER/PART/extra-NAME.npy          extra values of every document, [documents, ...]
    FOLDER/PART/companions.npy          stage kto only, see `data.companions`
    FOLDER/PART/manifest.json           the arrangement of the rows, and a digest of all of the above

Arrays are written by `data.store` with digests. The digests of media and of a part's arrays are checked when the part
is opened, those of tokens when they are read. A part (train, evaluation) may use a sample several times, in any order,
or in overlapping pieces.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple, Self, cast

import numpy as np
import xxhash

from megatune.data.cache import mark_damaged
from megatune.data.media_table import DocumentMedia, MediaCounts, MediaTable
from megatune.data.store import Column, write_array
from megatune.errors import ExitCode, Finding, MegatuneError

# Extra values of documents: in stage kto whether the answer is desirable, bool; in stage rm the margin of the pair, in
# both of its documents; in stage cls the label as encoded by `formats.labels`, fp32 [n].
DESIRABLE, MARGIN, LABEL = "desirable", "margin", "label"
IGNORE_INDEX = -100  # the label of tokens that are not trained, as in Transformers and torch

TOKENS_FILE = "tokens.npy"
TRAINED_FILE = "trained.npy"
_DOCUMENTS_FILE = "documents.npy"
_ROWS_FILE = "rows.npy"
_MANIFEST_FILE = "manifest.json"
# What numpy raises for truncated files, and for files that are not arrays.
_UNREADABLE = (OSError, ValueError, KeyError, OverflowError, MemoryError, EOFError, SyntaxError, TypeError)

# A row holds one document, several packed documents, one preference pair (chosen, rejected), or several packed pairs.
Arrangement = Literal["single", "packed", "pairs", "packed_pairs"]


class Document(NamedTuple):
    """One sequence, whose tokens attend only to each other: a sample, or a piece of a long text."""

    input_ids: np.ndarray  # int32 [T]
    labels: np.ndarray  # int32 [T], not shifted, as in Transformers; IGNORE_INDEX for tokens that are not trained
    media: tuple[DocumentMedia, ...] = ()  # in the order of their tokens


class ExtraColumn(NamedTuple):
    """Extra values of documents."""

    per: Literal["token", "document"]
    values: np.ndarray  # concatenated over documents: [tokens, ...] or [documents, ...]


ColumnFile = tuple[str, Path]  # the name of extra values of documents, and their .npy file outside the rows' folder


class TokenRows:
    """Memory-mapped rows of one part, written by `write_rows`; cheap to open, to pickle and to share between processes.

    Args:
        columns: extra values in addition to those in the folder.

    Raises:
        MegatuneError: the folder is incomplete, or a column does not match it (exit code 66).
    """

    def __init__(self, directory: Path | str, columns: Sequence[ColumnFile] = ()) -> None:
        self.directory, self._columns = Path(directory), tuple(columns)
        try:
            self._manifest: dict[str, str] = json.loads((self.directory / _MANIFEST_FILE).read_text(encoding="ascii"))
            self.arrangement: Arrangement = self._manifest["arrangement"]  # type: ignore[assignment]
            self._documents = Column(self.directory / _DOCUMENTS_FILE).whole()
            self._rows = Column(self.directory / _ROWS_FILE).whole()
            self._tokens = Column(self.directory.parent / TOKENS_FILE)
            self._trained = Column(self.directory.parent / TRAINED_FILE)
            self._media = MediaTable(self.directory.parent)
            files = sorted(self.directory.glob("extra-*.npy"))
            self._extras = {file.stem.removeprefix("extra-"): Column(file).whole() for file in files}
        except _UNREADABLE as error:
            raise self._incomplete(str(error)) from error
        self._added = {name: self._added_column(name, path) for name, path in self._columns}

    def __len__(self) -> int:
        return len(self._rows) - 1

    def __getitem__(self, row: int) -> tuple[Document, ...]:
        """Return the documents of one row."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return tuple(map(self._document, range(self._rows[row], self._rows[row + 1])))

    def __iter__(self) -> Iterator[tuple[Document, ...]]:
        return (self[row] for row in range(len(self)))

    def __reduce__(self) -> tuple[type, tuple[Path, tuple[ColumnFile, ...]]]:
        return type(self), (self.directory, self._columns)

    def with_column(self, name: str, path: Path) -> Self:
        """Return the same rows with extra values from a file, which `digest` does not cover.

        Args:
            path: an .npy file, [documents, ...] in the order of `spans`.

        Raises:
            MegatuneError: the file cannot be read, or has another number of values (exit code 66).
        """
        kind, arguments = self.__reduce__()  # the columns are the last argument
        return cast(Self, kind(*arguments[:-1], (*self._columns, (name, Path(path)))))

    @property
    def is_packed(self) -> bool:
        """Whether a row holds several packed documents or pairs."""
        return self.arrangement in ("packed", "packed_pairs")

    @property
    def is_pairs(self) -> bool:
        """Whether documents are preference pairs (chosen, rejected, chosen, rejected ...); a pair is in one row."""
        return self.arrangement in ("pairs", "packed_pairs")

    @property
    def spans(self) -> np.ndarray:
        """Start and end of each document among all tokens, row by row: int64 [documents, 2]."""
        return self._documents

    @property
    def digest(self) -> str:
        """128-bit digest of the rows' content, in hexadecimal: from the manifest, or else computed."""
        return self._manifest.get("digest") or self._content_digest()

    def extras(self, rows: Sequence[int] | np.ndarray) -> dict[str, ExtraColumn]:
        """Return the extra values of these rows' documents by name, row by row."""
        numbers = self.document_numbers(rows)
        extras = {**self._extras, **self._added}
        return {name: ExtraColumn("document", values[numbers]) for name, values in extras.items()}

    def document_lengths(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the length of each document of these rows, without reading tokens: int64 [documents]."""
        return self._sizes[self.document_numbers(rows)]

    def document_numbers(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the indices of these rows' documents among all documents: int64 [documents]."""
        none = np.arange(0, dtype=np.int64)
        return np.concatenate([none, *(np.arange(self._rows[row], self._rows[row + 1]) for row in rows)])

    def row_lengths(self) -> np.ndarray:
        """Return the number of tokens of every row, without reading them: int64 [rows]."""
        return self._ends[self._rows[1:]] - self._ends[self._rows[:-1]]

    def batch_lengths(self) -> np.ndarray:
        """Return the length of a micro-batch with only this row, for each row: int64 [rows]; a pair has the length of
        its longer document."""
        if self.arrangement != "pairs":
            return self.row_lengths()
        return np.asarray(self._sizes.reshape(-1, 2).max(axis=1))

    @property
    def _sizes(self) -> np.ndarray:
        """Length of each document: int64 [documents]."""
        return self._documents[:, 1] - self._documents[:, 0]

    @cached_property
    def _ends(self) -> np.ndarray:
        """Cumulative lengths of documents: int64 [documents + 1]."""
        return np.concatenate(([0], np.cumsum(self._sizes)))

    def count_media(self) -> MediaCounts:
        """Count the images and videos of all rows."""
        return self._media.count(self._documents, self._rows)

    def _content_digest(self) -> str:
        state = xxhash.xxh3_128(self.arrangement.encode())
        records, sources = self._media.digested()
        places = (self._documents, self._rows, records, sources)
        for array in (self._tokens.values, self._trained.values, *places, *self._extras.values()):
            state.update(f"{array.dtype.str}{array.shape}".encode())
            state.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return state.hexdigest()

    def _document(self, number: int) -> Document:
        """Return a document by its index among all documents."""
        start, stop = self._documents[number]
        try:
            input_ids, trained = self._tokens.read(start, stop), self._trained.read(start, stop)
            media = self._media.between(start, stop)
        except ValueError as error:
            raise self._incomplete(str(error)) from error
        labels = np.where(trained != 0, input_ids, np.int32(IGNORE_INDEX))
        return Document(np.asarray(input_ids), labels, media)

    def _added_column(self, name: str, path: Path) -> np.ndarray:
        try:
            values: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
            if len(values) != len(self._documents):
                raise ValueError(f"{len(values)} values of {name} for {len(self._documents)} documents")
        except (OSError, ValueError) as error:
            what, fix = "values of token rows are incomplete", "delete the file; it is recreated"
            raise MegatuneError(Finding(what, str(path), str(error), fix), ExitCode.INPUT) from error
        return values

    def _incomplete(self, why: str) -> MegatuneError:
        mark_damaged(self.directory.parent)
        what, fix = "the folder of token rows is incomplete", "run the command again: it prepares the rows again"
        return MegatuneError(Finding(what, str(self.directory), why, fix), ExitCode.INPUT)


def write_rows(
    directory: Path, spans: np.ndarray, rows: np.ndarray, arrangement: Arrangement, extras: Mapping[str, np.ndarray]
) -> TokenRows:
    """Write one part: rows that refer to the tokens in the parent folder.

    Args:
        spans: [documents, 2], start and end of each document's tokens, row by row.
        rows: [rows + 1], start of each row in `spans`.
        extras: extra values of all documents by name, in the order of `spans`.
    """
    directory.mkdir()
    write_array(directory / _DOCUMENTS_FILE, np.asarray(spans, dtype=np.int64))
    write_array(directory / _ROWS_FILE, np.asarray(rows, dtype=np.int64))
    for name, values in extras.items():
        write_array(directory / f"extra-{name}.npy", values)
    path = directory / _MANIFEST_FILE
    path.write_text(json.dumps({"arrangement": arrangement}), encoding="ascii")
    written = TokenRows(directory)
    path.write_text(json.dumps({"arrangement": arrangement, "digest": written.digest}), encoding="ascii")
    return written
