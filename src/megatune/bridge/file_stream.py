"""Write files of tensors with two threads: one copies tensors to reused host memory, the other writes and hashes them.

The thread that owns the model copies tensors into buckets, without waiting for its device; the other one waits for each
copy, writes the bucket, hashes it and returns it. With few buckets this is a blocking save; with an unlimited number,
training continues as soon as the copies are enqueued.
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
from megatune.hub.digests import FileDigest

BUCKET_BYTES = 2**24  # a power of two, to which torch rounds up pinned memory; a multiple of BLOCK_BYTES
MIN_BUCKETS = 4  # one is filled while one is written, and neither thread waits for every step of the other


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A safetensors file that this rank writes.

    Attributes:
        name: its path in the folder, with forward slashes.
        entries: its tensors, in order.
        tensors: their elements in this order, a tensor or a part of one at a time, on any device; can be iterated once,
            possibly as a collective.
        is_checked: write digests of its blocks; False for a file that is changed after all ranks have written.
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
        """Write and sync it in this thread.

        Args:
            progress: called with the bytes of each tensor, or part of one, after writing it.
        """
        path, head = create_parent(folder, self.name), self.head
        with open(path, "wb") as file:
            file.write(head)
            for tensor in self.tensors:
                file.write(_bytes_of(tensor).cpu().numpy().data)
                progress(tensor.nbytes)
            assert file.tell() == len(head) + self.num_bytes, f"{path} does not have the size in its header"
            file.flush()
            os.fsync(file.fileno())
        return path


@dataclass(frozen=True, slots=True)
class SmallFile:
    """Another file that this rank writes; `name` is its path in the folder."""

    name: str
    head: bytes
    tensors: tuple[()] = ()
    is_checked: bool = False
    num_bytes: int = 0

    def write(self, folder: Path) -> Path:
        """Write it."""
        path = create_parent(folder, self.name)
        path.write_bytes(self.head)
        return path


WrittenFile: TypeAlias = TensorFile | SmallFile


def index_files(stem: str, places: Mapping[str, tuple[str, int]]) -> list[SmallFile]:
    """Return the index that maps tensors to files; nothing if there is only one file.

    Args:
        stem: the common part of the files' names, with their folder.
        places: the file of each tensor, and the tensor's bytes.
    """
    if len({file for file, _ in places.values()}) <= 1:
        return []
    index = {
        "metadata": {"total_size": sum(num_bytes for _, num_bytes in places.values())},
        "weight_map": {name: file.rpartition("/")[2] for name, (file, _) in sorted(places.items())},
    }
    return [SmallFile(f"{stem}.safetensors.index.json", json.dumps(index, indent=2).encode())]


def create_parent(folder: Path, name: str) -> Path:
    """Return the path of a file after creating its folder."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


class HostBuffers:
    """Buckets of host memory, pinned if there is a GPU, that are reused by the next save."""

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self._count = 0

    @property
    def num_bytes(self) -> int:
        """The number of bytes of the buckets in addition to those that every save needs."""
        return max(0, self._count - MIN_BUCKETS) * BUCKET_BYTES

    def take(self, limit: int | None) -> Tensor:
        """Return a free bucket, or a new one; if there are `limit` buckets, wait for one to be released."""
        try:
            return self._free.get(block=limit is not None and self._count >= limit)
        except queue.Empty:
            self._count += 1
            return torch.empty(BUCKET_BYTES, dtype=torch.uint8, pin_memory=device.HAS_GPU)

    def release(self, bucket: Tensor) -> None:
        """Return a written bucket for reuse."""
        self._free.put(bucket)


@dataclass(frozen=True, slots=True)
class _FileStart:
    """Marks the start of a file."""

    name: str
    is_checked: bool


@dataclass(frozen=True, slots=True)
class _FilledBucket:
    """A filled bucket of the current file, and the event that its copies are complete."""

    bucket: Tensor
    size: int
    copied: torch.cuda.Event


