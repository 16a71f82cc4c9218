"""Safetensors files: slices of tensors read from a folder of them, and one written tensor by tensor."""

from __future__ import annotations

import json
import math
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families.forms import FileTensor
from megatune.families.weight_index import no_weights, read_weight_index
from megatune.families.weights import Segment

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class TensorSource(ABC):
    """Hugging Face tensors by name, of which slices can be read."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this name."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""

    @abstractmethod
    def read(self, segment: Segment, prefix: str = "") -> Tensor:
        """Return the rows or columns that the segment names, on the CPU.

        Args:
            prefix: of the tensor's name.
        """

    def fill(self, target: Tensor, segments: Iterable[Segment], prefix: str = "", *, start: int = 0) -> None:
        """Fill elements of an engine tensor, flattened, with what its segments hold; those beyond them with zeros.

        Only segments with such elements are read, one at a time.

        Args:
            target: elements `start` on of the engine's slice, [n], of any dtype and device.
            segments: of the whole slice, one below the other.
        """
        position = -start  # of a segment's first element in the target
        for segment in segments:
            if not segment.name:
                first, last = max(position, 0), min(position + segment.stop, len(target))
                target[first : max(first, last)].zero_()
                position += segment.stop
                continue
            shape = self.shape(prefix + segment.name)
            size = math.prod(shape) // shape[segment.dim] * (segment.stop - segment.start)
            first, last = max(position, 0), min(position + size, len(target))
            if first < last:
                values = self.read(segment, prefix).reshape(-1)
                target[first:last].copy_(values[first - position : last - position])
            position += size
        target[max(position, 0) :].zero_()


class ModelFolder(TensorSource):
    """A model's tensors in a folder of files, which may name and arrange them in a way of their own."""

    folder: Path

    @abstractmethod
    def names(self) -> set[str]:
        """List the names of all tensors in the files."""

    @abstractmethod
    def entry(self, name: str) -> TensorEntry:
        """Describe a tensor in the files."""

    @abstractmethod
    def files(self) -> list[Path]:
        """List the files that hold tensors."""


class SafetensorsFolder(ModelFolder):
    """The tensors of `NAME.safetensors`, or of the files that `NAME.safetensors.index.json` lists.

    Only what is asked for is read, from memory-mapped files. NAME is "model" for a Hugging Face checkpoint.

    Attributes:
        places: where a tensor is in the files, by its name; those that it does not list are there under their names.

    Raises:
        MegatuneError: INPUT, when files are missing, damaged or of another kind.
    """

    def __init__(self, folder: str | Path, name: str = "model") -> None:
        self.folder = Path(folder)
        self._file_of = self._list(name)
        self._open: dict[str, Any] = {}
        self.places: Mapping[str, FileTensor] = {}

    def _list(self, name: str) -> dict[str, str]:
        index, single = self.folder / f"{name}.safetensors.index.json", self.folder / f"{name}.safetensors"
        if index.is_file():
            return self._read_index(index)
        if single.is_file():
            try:
                with safe_open(single, framework="pt") as file:
                    return dict.fromkeys(file.keys(), single.name)
            except (SafetensorError, OSError) as error:
                raise _damaged(single, error) from None
        raise MegatuneError(no_weights(self.folder, single.name), ExitCode.INPUT)

    def _read_index(self, index: Path) -> dict[str, str]:
        file_of = read_weight_index(index)
        files = set(file_of.values())
        missing = sorted(file for file in files if not (self.folder / file).is_file())
        if missing:
            what = f"{len(missing)} of {len(files)} weight files are missing: {', '.join(missing[:3])}"
            raise MegatuneError(Finding(what, str(index), fix="download the checkpoint again"), ExitCode.INPUT)
        return file_of

    def names(self) -> set[str]:
        return set(self._file_of)

    def files(self) -> list[Path]:
        return [self.folder / file for file in sorted(set(self._file_of.values()))]

    def entry(self, name: str) -> TensorEntry:
        found = self._slice(name)
        dtype = next(dtype for dtype, text in _DTYPE_NAMES.items() if text == found.get_dtype())
        return TensorEntry(name, tuple(found.get_shape()), dtype)

    def has(self, name: str) -> bool:
        return self._place(name).name in self._file_of

    def _slice(self, name: str) -> Any:
        file = self._file_of[name]
        try:
            if file not in self._open:
                self._open[file] = safe_open(self.folder / file, framework="pt")
            found = self._open[file].get_slice(name)
        except (SafetensorError, OSError) as error:
            raise _damaged(self.folder / file, error) from None
        if (dtype := found.get_dtype()) not in _DTYPE_NAMES.values():
            what, fix = f"{name} is {dtype}", "give the model in bfloat16, float16 or float32"
            path = str(self.folder / file)
            raise MegatuneError(Finding(what, path, "tensors are read in 16 or 32 bits", fix), ExitCode.INPUT)
        return found

    def file_shape(self, name: str) -> tuple[int, ...]:
        """Read the shape of a tensor in the files."""
        return tuple(self._slice(name).get_shape())

    def shape(self, name: str) -> tuple[int, ...]:
        """Read the shape of a tensor."""
        place = self._place(name)
        shape = self.file_shape(place.name)
        return shape if place.expert is None else (place.rows, shape[1 if place.transposed else 2])

    def read(self, segment: Segment, prefix: str = "") -> Tensor:
        """Read the rows or columns that the segment names, in the file's dtype, on the CPU.

        Args:
            prefix: of the tensor's name in the file.
        """
        place = self._place(prefix + segment.name)
        source, part = self._slice(place.name), slice(segment.start, segment.stop)
        if place.expert is None:
            return source[part] if segment.dim == 0 else source[:, part]
        rows, columns = slice(place.first_row, place.first_row + place.rows), slice(None)
        if segment.dim == 0:
            rows = slice(place.first_row + segment.start, place.first_row + segment.stop)
        else:
            columns = part
        if place.transposed:
            return source[place.expert, columns, rows].T
        return source[place.expert, rows, columns]

    def _place(self, name: str) -> FileTensor:
        return self.places.get(name) or FileTensor(name)


def _damaged(path: Path, error: Exception) -> MegatuneError:
    what, why = f"cannot be read as safetensors: {error}", "the file is damaged or truncated"
    return MegatuneError(Finding(what, str(path), why, "copy it again"), ExitCode.INPUT)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor that is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@contextmanager
def safetensors_writer(path: Path, entries: Sequence[TensorEntry]) -> Iterator[Callable[[str, Tensor], None]]:
    """Write a file tensor by tensor; it is synced at the end.

    The safetensors library would write it from tensors that are all in memory. The format
    (github.com/huggingface/safetensors): the header's length as a little-endian u64, the header as JSON, then the
    tensors' bytes at the offsets that the header states.

    Yields:
        What writes the next tensor, or the next part of its dimension 0; it must be the one that `entries` has next.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        stop = offset + entry.num_bytes
        dtype, shape = _DTYPE_NAMES[entry.dtype], list(entry.shape)
        header[entry.name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    pending, written = list(reversed(entries)), 0
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)

        def write(name: str, tensor: Tensor) -> None:
            nonlocal written
            entry = pending[-1]
            expected = entry.name, entry.shape[1:], entry.dtype
            assert expected == (name, tuple(tensor.shape[1:]), tensor.dtype), entry
            file.write(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data)
            written += tensor.numel()
            assert written <= math.prod(entry.shape), entry
            if written == math.prod(entry.shape):
                pending.pop()
                written = 0

        yield write
        assert not pending, f"{len(pending)} tensors were not written"
        file.flush()
        os.fsync(file.fileno())
