"""The safetensors files that ranks write together: which tensors are in which, and who writes it.

A file belongs to the ranks that together hold its weights: those of a pipeline stage, for experts those of a stage that
hold the same experts. Its tensors are gathered one by one over the tensor-parallel ranks of one replica, to the one
rank that writes the file, so that ranks write different files at the same time and none needs to hold more than one
weight (of experts: one expert's) whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from megatune.architecture import Architecture
from megatune.bridge.carried import NOTHING_CARRIED, CarriedTensors
from megatune.bridge.parameters import Holders, LocalParameter, Piece, gather_piece, holders_of, send_expert
from megatune.bridge.safetensors_files import TensorEntry, safetensors_writer
from megatune.engine import groups
from megatune.engine.groups import RankCoordinates
from megatune.families.forms import AS_MAPPED, CheckpointForm
from megatune.families.weights import hf_shapes

# Hugging Face's own limit of a weight file.
MAX_FILE_BYTES = 5 * 10**9

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A safetensors file that this rank writes.

    Attributes:
        name: its path in the folder, with forward slashes.
        entries: its tensors, in their order.
        tensors: each of them, or parts of its dimension 0, on any device; can be read once unless `held`.
    """

    name: str
    entries: Sequence[TensorEntry]
    tensors: Iterable[tuple[str, Tensor]]

    def held(self) -> TensorFile:
        """Return the file with its tensors in the host's memory, where nothing changes them any more."""
        # None of them is the model's own memory: gathering made them.
        return replace(self, tensors=[(name, tensor.detach().contiguous().cpu()) for name, tensor in self.tensors])

    def write(self, folder: Path) -> Path:
        """Write and sync it."""
        path = _place(folder, self.name)
        with safetensors_writer(path, self.entries) as write:
            for name, tensor in self.tensors:
                write(name, tensor)
        return path


@dataclass(frozen=True, slots=True)
class SmallFile:
    """Any other file that this rank writes; `name` is its path in the folder, and it has no tensors."""

    name: str
    content: bytes
    tensors: tuple[()] = ()

    def held(self) -> SmallFile:
        """Return the file itself, whose content does not change."""
        return self

    def write(self, folder: Path) -> Path:
        """Write it."""
        path = _place(folder, self.name)
        path.write_bytes(self.content)
        return path


WrittenFile: TypeAlias = TensorFile | SmallFile


def _place(folder: Path, name: str) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    return path


def united(mine: dict[K, V]) -> dict[K, V]:
    """Unite dictionaries of all ranks, on every rank."""
    return {key: value for part in groups.gather(mine) for key, value in part.items()}


@dataclass(frozen=True, slots=True)
class _File:
    """A file to be written: what is in it, and which of its holders writes it."""

    name: str
    pieces: tuple[Piece, ...]
    holders: Holders
    replica_rank: int
    slice_rank: int


