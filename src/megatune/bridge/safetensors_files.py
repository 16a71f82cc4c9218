"""Read boxes of tensors from a folder of safetensors files, and build the headers of such files."""

from __future__ import annotations

import json
import math
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatune.bridge.block_formats import (
    FP8_BLOCK,
    FP8_DTYPE,
    FP8_SCALES,
    MXFP4_BLOCK,
    MXFP4_BLOCKS,
    MXFP4_SCALES,
    dequantize_fp8,
    dequantize_mxfp4,
    fp8_grid,
    fp8_names,
    mxfp4_names,
)
from megatune.bridge.checked_files import RangedFile
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families.forms import FileTensor
from megatune.families.table import Box, Row, split_rows, whole_box
from megatune.families.weight_index import HeaderEntry, damaged_file, no_weights, read_header, read_whole_index

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
# The maximum size of a read, in addition to the memory of the result.
_BUCKET_BYTES = 2**26
# A part of a tensor: NAME[first:last,left:right of 4096x11008]
_PART = re.compile(r"(.+)\[(\d+):(\d+),(\d+):(\d+) of (\d+(?:x\d+)*)\]")


class TensorSource(ABC):
    """Hugging Face tensors by name, of which boxes can be read.

    Attributes:
        shapes: of all tensors, by name, if the source knows them.
    """

    shapes: Mapping[str, tuple[int, ...]]

    def has(self, name: str) -> bool:
        """Return whether there is a tensor with this name."""
        return name in self.shapes

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.shapes[name]

    @abstractmethod
    def read_box(self, name: str, box: Box) -> Tensor:
        """Return a box of a tensor, [rows, columns], in the dtype of the source, on the CPU."""

    def whole(self, name: str) -> Tensor:
        """Return all of a tensor, on the CPU."""
        shape = self.shape(name)
        return self.read_box(name, whole_box(shape)).reshape(shape)

    def fill(self, target: Tensor, rows: Iterable[Row], prefix: str = "", *, start: int = 0) -> None:
        """Fill elements of a flattened engine tensor from the rows of its table, a bucket at a time; elements in no row
        are zero.

        Args:
            target: elements of the engine's slice from `start` on, [n], of any dtype and device.
            rows: of these elements.
            prefix: of the tensors' names in the source.
        """
        filled = 0
        for whole in rows:
            for row in split_rows(whole, _BUCKET_BYTES // 4):
                first = row.start - start
                target[filled:first].zero_()
                filled = first + row.box.numel
                target[first:filled].copy_(self.read_box(prefix + row.name, row.box).reshape(-1))
        target[filled:].zero_()


class ModelFolder(TensorSource):
    """A model's tensors in a folder of files, which may have other names and arrangements than the weight map."""

    folder: Path

    @abstractmethod
    def names(self) -> set[str]:
        """List the names of all tensors in the files."""

    @abstractmethod
    def entry(self, name: str) -> TensorEntry:
        """Describe a tensor in the files."""


class _Part(NamedTuple):
    """A box of a tensor, and the file entry that holds it."""

    box: Box
    entry: str


class SafetensorsFolder(ModelFolder):
    """The tensors of `NAME.safetensors`, or of the files that `NAME.safetensors.index.json` lists.

    Tensors are read on demand. NAME is "model" for a Hugging Face checkpoint. A tensor may be stored in parts, which
    several ranks wrote (`part_name`), or in MXFP4 or fp8, which is read as bf16.

    Attributes:
        places: the location of a tensor in the files, by its name; other tensors are stored under their names.

    Raises:
        MegatuneError: files are missing, damaged or of another type (exit code 66).
    """

    def __init__(self, folder: str | Path, name: str = "model") -> None:
        self.folder = Path(folder)
        self._open: dict[str, tuple[RangedFile, dict[str, HeaderEntry]]] = {}
        self._file_of = self._list(name)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._parts: dict[str, list[_Part]] = {}
        for entry in self._file_of:
            if match := _PART.fullmatch(entry):
                part = _Part(Box(*map(int, match.group(2, 3, 4, 5))), entry)
                self._parts.setdefault(match[1], []).append(part)
                self._shapes[match[1]] = tuple(map(int, match[6].split("x")))
        for whole, parts in self._parts.items():
            all_of_it = whole_box(self._shapes[whole])
            is_inside = all(part.box.overlap(all_of_it) == part.box for part in parts)
            if not is_inside or sum(part.box.numel for part in parts) != all_of_it.numel:
                raise self._parts_missing(whole)
        self.places: Mapping[str, FileTensor] = {}
        self._packed = mxfp4_names(self._file_of)
        for name in self._packed:
            self._shapes[name] = self._packed_shape(name)
        self._scaled = fp8_names(self._file_of)
        for name in self._scaled:
            self._check_scales(name)

    def _packed_shape(self, name: str) -> tuple[int, ...]:
        blocks, scales = (self._header(name + part)[1] for part in (MXFP4_BLOCKS, MXFP4_SCALES))
        *outer, rows, count = scales.shape
        if len(outer) != 1 or blocks.shape != (*outer, rows, count, MXFP4_BLOCK // 2):
            what = f"{name} has blocks {list(blocks.shape)} and scales {list(scales.shape)}"
            why = "MXFP4 needs one scale for each block of 32 values, in experts' matrices"
            raise MegatuneError(Finding(what, str(self.folder), why, "copy the checkpoint again"), ExitCode.INPUT)
        return *outer, count * MXFP4_BLOCK, rows

    def _check_scales(self, name: str) -> None:
        (_, values), (_, scales) = self._header(name), self._header(name + FP8_SCALES)
        expected = tuple(-(-size // FP8_BLOCK) for size in values.shape)
        if values.dtype != FP8_DTYPE or len(expected) != 2 or scales.shape != expected:
            what = f"{name} is {values.dtype} {list(values.shape)} and its scales {list(scales.shape)}"
            why = "fp8 is supported for matrices with one scale for each block of 128 rows and 128 columns"
            fix = "copy the checkpoint again, or use the model in bfloat16"
            raise MegatuneError(Finding(what, str(self.folder), why, fix), ExitCode.INPUT)

    def _parts_missing(self, name: str) -> MegatuneError:
        finding = Finding(f"parts of {name} are missing", str(self.folder), fix="copy the checkpoint again")
        return MegatuneError(finding, ExitCode.INPUT)

    def _list(self, name: str) -> dict[str, str]:
        index, single = self.folder / f"{name}.safetensors.index.json", self.folder / f"{name}.safetensors"
        if index.is_file():
            return read_whole_index(index)
        if single.is_file():
            return dict.fromkeys(self._open_file(single.name)[1], single.name)
        raise MegatuneError(no_weights(self.folder, single.name), ExitCode.INPUT)

    def names(self) -> set[str]:
        parts = {part.entry for each in self._parts.values() for part in each}
        parts |= {name + part for name in self._packed for part in (MXFP4_BLOCKS, MXFP4_SCALES)}
        parts |= {name + FP8_SCALES for name in self._scaled}
        return {*self._file_of.keys() - parts, *self._parts, *self._packed}

    def files(self) -> list[Path]:
        """List the files that hold tensors."""
        return [self.folder / file for file in sorted(set(self._file_of.values()))]

    def entry(self, name: str) -> TensorEntry:
        if name in self._packed or name in self._scaled:
            return TensorEntry(name, self.file_shape(name), torch.bfloat16)
        entry = self._parts[name][0].entry if name in self._parts else name
        return TensorEntry(name, self.file_shape(name), _DTYPES[self._header(entry)[1].dtype])

    def has(self, name: str) -> bool:
        place = self._place(name)
        return place.name in self._file_of or place.name in self._shapes

    def _open_file(self, file: str) -> tuple[RangedFile, dict[str, HeaderEntry]]:
        if file not in self._open:
            path = self.folder / file
            header = read_header(path)
            self._open[file] = RangedFile(path), header
        return self._open[file]

    def _header(self, entry: str) -> tuple[RangedFile, HeaderEntry]:
        """Return the file and the header entry of a tensor."""
        name = self._file_of[entry]
        file, header = self._open_file(name)
        if (found := header.get(entry)) is None:
            raise damaged_file(self.folder / name, f"it has no tensor {entry}, which the index lists")
        is_packed = found.dtype == "U8" and entry.removesuffix(MXFP4_BLOCKS).removesuffix(MXFP4_SCALES) in self._packed
        is_packed |= found.dtype == FP8_DTYPE and entry + FP8_SCALES in self._file_of
        if found.dtype not in _DTYPES and not is_packed:
            what, fix = f"{entry} is {found.dtype}", "use the model in bfloat16, float16 or float32"
            why = "only 16 and 32 bits are supported"
            raise MegatuneError(Finding(what, str(self.folder / name), why, fix), ExitCode.INPUT)
        return file, found

    def file_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in the files."""
        return self._shapes[name] if name in self._shapes else self._header(name)[1].shape

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._place(name)
        shape = self.file_shape(place.name)
        return shape if place.expert is None else (place.rows, *(shape[1:2] if place.transposed else shape[2:]))

    def read_box(self, name: str, box: Box) -> Tensor:
        place = self._place(name)
        if place.name in self._parts:
            return self._joined(place.name, box)
        if place.expert is None:
            return self._read_matrix(place.name, whole_box(self.file_shape(place.name)), box)
        # A matrix, or a bias, in a stack of all experts.
        rows, columns = (*self.file_shape(place.name)[1:], 1)[:2]
        inside = box._replace(first=box.first + place.first_row, last=box.last + place.first_row)
        matrix = Box(0, rows, 0, columns)
        if place.transposed:
            return self._read_matrix(place.name, matrix, inside.transposed(), place.expert).T
        return self._read_matrix(place.name, matrix, inside, place.expert)

    def _joined(self, name: str, box: Box) -> Tensor:
        """Read a box of a tensor that is stored in parts."""
        found: Tensor | None = None
        for part in self._parts[name]:
            if (overlap := part.box.overlap(box)) is not None:
                values = self._read_matrix(part.entry, part.box, overlap)
                if overlap == box:
                    return values
                found = values.new_zeros(box.shape) if found is None else found
                found[overlap.within(box).slices] = values
        if found is None:
            raise self._parts_missing(name)
        return found

    def _read_matrix(self, entry: str, whole: Box, box: Box, index: int = 0) -> Tensor:
        """Read a box of a matrix of an entry, which may be the index-th in a stack."""
        if entry in self._packed:
            return self._unpacked(entry, box, index)
        if entry in self._scaled:
            return self._descaled(entry, whole, box)
        return self._stored(entry, whole, box, index)

    def _stored(self, entry: str, whole: Box, box: Box, index: int = 0) -> Tensor:
        """Read a box like `_read_matrix`, but as it is stored; integers and fp8 as bytes."""
        file, place = self._header(entry)
        dtype = _DTYPES.get(place.dtype, torch.uint8)
        height, width = box.shape
        row_bytes = (whole.right - whole.left) * dtype.itemsize
        if place.stop - place.start < (index + 1) * whole.numel * dtype.itemsize:
            raise damaged_file(file.path, f"{entry} is smaller than its name states")
        first = place.start + index * whole.numel * dtype.itemsize + (box.first - whole.first) * row_bytes

        def read(start: int, stop: int) -> Tensor:
            try:
                content = file.read(start, stop)
            except OSError as error:
                raise damaged_file(file.path, error) from None
            # Other writers may not align the data.
            return (content if content.data_ptr() % dtype.itemsize == 0 else content.clone()).view(dtype)

        if height == 1 or width * dtype.itemsize == row_bytes:
            begin = first + (box.left - whole.left) * dtype.itemsize
            return read(begin, begin + height * width * dtype.itemsize).view(height, width)
        found = torch.empty(height, width, dtype=dtype)
        step = max(1, _BUCKET_BYTES // row_bytes)
        for row in range(0, height, step):
            rows = read(first + row * row_bytes, first + min(row + step, height) * row_bytes)
            columns = slice(box.left - whole.left, box.right - whole.left)
            found[row : row + step] = rows.view(-1, whole.right - whole.left)[:, columns]
        return found

    def _descaled(self, name: str, whole: Box, box: Box) -> Tensor:
        """Read a box of an fp8 matrix as bf16."""
        scales = whole_box(self._header(name + FP8_SCALES)[1].shape)
        values = self._stored(name, whole, box).view(torch.float8_e4m3fn)
        return dequantize_fp8(values, self._stored(name + FP8_SCALES, scales, fp8_grid(box)), box)

    def _unpacked(self, name: str, box: Box, index: int) -> Tensor:
        """Read a box of the index-th matrix of an MXFP4 tensor as bf16, in whole blocks: rows are stored as columns."""
        _, columns, rows = self._shapes[name]
        first, last = box.first // MXFP4_BLOCK, -(-box.last // MXFP4_BLOCK)

        def part(end: str, width: int) -> Tensor:
            whole = Box(0, rows, 0, columns // MXFP4_BLOCK * width)
            return self._read_matrix(name + end, whole, Box(box.left, box.right, first * width, last * width), index)

        blocks = part(MXFP4_BLOCKS, MXFP4_BLOCK // 2).unflatten(1, (last - first, -1))
        values = dequantize_mxfp4(blocks, part(MXFP4_SCALES, 1))
        skipped = first * MXFP4_BLOCK
        return values[:, box.first - skipped : box.last - skipped].T

    def _place(self, name: str) -> FileTensor:
        return self.places.get(name) or FileTensor(name)


def part_name(name: str, shape: Sequence[int], box: Box) -> str:
    """Return the name of a box of a tensor in files; the tensor's name if it is the whole tensor."""
    if box == whole_box(tuple(shape)):
        return name
    return f"{name}[{box.first}:{box.last},{box.left}:{box.right} of {'x'.join(map(str, shape))}]"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def header_of(entries: Iterable[TensorEntry]) -> bytes:
    """Return the header of a file with these tensors, before the first one's data; see `weight_index.read_header`."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        stop = offset + entry.num_bytes
        dtype, shape = _DTYPE_NAMES[entry.dtype], list(entry.shape)
        header[entry.name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    return struct.pack("<Q", len(text)) + text
