"""Files that one thread fills with tensors and another one writes: copies into reused host memory, digests on the way.

The thread that owns the model copies tensors into buckets, without waiting for its device; the other one waits for each
copy, writes the bucket, digests what it writes and gives the bucket back. With few buckets this is a save that training
waits for; with as many as it takes, training continues as soon as the copies are ordered.
"""

from __future__ import annotations

import json
import os
import queue
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
import xxhash
from torch import Tensor

from megatune.bridge.checked_files import BLOCK_BYTES, block_digests, digests_of
from megatune.bridge.safetensors_files import TensorEntry, header_of
from megatune.engine import device

BUCKET_BYTES = 2**24  # a power of two, to which torch rounds page-locked memory up; a multiple of BLOCK_BYTES
FEW = 4  # buckets: one is filled, one is written, and neither thread waits for every turn of the other


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A safetensors file that this rank writes.

    Attributes:
        name: its path in the folder, with forward slashes.
        entries: its tensors, in their order.
        tensors: their elements in this order, a tensor or a part of one at a time, on any device; can be iterated once,
            which may be collective.
        is_checked: it gets digests of its blocks; False of what is changed once all ranks have written.
    """

    name: str
    entries: Sequence[TensorEntry]
    tensors: Iterable[Tensor]
    is_checked: bool = True

    @property
    def head(self) -> bytes:
        return header_of(self.entries)

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)

    def write(self, folder: Path, progress: Callable[[int], None] = lambda num_bytes: None) -> Path:
        """Write it alone, in this thread, and sync it.

        Args:
            progress: is told the bytes of each tensor, or part of one, that was written.
        """
        path, head = placed(folder, self.name), self.head
        with open(path, "wb") as file:
            file.write(head)
            for tensor in self.tensors:
                file.write(_bytes_of(tensor).cpu().numpy().data)
                progress(tensor.nbytes)
            assert file.tell() == len(head) + self.num_bytes, f"{path} is not as large as its header says"
            file.flush()
            os.fsync(file.fileno())
        return path


@dataclass(frozen=True, slots=True)
class SmallFile:
    """Any other file that this rank writes; `name` is its path in the folder."""

    name: str
    head: bytes
    tensors: tuple[()] = ()
    is_checked: bool = False
    num_bytes: int = 0

    def write(self, folder: Path) -> Path:
        """Write it."""
        path = placed(folder, self.name)
        path.write_bytes(self.head)
        return path


WrittenFile: TypeAlias = TensorFile | SmallFile


def index_files(stem: str, places: Mapping[str, tuple[str, int]]) -> list[SmallFile]:
    """Return the index that says which file holds which tensor; nothing where one file holds all.

    Args:
        stem: of the files' names, with their folder.
        places: the file of each tensor, and the tensor's bytes.
    """
    if len({file for file, _ in places.values()}) <= 1:
        return []
    index = {
        "metadata": {"total_size": sum(num_bytes for _, num_bytes in places.values())},
        "weight_map": {name: file.rpartition("/")[2] for name, (file, _) in sorted(places.items())},
    }
    return [SmallFile(f"{stem}.safetensors.index.json", json.dumps(index, indent=2).encode())]


@dataclass(frozen=True, slots=True)
class StreamedFile:
    """A file that was written: its name, its bytes, and their digest (xxh3_128, 32 hexadecimal digits)."""

    name: str
    size: int
    digest: str


def placed(folder: Path, name: str) -> Path:
    """Return the path of a file, in a folder that exists."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


class HostBuffers:
    """Buckets of the host's memory, page-locked where there is a GPU, that are kept for the next save."""

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self._count = 0

    @property
    def num_bytes(self) -> int:
        """Of the buckets beyond those that any save takes."""
        return max(0, self._count - FEW) * BUCKET_BYTES

    def take(self, limit: int | None) -> Tensor:
        """Return a free bucket, or a new one; beyond `limit` buckets wait for one that is given back."""
        try:
            return self._free.get(block=limit is not None and self._count >= limit)
        except queue.Empty:
            self._count += 1
            return torch.empty(BUCKET_BYTES, dtype=torch.uint8, pin_memory=device.HAS_GPU)

    def give_back(self, bucket: Tensor) -> None:
        """Take a bucket that is written."""
        self._free.put(bucket)


@dataclass(frozen=True, slots=True)
class _Begin:
    """A file follows."""

    name: str
    is_checked: bool


@dataclass(frozen=True, slots=True)
class _Filled:
    """A bucket of the file, and what says that the copies into it are made."""

    bucket: Tensor
    size: int
    copied: torch.cuda.Event