@dataclass(slots=True)
class FileSet:
    """One set of files, such as those of a model; made by all ranks together.

    Attributes:
        stem: of the files' names, with their folder.
        kinds: prefixes of tensors' names; each weight is written once for each.
        dtype: of all tensors; None for those of the parameters.
        provide: (piece, kind) -> this rank's elements of it, [n]; zero for other replicas' elements where `is_split`.
        is_split: whether every replica provides a part of each piece; otherwise each provides all of it.
        carried: further tensors, in the last file, which rank 0 writes.
    """

    stem: str
    kinds: tuple[str, ...]
    dtype: torch.dtype | None
    provide: Callable[[Piece, str], Tensor]
    is_split: bool
    parameters: Sequence[LocalParameter]
    architecture: Architecture
    place: RankCoordinates
    max_file_bytes: int = MAX_FILE_BYTES
    form: CheckpointForm = AS_MAPPED
    carried: CarriedTensors = NOTHING_CARRIED
    _planned: list[_File] = field(init=False)
    _of_carried: TensorFile | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._planned = self._plan([local for local in self.parameters if not local.is_copy])

    @property
    def num_bytes(self) -> int:
        """Of the tensors that this rank writes."""
        mine = (file for file in self._planned if self._is_mine(file))
        entries = [entry for file in mine for piece in file.pieces for entry in self._entries(piece)]
        return sum(entry.num_bytes for entry in [*entries, *self._carried_entries()])

    def files(self) -> Iterator[WrittenFile]:
        """Yield the files that this rank writes; collective over all ranks.

        The tensors of each are gathered while they are read, which must be before the next file is asked for.

        A rank takes part in the files of two sets of holders, first in all of the one, then in all of the other, in the
        same order as the other holders do: none waits for one that waits for it.
        """
        for file in self._planned:
            if file.replica_rank != file.holders.replicas.rank() and not self.is_split:
                continue
            if self._is_mine(file):
                entries = [entry for piece in file.pieces for entry in self._entries(piece)]
                yield TensorFile(file.name, entries, self._tensors(file))
            else:
                for _ in self._tensors(file):
                    raise AssertionError("only the writing rank holds whole tensors")
        if self._of_carried is not None:
            yield self._of_carried
        yield from self._index()

    def _carried_entries(self) -> Sequence[TensorEntry]:
        return self._of_carried.entries if self._of_carried is not None else ()

    @staticmethod
    def _is_mine(file: _File) -> bool:
        return (file.replica_rank, file.slice_rank) == (file.holders.replicas.rank(), file.holders.slices.rank())

    def _plan(self, parameters: Sequence[LocalParameter]) -> list[_File]:
        """List the files of this rank's holders: weights in order, a new file where one would grow too large."""
        by_holders: dict[Holders, list[list[Piece]]] = {}
        sizes: dict[Holders, int] = {}
        # All ranks take part in the files of the same holders in the same order.
        for experts in (False, True):
            fused = bool(self.form.fused)
            by_holders.setdefault(holders_of(self.place, experts=experts, fused=fused), [])
        for local in parameters:
            fused = self._fused_name(local) is not None
            holders = holders_of(self.place, experts=local.weight.per_expert, fused=fused)
            contents = by_holders[holders]
            for piece in local.every_expert(self.architecture) if fused else local.pieces(self.architecture):
                num_bytes = sum(entry.num_bytes for entry in self._entries(piece))
                # What belongs to a tensor that is begun has no entry of its own.
                if not contents or (num_bytes and sizes[holders] + num_bytes > self.max_file_bytes):
                    contents.append([])
                    sizes[holders] = 0
                contents[-1].append(piece)
                sizes[holders] += num_bytes
        counts = united({holders.key: len(contents) for holders, contents in by_holders.items()})
        total = sum(counts.values()) + bool(self.carried.names)
        if self.carried.names and self.place.rank == 0:
            name = f"{self.stem}-{total:05d}-of-{total:05d}.safetensors"
            self._of_carried = TensorFile(name, self.carried.entries, self.carried.tensors())
        files = []
        for holders, contents in by_holders.items():
            first = sum(count for key, count in counts.items() if key < holders.key)
            replicas, slices = holders.replicas.size(), holders.slices.size()
            for index, pieces in enumerate(contents):
                name = f"{self.stem}-{first + index + 1:05d}-of-{total:05d}" if total > 1 else self.stem
                writer = index % replicas, index // replicas % slices
                files.append(_File(f"{name}.safetensors", tuple(pieces), holders, *writer))
        return files

    def _fused_name(self, local: LocalParameter) -> str | None:
        return self.form.fused_name(local.weight, local.layer)

    def _entries(self, piece: Piece) -> list[TensorEntry]:
        """List the tensors that a piece is or begins: the first expert's begins that of all experts."""
        local = piece.local
        dtype = self.dtype or local.parameter.dtype
        if self._fused_name(local) is None:
            names = hf_shapes(local.weight, self.architecture, local.layer, piece.slice)
            shapes = {self.form.file_name(name): shape for name, shape in names.items()}
        else:
            shapes = self.form.file_shapes(local.weight, self.architecture, local.layer)
            shapes = {} if piece.slice.ep_rank else shapes
        return [TensorEntry(kind + name, shape, dtype) for kind in self.kinds for name, shape in shapes.items()]

    def _tensors(self, file: _File) -> Iterator[tuple[str, Tensor]]:
        """Yield the file's tensors, whole, on the rank that writes it, of all experts in one tensor expert by expert;
        nothing on the ranks that help."""
        holders = file.holders
        for piece in file.pieces:
            if (fused := self._fused_name(piece.local)) is not None:
                parts = send_expert(piece, holders, self.place, file.slice_rank, self.architecture)
                if parts is not None:
                    matrix = torch.cat(list(parts.values()))
                    yield fused, (matrix.T if self.form.transposed else matrix)[None]
                continue
            for kind in self.kinds:
                mine = self.provide(piece, kind)
                if self.is_split and holders.replicas.size() > 1:
                    # Parts that are zero where another replica's are not: the sum of their bits is exact, signs of zero
                    # included.
                    bits = mine.view(torch.int32)
                    torch.distributed.reduce(bits, group=holders.replicas, group_dst=file.replica_rank)
                    if file.replica_rank != holders.replicas.rank():
                        continue
                cpu = torch.device("cpu")
                whole = gather_piece(piece, mine, holders, file.slice_rank, self.architecture, cpu)
                yield from ((kind + self.form.file_name(name), tensor) for name, tensor in (whole or {}).items())

    def _index(self) -> Iterator[SmallFile]:
        """Yield, on rank 0, the index that says which file holds which tensor; nothing where one file holds all."""
        mine = {
            entry.name: (file.name.rpartition("/")[2], entry.num_bytes)
            for file in self._planned
            if (file.holders.slices.rank(), file.holders.replicas.rank()) == (0, 0)
            for piece in file.pieces
            for entry in self._entries(piece)
        }
        if (carried := self._of_carried) is not None:
            mine |= {entry.name: (carried.name, entry.num_bytes) for entry in carried.entries}
        merged = united(mine)
        if self.place.rank != 0 or len({file for file, _ in merged.values()}) == 1:
            return
        index = {
            "metadata": {"total_size": sum(num_bytes for _, num_bytes in merged.values())},
            "weight_map": {name: file for name, (file, _) in sorted(merged.items())},
        }
        yield SmallFile(f"{self.stem}.safetensors.index.json", json.dumps(index, indent=2).encode())
