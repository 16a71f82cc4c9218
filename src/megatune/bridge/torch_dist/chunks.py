"""Boxes of a stored tensor, read from its chunks: of each archive only the bytes that are needed."""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatune.bridge.torch_dist.pickles import load_tensor_header
from megatune.bridge.torch_dist.table import Box, Chunk, StoredTensor
from megatune.errors import ExitCode, Finding, MegatuneError

_MOST_HEADER_BYTES = 1 << 16
_LOCAL_HEADER = 30  # bytes of a zip file's local header, before the name


class _Place(NamedTuple):
    """Where a chunk's elements are: the byte of element 0, elements of the storage, and the strides."""

    start: int
    num_elements: int
    stride: Box


class ChunkReader:
    """Reads boxes of tensors. What an archive says of itself is held against the table before anything is allocated."""

    def __init__(self) -> None:
        self._places: dict[tuple[Path, int], _Place] = {}

    def read(self, tensor: StoredTensor, start: Sequence[int], stop: Sequence[int]) -> Tensor:
        """Return the box from corner `start` up to corner `stop`, in the tensor's dtype, on the CPU.

        Raises:
            MegatuneError: INPUT, when a file is not as the table has it.
        """
        found = torch.empty([last - first for first, last in zip(start, stop, strict=True)], dtype=tensor.dtype)
        for chunk in tensor.near(start[0], stop[0]):
            inside = [
                (max(first, corner), min(last, corner + size))
                for first, last, corner, size in zip(start, stop, chunk.offsets, chunk.sizes, strict=True)
            ]
            if any(first >= last for first, last in inside):
                continue
            target = found[tuple(slice(a - first, b - first) for (a, b), first in zip(inside, start, strict=True))]
            corner = [a - offset for (a, _), offset in zip(inside, chunk.offsets, strict=True)]
            target.copy_(self._part(tensor, chunk, corner, target.shape))
        return found

    def check(self, tensor: StoredTensor) -> None:
        """Hold the headers of all its chunks against the table."""
        for chunks in tensor.by_first.values():
            for chunk in chunks:
                self._place(tensor, chunk)

    def _part(self, tensor: StoredTensor, chunk: Chunk, corner: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Read the elements of a box of a chunk: those from its first to its last one in the file."""
        place = self._place(tensor, chunk)
        first = sum(index * stride for index, stride in zip(corner, place.stride, strict=True))
        span = 1 + sum((size - 1) * stride for size, stride in zip(shape, place.stride, strict=True))
        buffer = bytearray(span * tensor.dtype.itemsize)
        with _reading(chunk.path) as file:
            file.seek(place.start + first * tensor.dtype.itemsize)
            view, filled = memoryview(buffer), 0
            while filled < len(buffer) and (count := file.readinto(view[filled:])):
                filled += count
        if filled < len(buffer):
            raise _refused(chunk, tensor, "the file is truncated")
        return torch.frombuffer(buffer, dtype=tensor.dtype).as_strided(list(shape), list(place.stride))

    def _place(self, tensor: StoredTensor, chunk: Chunk) -> _Place:
        key = chunk.path, chunk.start
        if key not in self._places:
            self._places[key] = _locate(tensor, chunk)
        return self._places[key]


def _locate(tensor: StoredTensor, chunk: Chunk) -> _Place:
    """Read the header of a chunk's archive, as torch.save wrote it, and check it."""
    where = f"{chunk.path}, byte {chunk.start}"
    with _reading(chunk.path) as file:
        try:
            archive = zipfile.ZipFile(_Window(file, chunk.start, chunk.length))
            infos = {info.filename.partition("/")[2]: info for info in archive.infolist()[:64]}
            read = (infos[name] for name in ("data.pkl", "byteorder") if name in infos)
            if any(info.file_size > _MOST_HEADER_BYTES for info in read):
                raise _refused(chunk, tensor, "it is not a tensor")
            if "byteorder" in infos and archive.read(infos["byteorder"]) != b"little":
                raise _refused(chunk, tensor, "its bytes are in another order than this machine's")
            header = load_tensor_header(archive.read(infos["data.pkl"]), where)
            info = infos[f"data/{header[1]}"]
        except (
            zipfile.BadZipFile,
            KeyError,
            NotImplementedError,  # a compression that zipfile does not know
            ValueError,
            struct.error,
            EOFError,
            OSError,
        ) as error:
            raise _refused(
                chunk, tensor, f"it is not a tensor as torch.save writes it ({type(error).__name__})"
            ) from None
        dtype, _, first, sizes, stride = header
        if (dtype, sizes) != (tensor.dtype, chunk.sizes) or len(stride) != len(sizes):
            raise _refused(chunk, tensor, f"the file has {list(sizes)} of {dtype} there")
        num_elements = info.file_size // dtype.itemsize
        last = first + sum((size - 1) * step for size, step in zip(sizes, stride, strict=True))
        if math.prod(sizes) and last >= num_elements:
            raise _refused(chunk, tensor, "its elements lie outside its storage")
        file.seek(chunk.start + info.header_offset)
        local = file.read(_LOCAL_HEADER)
        lengths = struct.unpack("<HH", local[26:30]) if len(local) == _LOCAL_HEADER else (chunk.length, 0)
        data = info.header_offset + _LOCAL_HEADER + sum(lengths)
        if info.compress_type != zipfile.ZIP_STORED or data + info.file_size > chunk.length:
            raise _refused(chunk, tensor, "its storage lies outside the chunk")
        return _Place(chunk.start + data + first * dtype.itemsize, num_elements, stride)


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: Any, start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("before the first byte")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._position))
        self._file.seek(self._start + self._position)
        data = self._file.read(count)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    try:
        with open(path, "rb", buffering=0) as file:
            yield file
    except OSError as error:
        raise MegatuneError(Finding(f"cannot be read: {error.strerror}", str(path)), ExitCode.INPUT) from None


def _refused(chunk: Chunk, tensor: StoredTensor, why: str) -> MegatuneError:
    what = f"byte {chunk.start} is not {list(chunk.sizes)} of {tensor.dtype}, a part of {tensor.name!r:.200}"
    fix = "copy the checkpoint again: files may be swapped or truncated"
    return MegatuneError(Finding(what, str(chunk.path), why, fix), ExitCode.INPUT)
