"""Token rows on disk: every sample's tokens once, and rows that refer to them; memory-mapped by every rank and worker.

    FOLDER/tokens.npy                   int32, sample after sample
    FOLDER/trained.npy                  uint8, 1 where a token is trained
    FOLDER/pictures.npy, sources.npy, files.npy    the pictures among the tokens, see `data.pictures`
    FOLDER/PART/documents.npy           int64 [documents, 2]: where each document's tokens begin and end, row after row
    FOLDER/PART/rows.npy                int64 [rows + 1]: where each row's documents begin in documents.npy
    FOLDER/PART/extra-NAME.npy          values of every document, [documents, ...]
    FOLDER/PART/companions.npy          of stage kto, see `data.companions`
    FOLDER/PART/manifest.json           what a row is, and a digest of all of this

All are arrays of `data.store`: those of pictures and of a part are compared with their digests when the part is opened,
tokens when they are read. A part (train, evaluation) may use a sample several times, in any order, or in overlapping
pieces.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple, Self, cast

import numpy as np
import xxhash

from megatune.data.cache import mark_damaged
from megatune.data.pictures import DocumentPicture, PictureCounts, PictureTable
from megatune.data.store import Column, write_array
from megatune.errors import ExitCode, Finding, MegatuneError

# Extras of documents: of stage kto, whether the answer is one that is wanted, bool; of stage rm, by how much the chosen
# answer is to be ahead, in both documents of a pair; of stage cls, what `formats.labels` makes of a label, fp32 [n].
DESIRABLE, MARGIN, LABEL = "desirable", "margin", "label"
IGNORE_INDEX = -100  # the label of a token that is not trained, in Transformers and in torch

TOKENS_FILE = "tokens.npy"
TRAINED_FILE = "trained.npy"
_DOCUMENTS_FILE = "documents.npy"
_ROWS_FILE = "rows.npy"
_MANIFEST_FILE = "manifest.json"
# What numpy raises where a file says that it has more than there is, or is no array at all.
_UNREADABLE = (OSError, ValueError, KeyError, OverflowError, MemoryError, EOFError, SyntaxError, TypeError)

# What a row is: one document, several that are trained side by side, or a preference pair: chosen, then rejected; of
# pairs, too, several can be side by side.
Arrangement = Literal["single", "packed", "pairs", "packed_pairs"]


class Document(NamedTuple):
    """Tokens that attend to each other: a sample, or a piece of a long text."""

    input_ids: np.ndarray  # int32 [T]
    labels: np.ndarray  # int32 [T], that of token i at i (not shifted, as Transformers'); IGNORE_INDEX: not trained
    pictures: tuple[DocumentPicture, ...] = ()  # in the order of their tokens


class ExtraColumn(NamedTuple):
    """Extra values of documents."""

    per: Literal["token", "document"]
    values: np.ndarray  # one document after the other: [tokens, ...] or [documents, ...]


ColumnFile = tuple[str, Path]  # the name of extra values of documents, and an .npy file outside the folder of the rows


class TokenRows:
    """Memory-mapped rows of one part, that `write_rows` wrote; cheap to open, to pickle and to share between processes.

    Args:
        columns: extra values beside those in the folder.

    Raises:
        MegatuneError: the folder is not whole, or a column does not fit it (exit code 66).
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
            self._pictures = PictureTable(self.directory.parent)
            files = sorted(self.directory.glob("extra-*.npy"))
            self._extras = {file.stem.removeprefix("extra-"): Column(file).whole() for file in files}
        except _UNREADABLE as error:
            raise self._not_whole(str(error)) from error
        self._added = {name: self._added_column(name, path) for name, path in self._columns}

    def __len__(self) -> int:
        return len(self._rows) - 1

    def __getitem__(self, row: int) -> tuple[Document, ...]:
        """Return the documents of one row."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return tuple(map(self._numbered, range(self._rows[row], self._rows[row + 1])))

    def __iter__(self) -> Iterator[tuple[Document, ...]]:
        return (self[row] for row in range(len(self)))

    def __reduce__(self) -> tuple[type, tuple[Path, tuple[ColumnFile, ...]]]:
        return type(self), (self.directory, self._columns)

    def with_column(self, name: str, path: Path) -> Self:
        """Return the same rows with extra values from a file, which `digest` is without.

        Args:
            path: an .npy file, [documents, ...] in the order of `spans`.

        Raises:
            MegatuneError: the file cannot be read, or has more or fewer values (exit code 66).
        """
        kind, arguments = self.__reduce__()  # of which the columns are the last
        return cast(Self, kind(*arguments[:-1], (*self._columns, (name, Path(path)))))

    @property
    def is_packed(self) -> bool:
        """Whether a row holds documents side by side, or pairs of them."""
        return self.arrangement in ("packed", "packed_pairs")

    @property
    def is_pairs(self) -> bool:
        """Whether documents are pairs: chosen, rejected, chosen, rejected ...; a row has both of a pair."""
        return self.arrangement in ("pairs", "packed_pairs")

    @property
    def spans(self) -> np.ndarray:
        """Where each document's tokens begin and end among all tokens, row by row: int64 [documents, 2]."""
        return self._documents

    @property
    def digest(self) -> str:
        """128 bits of the content of the rows, in hexadecimal: as noted when they were written, or computed here."""
        return self._manifest.get("digest") or self._content_digest()

    def extras(self, rows: Sequence[int] | np.ndarray) -> dict[str, ExtraColumn]:
        """Return the extra values of the documents of these rows, row by row, by name."""
        numbers = self.document_numbers(rows)
        extras = {**self._extras, **self._added}
        return {name: ExtraColumn("document", values[numbers]) for name, values in extras.items()}

    def document_lengths(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return tokens of each document of these rows, row by row, without reading them: int64 [documents]."""
        return self._sizes[self.document_numbers(rows)]

    def document_numbers(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the number among all documents of each document of these rows, row by row: int64 [documents]."""
        none = np.arange(0, dtype=np.int64)
        return np.concatenate([none, *(np.arange(self._rows[row], self._rows[row + 1]) for row in rows)])

    def row_lengths(self) -> np.ndarray:
        """Return tokens of every row, without reading them: int64 [rows]."""
        return self._ends[self._rows[1:]] - self._ends[self._rows[:-1]]

    def batch_lengths(self) -> np.ndarray:
        """Return the length of a micro-batch of each row alone: int64 [rows]. Of a pair its longer answer counts."""
        if self.arrangement != "pairs":
            return self.row_lengths()
        return np.asarray(self._sizes.reshape(-1, 2).max(axis=1))

    @property
    def _sizes(self) -> np.ndarray:
        """Tokens of each document: int64 [documents]."""
        return self._documents[:, 1] - self._documents[:, 0]

    @cached_property
    def _ends(self) -> np.ndarray:
        """Tokens of the documents before each one, and of all: int64 [documents + 1]."""
        return np.concatenate(([0], np.cumsum(self._sizes)))

    def count_pictures(self) -> PictureCounts:
        """Count the pictures of all rows."""
        tokens = np.concatenate(([0], np.cumsum(self._pictures.tokens_between(self._documents))))
        of_rows = tokens[self._rows[1:]] - tokens[self._rows[:-1]]
        return replace(self._pictures.count(self._documents), of_row=int(of_rows.max(initial=0)))

    def _content_digest(self) -> str:
        state = xxhash.xxh3_128(self.arrangement.encode())
        records, sources = self._pictures.digested()
        places = (self._documents, self._rows, records, sources)
        for array in (self._tokens.values, self._trained.values, *places, *self._extras.values()):
            state.update(f"{array.dtype.str}{array.shape}".encode())
            state.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return state.hexdigest()

    def _numbered(self, number: int) -> Document:
        """Return a document by its number among all."""
        start, stop = self._documents[number]
        try:
            input_ids, trained = self._tokens.read(start, stop), self._trained.read(start, stop)
            pictures = self._pictures.between(start, stop)
        except ValueError as error:
            raise self._not_whole(str(error)) from error
        labels = np.where(trained != 0, input_ids, np.int32(IGNORE_INDEX))
        return Document(np.asarray(input_ids), labels, pictures)

    def _added_column(self, name: str, path: Path) -> np.ndarray:
        try:
            values: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
            if len(values) != len(self._documents):
                raise ValueError(f"{len(values)} values of {name} for {len(self._documents)} documents")
        except (OSError, ValueError) as error:
            what, fix = "values of token rows are incomplete", "delete the file; it is recreated"
            raise MegatuneError(Finding(what, str(path), str(error), fix), ExitCode.INPUT) from error
        return values

    def _not_whole(self, why: str) -> MegatuneError:
        mark_damaged(self.directory.parent)
        what, fix = "the folder of token rows is incomplete", "run the command again: it prepares the rows again"
        return MegatuneError(Finding(what, str(self.directory), why, fix), ExitCode.INPUT)


def write_rows(
    directory: Path, spans: np.ndarray, rows: np.ndarray, arrangement: Arrangement, extras: Mapping[str, np.ndarray]
) -> TokenRows:
    """Write one part: rows that refer to the tokens of the folder above.

    Args:
        spans: [documents, 2], where each document's tokens begin and end, row after row.
        rows: [rows + 1], where each row's documents begin in `spans`.
        extras: extra values of all documents, in their order, by name.
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
