"""The safetensors files of a model that ranks write together: which tensors a file holds, and which rank writes it.

A file belongs to the ranks that together hold its weights: those of a pipeline stage, or for experts those of a stage
that hold the same experts. Its tensors are gathered one by one over the tensor-parallel ranks of one replica, on the
rank that writes the file. There are about as many files as such ranks, so that all of them write at the same time, and
no rank holds more than one whole weight (for experts: one expert's).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from megatune.architecture import Architecture
from megatune.bridge.file_stream import TensorFile, WrittenFile, index_files
from megatune.bridge.parameters import Holders, LocalParameter, Piece, gather_piece, holders_of, send_expert
from megatune.bridge.safetensors_files import ModelFolder, TensorEntry
from megatune.engine import groups
from megatune.engine.groups import RankCoordinates
from megatune.families.forms import AS_MAPPED, CheckpointForm
from megatune.families.table import rows_of
from megatune.families.weights import TensorLayout, hf_shapes

# Hugging Face's size limit of a weight file, and the size below which a file is not split so that more ranks can write.
MAX_FILE_BYTES = 5 * 10**9
_SHARED_FILE_BYTES = 250 * 10**6

K = TypeVar("K")
V = TypeVar("V")


def gather_dict(mine: dict[K, V]) -> dict[K, V]:
    """Merge the dictionaries of all ranks, on every rank."""
    return {key: value for part in groups.all_gather_object(mine) for key, value in part.items()}


def split_into_files(items: Iterable[tuple[V, int]], most: int) -> list[list[V]]:
    """Split items with sizes, in order, into files of at most `most` bytes; items of size 0 stay with the previous."""
    files: list[list[V]] = []
    size = 0
    for item, num_bytes in items:
        if not files or (num_bytes and size + num_bytes > most):
            files.append([])
            size = 0
        files[-1].append(item)
        size += num_bytes
    return files


@dataclass(frozen=True, slots=True)
class CarriedTensors:
    """Tensors of a checkpoint that its model does not use and that are written back unchanged: names in a folder."""

    folder: ModelFolder | None = None
    names: tuple[str, ...] = ()

    def file(self, name: str) -> TensorFile | None:
        """Return a file with them, each read when it is written; None if there are none."""
        if (folder := self.folder) is None or not self.names:
            return None
        entries = [folder.entry(each) for each in self.names]
        return TensorFile(name, entries, (folder.whole(each.name) for each in entries))


NO_CARRIED = CarriedTensors()


@dataclass(frozen=True, slots=True)
class _File:
    """A file to write: its content, and which of its holders writes it."""

    name: str
    pieces: Sequence[Piece]
    entries: Sequence[TensorEntry]
    holders: Holders
    replica_rank: int
    slice_rank: int


@dataclass(slots=True)
class FileSet:
    """A set of files, such as those of a model; constructed by all ranks together.

    Attributes:
        stem: the common part of the files' names.
        carried: additional tensors, in the last file, which rank 0 writes.
        is_final: False for files that are changed after all ranks have written.
    """

    stem: str
    parameters: Sequence[LocalParameter]
    architecture: Architecture
    coords: RankCoordinates
    max_file_bytes: int = MAX_FILE_BYTES
    form: CheckpointForm = AS_MAPPED
    carried: CarriedTensors = NO_CARRIED
    is_final: bool = True
    _planned: list[_File] = field(init=False)
    _carried_file: TensorFile | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._planned = self._plan([local for local in self.parameters if not local.is_copy])

    @property
    def num_bytes(self) -> int:
        """The number of bytes of the tensors that this rank writes."""
        planned = sum(entry.num_bytes for file in self._planned if self._is_mine(file) for entry in file.entries)
        return planned + (0 if self._carried_file is None else self._carried_file.num_bytes)

    def files(self) -> Iterator[WrittenFile]:
        """Yield the files that this rank writes; collective over all ranks.

        The tensors of a file are gathered while they are iterated, which must happen before the next file is requested.

        A rank takes part in the files of two sets of holders, first all of one, then all of the other, in the same
        order as the other holders, so that there is no deadlock.
        """
        for file in self._planned:
            if file.replica_rank != file.holders.replicas.rank():
                continue
            if self._is_mine(file):
                yield TensorFile(file.name, file.entries, self._tensors(file), self.is_final)
            else:
                for _ in self._tensors(file):
                    raise AssertionError("only the writing rank holds whole tensors")
        if self._carried_file is not None:
            yield self._carried_file
        yield from self._index()

    @staticmethod
    def _is_mine(file: _File) -> bool:
        return (file.replica_rank, file.slice_rank) == (file.holders.replicas.rank(), file.holders.slices.rank())

    def _plan(self, parameters: Sequence[LocalParameter]) -> list[_File]:
        """List the files of this rank's holders: weights in order, with a new file when one would become too large."""
        pieces: dict[Holders, list[Piece]] = {}
        # All ranks process the files of the same holders in the same order.
        for experts in (False, True):
            fused = bool(self.form.fused)
            pieces.setdefault(holders_of(self.coords, experts=experts, fused=fused), [])
        for local in parameters:
            fused = self._fused_name(local) is not None
            found = local.all_experts(self.architecture) if fused else local.pieces(self.architecture)
            pieces[holders_of(self.coords, experts=local.weight.per_expert, fused=fused)] += found
        by_holders = {holders: self._cut(holders, found) for holders, found in pieces.items()}
        counts = gather_dict({holders.key: len(contents) for holders, contents in by_holders.items()})
        total = sum(counts.values()) + bool(self.carried.names)
        if self.coords.rank == 0:
            self._carried_file = self.carried.file(f"{self.stem}-{total:05d}-of-{total:05d}.safetensors")
        files = []
        for holders, contents in by_holders.items():
            first = sum(count for key, count in counts.items() if key < holders.key)
            replicas, slices = holders.replicas.size(), holders.slices.size()
            for index, content in enumerate(contents):
                name = f"{self.stem}-{first + index + 1:05d}-of-{total:05d}" if total > 1 else self.stem
                writer = index % replicas, index // replicas % slices
                entries = [entry for piece in content for entry in self._entries(piece)]
                files.append(_File(f"{name}.safetensors", content, entries, holders, *writer))
        return files

    def _cut(self, holders: Holders, pieces: Sequence[Piece]) -> list[list[Piece]]:
        """Split the pieces of some holders into files, one per rank if those are not too small."""
        sizes = [sum(entry.num_bytes for entry in self._entries(piece)) for piece in pieces]
        per_rank = sum(sizes) // (holders.replicas.size() * holders.slices.size())
        most = min(self.max_file_bytes, max(per_rank, _SHARED_FILE_BYTES))
        return split_into_files(zip(pieces, sizes, strict=True), most)

    def _fused_name(self, local: LocalParameter) -> str | None:
        return self.form.fused_name(local.weight, local.layer)

    def _entries(self, piece: Piece) -> list[TensorEntry]:
        """List the tensors that start with a piece: a fused tensor of all experts starts with the first expert."""
        local = piece.local
        if self._fused_name(local) is None:
            names = hf_shapes(local.weight, self.architecture, local.layer, piece.slice)
            shapes = {each: shape for name, shape in names.items() for each in self.form.written_names(name)}
        else:
            shapes = self.form.file_shapes(local.weight, self.architecture, local.layer)
            shapes = {} if piece.slice.ep_rank else shapes
        return [TensorEntry(name, shape, local.parameter.dtype) for name, shape in shapes.items()]

    def _tensors(self, file: _File) -> Iterator[Tensor]:
        """Yield the file's whole tensors, fused ones expert by expert, on the rank that writes it; else nothing."""
        holders = file.holders
        for piece in file.pieces:
            if self._fused_name(piece.local) is not None:
                parts = send_expert(piece, holders, self.coords, file.slice_rank, self.architecture)
                if parts is not None:
                    matrix = torch.cat(list(parts.values()))
                    yield matrix.T if self.form.transposed and matrix.dim() > 1 else matrix
                continue
            if piece.local.weight.layout is TensorLayout.REPLICATED or holders.slices.size() == 1:
                yield from self._local_tensors(piece) if holders.slices.rank() == file.slice_rank else ()
                continue
            whole = gather_piece(piece, holders, file.slice_rank, self.architecture, torch.device("cpu"))
            for name, tensor in (whole or {}).items():
                yield from [tensor] * len(self.form.written_names(name))

    def _local_tensors(self, piece: Piece) -> Iterator[Tensor]:
        """Yield the rows of a piece that this rank holds whole, tensor by tensor, without copying."""
        weight, layer = piece.local.weight, piece.local.layer
        rows = list(rows_of(weight, self.architecture, piece.slice, layer))
        for name in hf_shapes(weight, self.architecture, layer, piece.slice):
            for _ in self.form.written_names(name):
                for row in sorted((row for row in rows if row.name == name), key=lambda row: row.box):
                    yield piece.values[row.elements]

    def _index(self) -> Iterator[WrittenFile]:
        """Yield the index on rank 0; nothing if there is only one file."""
        mine = {
            entry.name: (file.name, entry.num_bytes)
            for file in self._planned
            if (file.holders.slices.rank(), file.holders.replicas.rank()) == (0, 0)
            for entry in file.entries
        }
        if (carried := self._carried_file) is not None:
            mine |= {entry.name: (carried.name, entry.num_bytes) for entry in carried.entries}
        index = index_files(self.stem, gather_dict(mine))
        yield from index if self.coords.rank == 0 else ()
