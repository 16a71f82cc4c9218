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

from megatune.errors import ExitCode, Finding, MegatuneError

IGNORE_INDEX = -100  # the label of a token that is not trained, in Transformers and in torch

TOKENS_FILE = "tokens.bin"
LABELS_FILE = "labels.bin"
OFFSETS_FILE = "offsets.npy"

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


class Row(NamedTuple):
    """One training sample; label i belongs to token i (Transformers' convention, not shifted).

    Attributes:
        input_ids: int32 [T].
        labels: int32 [T], IGNORE_INDEX where a token is not trained.
    """

    input_ids: np.ndarray
    labels: np.ndarray


class TokenRows:
    """Memory-mapped rows of one folder; cheap to open, to pickle and to share between processes.

    Args:
        directory: a folder that `RowWriter` wrote.

    Raises:
        MegatuneError: the folder is not whole (exit code 66).
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        try:
            self._offsets: np.ndarray = np.load(self.directory / OFFSETS_FILE, allow_pickle=False)
            self._tokens = _map_int32(self.directory / TOKENS_FILE)
            self._labels = _map_int32(self.directory / LABELS_FILE)
        except (OSError, ValueError) as error:
            raise _not_whole(self.directory, str(error)) from error
        num_tokens = int(self._offsets[-1]) if len(self._offsets) else -1
        if not num_tokens == len(self._tokens) == len(self._labels):
            raise _not_whole(self.directory, f"{len(self._tokens)} tokens on disk, {num_tokens} in {OFFSETS_FILE}")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        start, stop = self._offsets[index], self._offsets[index + 1]
        return Row(self._tokens[start:stop], self._labels[start:stop])

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        return type(self), (self.directory,)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row: int32 [N]."""
        return np.diff(self._offsets).astype(np.int32)


class RowWriter:
    """Appends rows to a folder that appears, whole, under its name when the writer is closed.

    Use as a context manager: leaving it by an exception removes what was written.

    Args:
        directory: the folder to make; it must not exist.
    """

    def __init__(self, directory: Path | str) -> None:
        self._folder = atomic_directory(Path(directory))
        self._partial = self._folder.__enter__()
        self._tokens: BinaryIO = open(self._partial / TOKENS_FILE, "wb")  # noqa: SIM115 - closed in _finish
        self._labels: BinaryIO = open(self._partial / LABELS_FILE, "wb")  # noqa: SIM115
        self._offsets = [0]

    def append(self, input_ids: Sequence[int] | np.ndarray, labels: Sequence[int] | np.ndarray) -> None:
        """Add one row: two sequences of the same length, not empty."""
        if len(input_ids) != len(labels) or not len(input_ids):
            raise ValueError(f"a row of {len(input_ids)} tokens with {len(labels)} labels")
        self._tokens.write(np.asarray(input_ids, dtype=np.int32).tobytes())
        self._labels.write(np.asarray(labels, dtype=np.int32).tobytes())
        self._offsets.append(self._offsets[-1] + len(input_ids))

    def close(self) -> None:
        """Make the rows durable and give the folder its name."""
        self._finish(None)

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        for file in (self._tokens, self._labels):
            if error is None:
                file.flush()
                os.fsync(file.fileno())
            file.close()
        if error is None:
            np.save(self._partial / OFFSETS_FILE, np.asarray(self._offsets, dtype=np.int64), allow_pickle=False)
        self._folder.__exit__(type(error) if error else None, error, None)


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
