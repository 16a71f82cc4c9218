"""Read slices of a torch_dist checkpoint's weights as Hugging Face tensors, chunk by chunk."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.utils import _ReaderView
from torch.serialization import get_unsafe_globals_in_checkpoint

from megatune.architecture import Architecture
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
_KEPT_BYTES = 2**28  # of chunks in memory, unless a single one is larger


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


class ChunkReader:
    """Reads boxes of tensors. As in torch.distributed.checkpoint's FileSystemReader, a chunk is read whole. The last
    ones are kept, since rows of several tensors may be read alternately, such as a head's queries, keys and values."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, tuple[int, ...]], Tensor] = {}

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
            if all(first < last for first, last in inside):
                target, source = (
                    tuple(slice(first - zero, last - zero) for (first, last), zero in zip(inside, origin, strict=True))
                    for origin in (start, chunk.offsets)
                )
                found[target] = self._chunk(tensor, chunk)[source]
        return found

    def _chunk(self, tensor: StoredTensor, chunk: Chunk) -> Tensor:
        key = tensor.name, chunk.offsets
        if key not in self._kept:
            while self._kept and sum(each.nbytes for each in self._kept.values()) + chunk.length > _KEPT_BYTES:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = _load(chunk, tensor.dtype, tensor.name)
        return self._kept[key]


class _Window(_ReaderView):
    """The part of a file with a chunk. Torch's own seeks past the end, where zipfile looks for the last bytes."""

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        offset, whence = (self.len + offset, os.SEEK_SET) if whence == os.SEEK_END else (offset, whence)
        return super().seek(offset, whence)


def _load(chunk: Chunk, dtype: torch.dtype, name: str) -> Tensor:
    """Load a chunk, and compare it with the table."""
    try:
        with open(chunk.path, "rb") as file:
            view: Any = _Window(file, chunk.start, chunk.length)
            with zipfile.ZipFile(view) as archive:  # compressed content may unpack to more than the memory holds
                infos = archive.infolist()
                if sum(info.file_size for info in infos) > chunk.length or any(info.compress_type for info in infos):
                    raise _invalid(chunk, dtype, name, "it is not a tensor")
            view.seek(0)
            try:
                found = torch.load(view, map_location="cpu", weights_only=True)
            except Exception:
                view.seek(0)
                if names := get_unsafe_globals_in_checkpoint(view):
                    raise unsafe_name_error(names[0], f"{chunk.path}, byte {chunk.start}") from None
                raise
    except MegatuneError:
        raise
    except Exception as error:  # zipfile and torch raise anything for files that are not archives of a tensor
        why = f"it is not a tensor written by torch.save ({type(error).__name__})"
        raise _invalid(chunk, dtype, name, why) from None
    if not isinstance(found, Tensor) or found.layout is not torch.strided:
        raise _invalid(chunk, dtype, name, "it is not a tensor")
    if (found.dtype, tuple(found.shape)) != (dtype, chunk.sizes):
        raise _invalid(chunk, dtype, name, f"the file has {list(found.shape)} of {found.dtype} there")
    return found


def _invalid(chunk: Chunk, dtype: torch.dtype, name: str, why: str) -> MegatuneError:
    what = f"byte {chunk.start} is not {list(chunk.sizes)} of {dtype}, a part of {name!r:.200}"
    fix = "copy the checkpoint again: files may be swapped or truncated"
    return MegatuneError(Finding(what, str(chunk.path), why, fix), ExitCode.INPUT)
