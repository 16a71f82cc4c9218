"""Boxes of a stored tensor, read from its chunks: of each archive only the bytes that are needed."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from megatune.bridge.checked_files import RangedFile
from megatune.bridge.torch_dist.pickles import refused_name
from megatune.bridge.torch_dist.table import Box, Chunk, StoredTensor
from megatune.errors import ExitCode, Finding, MegatuneError


class _Place(NamedTuple):
    """Where a chunk's elements are in its file: the byte of element 0, and the strides."""

    start: int
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
        place, itemsize = self._place(tensor, chunk), tensor.dtype.itemsize
        first = place.start + itemsize * sum(index * step for index, step in zip(corner, place.stride, strict=True))
        span = 1 + sum((size - 1) * step for size, step in zip(shape, place.stride, strict=True))
        try:
            content = RangedFile(chunk.path).read(first, first + span * itemsize)
        except OSError:
            raise _refused(chunk, tensor, "the file is truncated") from None
        return content.view(tensor.dtype).as_strided(list(shape), list(place.stride))

    def _place(self, tensor: StoredTensor, chunk: Chunk) -> _Place:
        key = chunk.path, chunk.start
        if key not in self._places:
            self._places[key] = _locate(tensor, chunk)
        return self._places[key]


def _locate(tensor: StoredTensor, chunk: Chunk) -> _Place:
    """Load a chunk without its elements, as torch.save wrote it, and check what it says of them."""
    try:
        with open(chunk.path, "rb", buffering=0) as file:
            view: Any = _Window(file, chunk.start, chunk.length)
            with zipfile.ZipFile(view) as archive:
                infos = archive.infolist()
                if sum(info.file_size for info in infos) > chunk.length or any(info.compress_type for info in infos):
                    raise _refused(chunk, tensor, "it is not a tensor")
                if any(archive.read(info) != b"little" for info in infos if info.filename.endswith("/byteorder")):
                    raise _refused(chunk, tensor, "its bytes are in another order than this machine's")
            view.seek(0)
            try:
                found = torch.load(view, map_location="meta", weights_only=True)
            except Exception:
                view.seek(0)
                if names := get_unsafe_globals_in_checkpoint(view):
                    raise refused_name(names[0], f"{chunk.path}, byte {chunk.start}") from None
                raise
    except MegatuneError:
        raise
    except Exception as error:  # whatever a file that is no archive of a tensor makes zipfile and torch raise
        why = f"it is not a tensor as torch.save writes it ({type(error).__name__})"
        raise _refused(chunk, tensor, why) from None
    if not isinstance(found, Tensor) or found.layout is not torch.strided:
        raise _refused(chunk, tensor, "it is not a tensor")
    if (found.dtype, tuple(found.shape)) != (tensor.dtype, chunk.sizes):
        raise _refused(chunk, tensor, f"the file has {list(found.shape)} of {found.dtype} there")
    storage, itemsize = found.untyped_storage(), tensor.dtype.itemsize
    begin = int(getattr(storage, "_checkpoint_offset"))  # noqa: B009  (where the archive has it)
    first, stride = int(found.storage_offset()), tuple(map(int, found.stride()))
    last = first + sum((size - 1) * step for size, step in zip(chunk.sizes, stride, strict=True))
    if math.prod(chunk.sizes) and (last + 1) * itemsize > min(int(storage.nbytes()), chunk.length - begin):
        raise _refused(chunk, tensor, "its elements lie outside its storage")
    return _Place(chunk.start + begin + first * itemsize, stride)


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
        self._file.seek(self._start + self._position)
        data = self._file.read(max(0, min(len(buffer), self._length - self._position)))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def _refused(chunk: Chunk, tensor: StoredTensor, why: str) -> MegatuneError:
    what = f"byte {chunk.start} is not {list(chunk.sizes)} of {tensor.dtype}, a part of {tensor.name!r:.200}"
    fix = "copy the checkpoint again: files may be swapped or truncated"
    return MegatuneError(Finding(what, str(chunk.path), why, fix), ExitCode.INPUT)
