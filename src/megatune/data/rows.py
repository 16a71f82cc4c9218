"""Token rows on disk: written once, memory-mapped by every rank and worker."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from megatune.data.packing import pack
from megatune.errors import ExitCode, Finding, MegatuneError

IGNORE_INDEX = -100  # the label of a token that is not trained, in Transformers and in torch

TOKENS_FILE = "tokens.bin"
LABELS_FILE = "labels.bin"
OFFSETS_FILE = "offsets.npy"  # int64 [documents + 1]: where each document's tokens begin
# Packed rows only: document ids row by row, int64 [documents], and where each row begins there, int64 [rows + 1].
DOCUMENTS_FILE = "documents.npy"
ROWS_FILE = "rows.npy"

_CANNOT_WRITE = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EFBIG,
    errno.EIO,
)


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
    """Memory-mapped rows of one folder; cheap to open, to pickle and to share between processes.

    A row is one document or, packed, several.

    Args:
        directory: a folder that `RowWriter` wrote.

    Raises:
        MegatuneError: the folder is not whole (exit code 66).
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self.is_packed = (self.directory / ROWS_FILE).exists()
        try:
            self._offsets = _load(self.directory / OFFSETS_FILE)
            self._tokens = _map_int32(self.directory / TOKENS_FILE)
            self._labels = _map_int32(self.directory / LABELS_FILE)
            if self.is_packed:
                self._documents = _load(self.directory / DOCUMENTS_FILE)
                self._rows = _load(self.directory / ROWS_FILE)
        except (OSError, ValueError) as error:
            raise _not_whole(self.directory, str(error)) from error
        num_tokens = int(self._offsets[-1]) if len(self._offsets) else -1
        if not num_tokens == len(self._tokens) == len(self._labels):
            raise _not_whole(self.directory, f"{len(self._tokens)} tokens on disk, {num_tokens} in {OFFSETS_FILE}")
        num_documents = len(self._offsets) - 1
        if self.is_packed and not num_documents == len(self._documents) == self._rows[-1]:
            raise _not_whole(self.directory, f"{num_documents} documents on disk, {self._rows[-1]} in {ROWS_FILE}")

    def __len__(self) -> int:
        return len(self._rows if self.is_packed else self._offsets) - 1

    def __getitem__(self, row: int) -> tuple[Document, ...]:
        """The documents of one row."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return tuple(self._document(number) for number in self._documents_of([row]))

    def __iter__(self) -> Iterator[tuple[Document, ...]]:
        return (self[row] for row in range(len(self)))

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        return type(self), (self.directory,)

    def document_lengths(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Tokens of each document of these rows, row by row, without reading them: int64 [documents]."""
        documents = self._documents_of(rows)
        return self._offsets[documents + 1] - self._offsets[documents]

    def _documents_of(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        if not self.is_packed:
            return np.asarray(rows, dtype=np.int64)
        none = self._documents[:0]
        return np.concatenate([none, *(self._documents[self._rows[row] : self._rows[row + 1]] for row in rows)])

    def _document(self, number: int) -> Document:
        start, stop = self._offsets[number], self._offsets[number + 1]
        return Document(self._tokens[start:stop], self._labels[start:stop])


class RowWriter:
    """Appends documents to a folder that appears, whole, under its name when the writer is closed.

    Use as a context manager: leaving it by an exception removes what was written.

    Args:
        directory: the folder to make; it must not exist.
        capacity: pack documents into rows of at most this many tokens; None makes each a row.
        seed: of the packing.

    Attributes:
        num_rows: once closed.
    """

    def __init__(self, directory: Path | str, capacity: int | None = None, seed: int = 0) -> None:
        self._capacity, self._seed = capacity, seed
        self.num_rows = 0
        self._folder = atomic_directory(Path(directory))
        self._partial = self._folder.__enter__()
        self._tokens: BinaryIO = open(self._partial / TOKENS_FILE, "wb")  # noqa: SIM115 - closed in _finish
        self._labels: BinaryIO = open(self._partial / LABELS_FILE, "wb")  # noqa: SIM115
        self._offsets = [0]

    def append(self, input_ids: Sequence[int] | np.ndarray, labels: Sequence[int] | np.ndarray) -> None:
        """Add one document: two sequences of the same length, not empty."""
        if len(input_ids) != len(labels) or not len(input_ids):
            raise ValueError(f"a document of {len(input_ids)} tokens with {len(labels)} labels")
        self._tokens.write(np.asarray(input_ids, dtype=np.int32).tobytes())
        self._labels.write(np.asarray(labels, dtype=np.int32).tobytes())
        self._offsets.append(self._offsets[-1] + len(input_ids))

    def close(self) -> None:
        """Make the rows durable and give the folder its name."""
        try:
            self._complete()
        except BaseException as error:
            self._abandon(error)
            raise
        self._folder.__exit__(None, None, None)

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._abandon(error)

    def _complete(self) -> None:
        for file in (self._tokens, self._labels):
            file.flush()
            os.fsync(file.fileno())
            file.close()
        offsets = np.asarray(self._offsets, dtype=np.int64)
        np.save(self._partial / OFFSETS_FILE, offsets, allow_pickle=False)
        self.num_rows = len(offsets) - 1
        if self._capacity is not None:
            documents, rows = pack(np.diff(offsets), self._capacity, self._seed)
            np.save(self._partial / DOCUMENTS_FILE, documents, allow_pickle=False)
            np.save(self._partial / ROWS_FILE, rows, allow_pickle=False)
            self.num_rows = len(rows) - 1

    def _abandon(self, error: BaseException) -> None:
        self._tokens.close()
        self._labels.close()
        self._folder.__exit__(type(error), error, error.__traceback__)


@contextmanager
def atomic_directory(directory: Path) -> Iterator[Path]:
    """A folder to fill, renamed to `directory` at the end; on an exception it is removed.

    Where another process made `directory` meanwhile, its folder stays and ours is removed: callers name a folder
    after everything that determines its content.
    """
    partial = directory.with_name(f".{directory.name}.partial-{socket.gethostname()}-{os.getpid()}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        try:
            partial.rename(directory)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        raise MegatuneError(
            Finding(f"cannot write: {error.strerror}", str(directory)), ExitCode.CANNOT_WRITE
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def num_trained_tokens(labels: Sequence[int] | np.ndarray) -> int:
    """Labels [T] that a causal model can learn: the first token has nothing before it to be predicted from."""
    return int(np.count_nonzero(np.asarray(labels)[1:] != IGNORE_INDEX))


def _load(path: Path) -> np.ndarray:
    return np.load(path, allow_pickle=False)


def _map_int32(path: Path) -> np.ndarray:
    """An empty file cannot be mapped; everything else is."""
    if path.stat().st_size == 0:
        return np.empty(0, dtype=np.int32)
    return np.memmap(path, dtype=np.int32, mode="r")


def _not_whole(directory: Path, why: str) -> MegatuneError:
    return MegatuneError(
        Finding("the folder of token rows is not whole", str(directory), why, "delete the folder; it is made again"),
        ExitCode.INPUT,
    )
