"""Token rows on disk: every sample's tokens once, and rows that refer to them; memory-mapped by every rank and worker.

    FOLDER/tokens.bin           int32, sample after sample
    FOLDER/trained.bin          uint8, 1 where a token is trained
    FOLDER/PART/documents.npy   int64 [documents, 2]: where each document's tokens begin and end, row after row
    FOLDER/PART/rows.npy        int64 [rows + 1]: where each row's documents begin in documents.npy
    FOLDER/PART/arrangement.txt what a row is

A part (train, evaluation) may use a sample several times, in any order, or in overlapping pieces.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, get_args

import numpy as np

from megatune.errors import ExitCode, Finding, MegatuneError

IGNORE_INDEX = -100  # the label of a token that is not trained, in Transformers and in torch

TOKENS_FILE = "tokens.bin"
TRAINED_FILE = "trained.bin"
DOCUMENTS_FILE = "documents.npy"
ROWS_FILE = "rows.npy"
ARRANGEMENT_FILE = "arrangement.txt"

# What a row is: one document, several that are trained side by side, or a preference pair: chosen, then rejected.
Arrangement = Literal["single", "packed", "pairs"]


class Document(NamedTuple):
    """Tokens that attend to each other: a sample, or a piece of a long text.

    Attributes:
        input_ids: int32 [T].
        labels: int32 [T], IGNORE_INDEX where a token is not trained; label i belongs to token i (Transformers'
            convention, not shifted).
    """

    input_ids: np.ndarray
    labels: np.ndarray


class TokenRows:
    """Memory-mapped rows of one part; cheap to open, to pickle and to share between processes.

    Args:
        directory: a part that `write_rows` wrote.

    Attributes:
        arrangement: what a row is.

    Raises:
        MegatuneError: the folder is not whole (exit code 66).
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        tokens = self.directory.parent
        try:
            self.arrangement = _arrangement(self.directory / ARRANGEMENT_FILE)
            self._documents = _load(self.directory / DOCUMENTS_FILE)
            self._rows = _load(self.directory / ROWS_FILE)
            self._tokens = _map(tokens / TOKENS_FILE, np.dtype(np.int32))
            self._trained = _map(tokens / TRAINED_FILE, np.dtype(np.uint8))
        except (OSError, ValueError) as error:
            raise _not_whole(self.directory, str(error)) from error
        if len(self._tokens) != len(self._trained):
            raise _not_whole(self.directory, f"{len(self._tokens)} tokens, {len(self._trained)} in {TRAINED_FILE}")
        if not len(self._rows) or self._rows[-1] != len(self._documents):
            raise _not_whole(self.directory, f"{len(self._documents)} documents, more or fewer in {ROWS_FILE}")
        if self._documents.size and self._documents.max() > len(self._tokens):
            raise _not_whole(self.directory, f"{len(self._tokens)} tokens, and documents beyond them")

    def __len__(self) -> int:
        return len(self._rows) - 1

    def __getitem__(self, row: int) -> tuple[Document, ...]:
        """The documents of one row."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return tuple(self._document(*span) for span in self._documents[self._rows[row] : self._rows[row + 1]])

    def __iter__(self) -> Iterator[tuple[Document, ...]]:
        return (self[row] for row in range(len(self)))

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        return type(self), (self.directory,)

    @property
    def is_packed(self) -> bool:
        """Whether a row holds documents side by side."""
        return self.arrangement == "packed"

    @property
    def spans(self) -> np.ndarray:
        """Where each document's tokens begin and end in tokens.bin, row by row: int64 [documents, 2]."""
        return self._documents

    def document_lengths(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Tokens of each document of these rows, row by row, without reading them: int64 [documents]."""
        none = self._documents[:0]
        spans = np.concatenate([none, *(self._documents[self._rows[row] : self._rows[row + 1]] for row in rows)])
        return spans[:, 1] - spans[:, 0]

    def row_lengths(self) -> np.ndarray:
        """Tokens of every row, without reading them: int64 [rows]."""
        ends = np.concatenate(([0], np.cumsum(self._documents[:, 1] - self._documents[:, 0])))
        return ends[self._rows[1:]] - ends[self._rows[:-1]]

    def _document(self, start: int, stop: int) -> Document:
        input_ids = self._tokens[start:stop]
        labels = np.where(self._trained[start:stop] != 0, input_ids, np.int32(IGNORE_INDEX))
        return Document(np.asarray(input_ids), labels)


class TokenWriter:
    """Appends samples' tokens to a folder's token files; use as a context manager.

    Args:
        folder: exists, and has no token files.
    """

    def __init__(self, folder: Path) -> None:
        self._tokens: BinaryIO = open(folder / TOKENS_FILE, "wb")  # noqa: SIM115 - closed in __exit__
        self._trained: BinaryIO = open(folder / TRAINED_FILE, "wb")  # noqa: SIM115
        self.num_tokens = 0

    def append(self, document: Document) -> tuple[int, int]:
        """Write one document's tokens; answers where they begin and end."""
        self.extend([document])
        return self.num_tokens - len(document.input_ids), self.num_tokens

    def extend(self, documents: Sequence[Document]) -> tuple[np.ndarray, np.ndarray]:
        """Write several documents, one behind the other, at once.

        Returns:
            Their input_ids and labels, joined: int32 [tokens] each.

        Raises:
            ValueError: a document is empty, or has more or fewer labels than tokens.
        """
        for document in documents:
            if len(document.input_ids) != len(document.labels) or not len(document.input_ids):
                raise ValueError(f"a document of {len(document.input_ids)} tokens with {len(document.labels)} labels")
        none = np.empty(0, dtype=np.int32)
        tokens = np.concatenate([none, *(document.input_ids for document in documents)], dtype=np.int32)
        labels = np.concatenate([none, *(document.labels for document in documents)], dtype=np.int32)
        self._tokens.write(tokens.tobytes())
        self._trained.write((labels != IGNORE_INDEX).astype(np.uint8).tobytes())
        self.num_tokens += len(tokens)
        return tokens, labels

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        for file in (self._tokens, self._trained):
            if error is None:
                file.flush()
                os.fsync(file.fileno())
            file.close()


def write_rows(
    directory: Path, spans: Sequence[tuple[int, int]] | np.ndarray, rows: np.ndarray, arrangement: Arrangement
) -> None:
    """Write one part: rows that refer to the tokens of the folder above.

    Args:
        directory: is made.
        spans: [documents, 2], where each document's tokens begin and end, row after row.
        rows: [rows + 1], where each row's documents begin in `spans`.
    """
    directory.mkdir()
    documents = np.asarray(spans, dtype=np.int64).reshape(-1, 2)
    np.save(directory / DOCUMENTS_FILE, documents, allow_pickle=False)
    np.save(directory / ROWS_FILE, np.asarray(rows, dtype=np.int64), allow_pickle=False)
    (directory / ARRANGEMENT_FILE).write_text(f"{arrangement}\n", encoding="ascii")


def num_trained_tokens(labels: Sequence[int] | np.ndarray) -> int:
    """Labels [T] that a causal model can learn: the first token has nothing before it to be predicted from."""
    return int(np.count_nonzero(np.asarray(labels)[1:] != IGNORE_INDEX))


def _arrangement(path: Path) -> Arrangement:
    text = path.read_text(encoding="ascii").strip()
    for arrangement in get_args(Arrangement):
        if text == arrangement:
            return arrangement
    raise ValueError(f"{ARRANGEMENT_FILE} says {text!r}")


def _load(path: Path) -> np.ndarray:
    """Mapped, since workers and ranks share the pages of a mapped file."""
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    """An empty file cannot be mapped; everything else is."""
    if path.stat().st_size == 0:
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def _not_whole(directory: Path, why: str) -> MegatuneError:
    return MegatuneError(
        Finding(
            "the folder of token rows is not whole",
            str(directory),
            why,
            f"delete {directory.parent}; it is made again",
        ),
        ExitCode.INPUT,
    )