class FileStream:
    """Files on their way from one thread to the other.

    Args:
        folder: that they are written into.
        limit: how many buckets may be under way; None for as many as it takes.
        check: write digests of blocks, too.
        wrote: is told the bytes of each bucket that was written.

    Attributes:
        written: bytes so far, for who watches that it goes on.
    """

    def __init__(
        self, folder: Path, buffers: HostBuffers, *, limit: int | None = FEW, check: bool = True,
        wrote: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:  # fmt: skip
        self._folder, self._buffers, self._limit, self._check, self._wrote = folder, buffers, limit, check, wrote
        self._queue: queue.SimpleQueue[_Begin | _Filled | BaseException | None] = queue.SimpleQueue()
        self.written = 0

    # --- the thread that has the tensors ------------------------------------------------------------------------------

    def put(self, files: Iterable[WrittenFile]) -> None:
        """Send files, and say that they are all; collective where their tensors are."""
        try:
            for file in files:
                self._queue.put(_Begin(file.name, file.is_checked and self._check))
                self._send(file)
        except BaseException as error:
            self._queue.put(error)
            raise
        self._queue.put(None)

    def _send(self, file: WrittenFile) -> None:
        bucket, used = self._buffers.take(self._limit), 0

        def send() -> None:
            copied = torch.cuda.Event()
            copied.record()
            self._queue.put(_Filled(bucket, used, copied))

        for content in map(_bytes_of, chain(_as_tensors(file.head), file.tensors)):
            start = 0
            while start < len(content):
                count = min(BUCKET_BYTES - used, len(content) - start)
                bucket[used : used + count].copy_(content[start : start + count], non_blocking=True)
                start, used = start + count, used + count
                if used == BUCKET_BYTES:
                    send()
                    bucket, used = self._buffers.take(self._limit), 0
        send()

    # --- the thread that writes ---------------------------------------------------------------------------------------

    def write(self) -> list[StreamedFile]:
        """Write all files to their end and sync them.

        Raises:
            OSError: the disk refuses; what is still sent is taken first, because other ranks take part in it.
        """
        found: list[StreamedFile] = []
        failed: BaseException | None = None
        file: _OpenFile | None = None
        while True:
            item = self._queue.get()
            try:
                if isinstance(item, BaseException):
                    failed = failed or item
                if (item is None or isinstance(item, _Begin)) and file is not None:
                    done, file = file, None
                    found += [] if failed else done.close()
                if isinstance(item, _Begin) and failed is None:
                    file = _OpenFile(self._folder, item.name, item.is_checked)
                elif isinstance(item, _Filled) and failed is None and file is not None:
                    item.copied.synchronize()
                    file.write(item.bucket[: item.size].numpy().data)
                    self.written += item.size
                    self._wrote(item.size)
            except OSError as error:
                failed = error
            if isinstance(item, _Filled):
                self._buffers.give_back(item.bucket)
            if item is None or isinstance(item, BaseException):
                if failed is not None:
                    raise failed
                return found


class _OpenFile:
    """A file that is written from its beginning to its end, and digested."""

    def __init__(self, folder: Path, name: str, is_checked: bool) -> None:
        self._name, self._path = name, placed(folder, name)
        self._file = open(self._path, "wb", buffering=0)  # noqa: SIM115  (closed by `close`)
        self._whole, self._size = xxhash.xxh3_128(), 0
        self._blocks: list[int] | None = [] if is_checked else None
        self._folder = folder

    def write(self, content: memoryview) -> None:
        """Write what comes next: but for the last piece, whole blocks."""
        self._whole.update(content)
        if self._blocks is not None:
            assert self._size % BLOCK_BYTES == 0
            self._blocks += block_digests(content)
        self._size += len(content)
        while content:
            content = content[self._file.write(content) :]

    def close(self) -> Iterator[StreamedFile]:
        """Sync the file, and write the digests of its blocks."""
        os.fsync(self._file.fileno())
        self._file.close()
        yield StreamedFile(self._name, self._size, self._whole.hexdigest())
        if self._blocks is not None and len(self._blocks) > 1:
            digests = digests_of(self._path).relative_to(self._folder).as_posix()
            beside = _OpenFile(self._folder, digests, is_checked=False)
            beside.write(memoryview(np.array(self._blocks, dtype="<u8").tobytes()))
            yield from beside.close()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _as_tensors(content: bytes) -> list[Tensor]:
    return [torch.frombuffer(bytearray(content), dtype=torch.uint8)] if content else []


def flat_pieces(tensor: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield a flat tensor in another dtype, a bucket at a time."""
    for piece in tensor.split(BUCKET_BYTES // dtype.itemsize):
        yield piece.to(dtype)