class FileStream:
    """Passes files from one thread to the other.

    Args:
        folder: where to write them.
        limit: the maximum number of buckets in flight; None for no limit.
        check: also write digests of blocks.
        on_write: called with the bytes of each bucket after writing it.

    Attributes:
        written: bytes written so far, to monitor progress.
    """

    def __init__(
        self, folder: Path, buffers: HostBuffers, *, limit: int | None = MIN_BUCKETS, check: bool = True,
        on_write: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:  # fmt: skip
        self._folder, self._buffers, self._limit, self._check, self._on_write = folder, buffers, limit, check, on_write
        self._queue: queue.SimpleQueue[_FileStart | _FilledBucket | BaseException | None] = queue.SimpleQueue()
        self.written = 0

    # --- the thread that has the tensors ------------------------------------------------------------------------------

    def put(self, files: Iterable[WrittenFile]) -> None:
        """Send all files; collective if their tensors are."""
        try:
            for file in files:
                self._queue.put(_FileStart(file.name, file.is_checked and self._check))
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
            self._queue.put(_FilledBucket(bucket, used, copied))

        head = [torch.frombuffer(bytearray(file.head), dtype=torch.uint8)] if file.head else []
        for content in map(_bytes_of, chain(head, file.tensors)):
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

    def write(self) -> list[FileDigest]:
        """Write and sync all files.

        Raises:
            OSError: writing failed; remaining files are consumed first, since other ranks take part in sending them.
        """
        found: list[FileDigest] = []
        failed: BaseException | None = None
        file: _OpenFile | None = None
        while True:
            item = self._queue.get()
            try:
                if isinstance(item, BaseException):
                    failed = failed or item
                if (item is None or isinstance(item, _FileStart)) and file is not None:
                    done, file = file, None
                    found += [] if failed else done.close()
                if isinstance(item, _FileStart) and failed is None:
                    file = _OpenFile(self._folder, item.name, item.is_checked)
                elif isinstance(item, _FilledBucket) and failed is None and file is not None:
                    item.copied.synchronize()
                    file.write(item.bucket[: item.size].numpy().data)
                    self.written += item.size
                    self._on_write(item.size)
            except OSError as error:
                failed = error
            if isinstance(item, _FilledBucket):
                self._buffers.release(item.bucket)
            if item is None or isinstance(item, BaseException):
                if failed is not None:
                    raise failed
                return found


class _OpenFile:
    """A file that is written sequentially and hashed."""

    def __init__(self, folder: Path, name: str, is_checked: bool) -> None:
        self._name, self._path = name, create_parent(folder, name)
        self._file = open(self._path, "wb", buffering=0)  # noqa: SIM115  (closed by `close`)
        self._whole, self._size = xxhash.xxh3_128(), 0
        self._blocks: list[int] | None = [] if is_checked else None
        self._folder = folder

    def write(self, content: memoryview) -> None:
        """Write the next bytes: whole blocks, except for the last piece."""
        self._whole.update(content)
        if self._blocks is not None:
            assert self._size % BLOCK_BYTES == 0
            self._blocks += block_digests(content)
        self._size += len(content)
        while content:
            content = content[self._file.write(content) :]

    def close(self) -> Iterator[FileDigest]:
        """Sync the file, and write the digests of its blocks."""
        os.fsync(self._file.fileno())
        self._file.close()
        yield FileDigest(self._name, self._size, self._whole.hexdigest())
        if self._blocks is not None and len(self._blocks) > 1:
            digests = digests_of(self._path).relative_to(self._folder).as_posix()
            digests_file = _OpenFile(self._folder, digests, is_checked=False)
            digests_file.write(memoryview(np.array(self._blocks, dtype="<u8").tobytes()))
            yield from digests_file.close()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def flat_pieces(tensor: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield a flat tensor in another dtype, one bucket at a time."""
    for piece in tensor.split(BUCKET_BYTES // dtype.itemsize):
        yield piece.to(dtype)
