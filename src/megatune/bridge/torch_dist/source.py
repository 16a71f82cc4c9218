"""Read slices of a torch_dist checkpoint's weights as Hugging Face tensors, without reading other bytes."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from megatune.architecture import Architecture
from megatune.bridge.checked_files import RangedFile
from megatune.bridge.safetensors_files import ModelFolder, TensorEntry
from megatune.bridge.torch_dist.table import Chunk, StoredTensor, check_common_file, read_table, unsafe_name_error
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families.forms import CheckpointForm
from megatune.families.megatron_names import LANGUAGE_MODEL, Part, candidates, check_arranged
from megatune.families.table import Box, rows_of
from megatune.families.weight_index import key_findings
from megatune.families.weights import (
    WHOLE,
    Slice,
    TensorLayout,
    Weight,
    by_expert,
    experts_of,
    hf_shape,
    layers_of,
)
from megatune.hub.megatron import METADATA, iteration_folder

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Piece(NamedTuple):
    """Rows of a Hugging Face tensor: `rows` rows from `first` on, with stride `step`, equal the rows of a stored tensor
    from `row` on, at index `at`, plus `less`."""

    first: int
    rows: int
    step: int
    stored: StoredTensor
    at: tuple[int, ...]
    row: int
    less: int


class TorchDistFolder(ModelFolder):
    """The model in a torch_dist checkpoint, under the names of its Hugging Face checkpoint.

    Tensors are read on demand. Nothing in the folder is executed.

    Args:
        weights: those that the checkpoint must have.
        form: how the Hugging Face checkpoint names and arranges them.

    Raises:
        MegatuneError: the folder is not a checkpoint, is damaged, or holds another model; with every tensor that is
            missing, unknown or has another shape than in config.json (exit code 66).
    """

    def __init__(
        self, folder: str | Path, architecture: Architecture, weights: Sequence[Weight], form: CheckpointForm
    ) -> None:
        self.folder = iteration_folder(folder)
        check_arranged(architecture, str(folder))
        self._form, self._weights, self._architecture = form, weights, architecture
        self._reader = ChunkReader()
        self._pieces: dict[str, list[_Piece]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        check_common_file(self.folder / "common.pt")
        self._locate(read_table(self.folder))
        self._file_shapes = form.all_shapes(weights, architecture)
        self._first_of = {place.name: name for name, place in form.locate_all(weights, architecture).items()}

    def names(self) -> set[str]:
        return set(self._file_shapes)

    def entry(self, name: str) -> TensorEntry:
        return TensorEntry(name, self._file_shapes[name], self._dtype(self._first_of[name]))

    def _dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor: if it is stored with a difference, that in which adding it back is exact."""
        first = self._pieces[name][0]
        return torch.float32 if first.less else first.stored.dtype

    def check_files(self) -> None:
        """Compare the headers of all chunks with the table, before any weight is read."""
        for stored in {
            piece.stored.name: piece.stored for pieces in self._pieces.values() for piece in pieces
        }.values():
            self._reader.check(stored)

    def read_box(self, name: str, box: Box) -> Tensor:
        _, *rest = self.shapes[name]
        # Of a tensor with more dimensions whole rows are read, and cut afterwards.
        low, high = ([box.left], [box.right]) if len(rest) == 1 else ([0] * len(rest), rest)
        found = []
        for piece in self._pieces[name]:
            edges = box.first, box.last
            start, stop = (min(max(-((piece.first - edge) // piece.step), 0), piece.rows) for edge in edges)
            if start < stop:
                corners = (
                    [*piece.at, piece.row + start, *low],
                    [*(each + 1 for each in piece.at), piece.row + stop, *high],
                )
                part = self._reader.read(piece.stored, *corners).view(stop - start, -1)
                place = piece.first + start * piece.step - box.first
                found.append((place, piece.step, part.float() + piece.less if piece.less else part))
        if len(found) == 1:
            whole = found[0][2]
        else:
            width = box.shape[1] if len(rest) == 1 else math.prod(rest)
            whole = torch.empty(box.last - box.first, width, dtype=self._dtype(name))
            for place, step, part in found:
                whole[place : place + len(part) * step : step] = part
        return whole[:, box.left : box.right] if len(rest) > 1 else whole

    def _locate(self, table: dict[str, StoredTensor]) -> None:
        """Find every weight in the table, and a weight for every tensor in the table."""
        # A vision-language model's decoder may have a prefix.
        plain = {name.removeprefix(LANGUAGE_MODEL): stored for name, stored in table.items()}
        used: set[str] = set()
        missing: list[str] = []
        wrong: list[str] = []
        for weight in self._weights:
            for layer in layers_of(weight, self._architecture):
                parts = by_expert(weight, self._architecture, WHOLE)
                for part, expert in zip(parts, experts_of(weight, self._architecture), strict=True):
                    ways = list(candidates(weight, self._architecture, layer, expert))
                    used.update(one.key for parts in ways for one in parts)
                    way = next((parts for parts in ways if all(one.key in plain for one in parts)), None)
                    if way is None:
                        missing += [parts[0].key for parts in ways[:1]]
                        continue
                    wrong += self._problems(weight, way, plain)
                    self._add(weight, layer, part, way, plain)
        unknown = plain.keys() - used
        if self._architecture.tie_word_embeddings or self._architecture.num_labels:
            unknown -= {"output_layer.weight"}
        self._check_complete(missing, unknown, wrong)

    def _problems(self, weight: Weight, way: Sequence[Part], table: dict[str, StoredTensor]) -> Iterator[str]:
        """Yield errors in the shapes or dtypes of a weight's tensors."""
        rest = hf_shape(weight.hf[0], self._architecture)[1:]
        for part in way:
            rows = sum(one.rows for one in way if one.key == part.key)
            stored, expected = table[part.key], (*part.sizes, rows, *rest)
            found, dim = list(stored.shape), len(part.sizes)
            if weight.layout is TensorLayout.VOCABULARY and found[dim : dim + 1] > [rows]:
                found[dim] = rows  # padding
            if found != list(expected):
                yield f"{stored.name} is {list(stored.shape)}, but config.json requires {list(expected)}"
            elif stored.dtype not in _DTYPES:
                yield f"{stored.name} is {stored.dtype}, but only 16 and 32 bits are supported"

    def _add(
        self, weight: Weight, layer: int, part: Slice, way: Sequence[Part], table: dict[str, StoredTensor]
    ) -> None:
        """Record where the rows of a weight's Hugging Face tensors are."""
        for row in rows_of(weight, self._architecture, part, layer):
            self.shapes[row.name] = row.shape
            pieces = self._pieces.setdefault(row.name, [])
            count, width = row.box.shape
            position = row.start // width
            for one in way:
                edges = position, position + count
                start, stop = (min(max(-((one.first - edge) // one.step), 0), one.rows) for edge in edges)
                if start < stop:
                    offset = row.box.first + one.first + start * one.step - position
                    piece = _Piece(offset, stop - start, one.step, table[one.key], one.at, one.row + start, one.less)
                    pieces.append(piece)

    def _check_complete(self, missing: Sequence[str], unknown: Collection[str], wrong: Sequence[str]) -> None:
        where = str(self.folder)
        if missing and any(".lora_" in name for name in unknown):
            what, fix = "has an adapter, but not its model", "export the merged model where it was trained"
            raise MegatuneError(Finding(what, where, "its keys are those of LoRA", fix), ExitCode.INPUT)
        findings = list(key_findings(missing, unknown, where, self._architecture.model_type, "tensors"))
        findings += [Finding(each, where) for each in dict.fromkeys(wrong)]
        if findings:
            raise MegatuneError(findings, ExitCode.INPUT)


def torch_dist_files(folder: str | Path) -> list[Path]:
    """List the files of a checkpoint's tensors, and its table."""
    found = iteration_folder(folder)
    return [found / METADATA, *sorted(found.glob("*.distcp"))]


class _Place(NamedTuple):
    """The location of a chunk's elements in its file: the byte offset of element 0, and the strides."""

    start: int
    stride: tuple[int, ...]


class ChunkReader:
    """Reads boxes of tensors. The header of an archive is compared with the table before anything is allocated."""

    def __init__(self) -> None:
        self._places: dict[tuple[Path, int], _Place] = {}

    def read(self, tensor: StoredTensor, start: Sequence[int], stop: Sequence[int]) -> Tensor:
        """Return the box from corner `start` to corner `stop`, in the tensor's dtype, on the CPU.

        Raises:
            MegatuneError: a file does not match the table (exit code 66).
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
        """Compare the headers of all its chunks with the table."""
        for chunks in tensor.by_first.values():
            for chunk in chunks:
                self._place(tensor, chunk)

    def _part(self, tensor: StoredTensor, chunk: Chunk, corner: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Read a box of a chunk: all bytes in the file from its first to its last element."""
        place, itemsize = self._place(tensor, chunk), tensor.dtype.itemsize
        first = place.start + itemsize * sum(index * step for index, step in zip(corner, place.stride, strict=True))
        span = 1 + sum((size - 1) * step for size, step in zip(shape, place.stride, strict=True))
        try:
            content = RangedFile(chunk.path).read(first, first + span * itemsize)
        except OSError:
            raise _invalid(chunk, tensor, "the file is truncated") from None
        return content.view(tensor.dtype).as_strided(list(shape), list(place.stride))

    def _place(self, tensor: StoredTensor, chunk: Chunk) -> _Place:
        key = chunk.path, chunk.start
        if key not in self._places:
            self._places[key] = _locate(tensor, chunk)
        return self._places[key]


def _locate(tensor: StoredTensor, chunk: Chunk) -> _Place:
    """Load a chunk without its elements, as written by torch.save, and check its header."""
    try:
        with open(chunk.path, "rb", buffering=0) as file:
            view: Any = _Window(file, chunk.start, chunk.length)
            with zipfile.ZipFile(view) as archive:
                infos = archive.infolist()
                if sum(info.file_size for info in infos) > chunk.length or any(info.compress_type for info in infos):
                    raise _invalid(chunk, tensor, "it is not a tensor")
                if any(archive.read(info) != b"little" for info in infos if info.filename.endswith("/byteorder")):
                    raise _invalid(chunk, tensor, "its byte order differs from this machine's")
            view.seek(0)
            try:
                found = torch.load(view, map_location="meta", weights_only=True)
            except Exception:
                view.seek(0)
                if names := get_unsafe_globals_in_checkpoint(view):
                    raise unsafe_name_error(names[0], f"{chunk.path}, byte {chunk.start}") from None
                raise
    except MegatuneError:
        raise
    except Exception as error:  # zipfile and torch raise anything for files that are not archives of a tensor
        why = f"it is not a tensor written by torch.save ({type(error).__name__})"
        raise _invalid(chunk, tensor, why) from None
    if not isinstance(found, Tensor) or found.layout is not torch.strided:
        raise _invalid(chunk, tensor, "it is not a tensor")
    if (found.dtype, tuple(found.shape)) != (tensor.dtype, chunk.sizes):
        raise _invalid(chunk, tensor, f"the file has {list(found.shape)} of {found.dtype} there")
    storage, itemsize = found.untyped_storage(), tensor.dtype.itemsize
    begin = int(getattr(storage, "_checkpoint_offset"))  # noqa: B009  (the offset in the archive)
    first, stride = int(found.storage_offset()), tuple(map(int, found.stride()))
    last = first + sum((size - 1) * step for size, step in zip(chunk.sizes, stride, strict=True))
    if math.prod(chunk.sizes) and (last + 1) * itemsize > min(int(storage.nbytes()), chunk.length - begin):
        raise _invalid(chunk, tensor, "its elements lie outside its storage")
    return _Place(chunk.start + begin + first * itemsize, stride)


class _Window(io.RawIOBase):
    """A part of a file, as a file object."""

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


def _invalid(chunk: Chunk, tensor: StoredTensor, why: str) -> MegatuneError:
    what = f"byte {chunk.start} is not {list(chunk.sizes)} of {tensor.dtype}, a part of {tensor.name!r:.200}"
    fix = "copy the checkpoint again: files may be swapped or truncated"
    return MegatuneError(Finding(what, str(chunk.path), why, fix), ExitCode.INPUT)
