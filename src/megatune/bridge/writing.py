"""Writes tensors that are spread over ranks as one set of safetensors files, every rank a part of them.

A file belongs to the ranks that together hold its weights: those of a pipeline stage, for experts those of a stage that
hold the same experts. Its tensors are gathered one by one over the tensor-parallel ranks of one replica, to the one
rank that writes the file, so that ranks write different files at the same time and none ever holds more than one weight
(of experts: one expert's) whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatune.architecture import Architecture
from megatune.bridge.parameters import LocalParameter, Piece
from megatune.bridge.safetensors_writer import SafetensorsWriter, TensorEntry
from megatune.engine.groups import (
    RankCoordinates,
    expert_replica_group,
    expert_tensor_parallel_group,
    replica_group,
    tensor_parallel_group,
)
from megatune.families.weights import TensorLayout

# (piece, kind) -> this rank's elements of it, [n]; where they are split over replicas, zero for others' elements.
Provider = Callable[[Piece, str], Tensor]


@dataclass(frozen=True, slots=True)
class _Holders:
    """The ranks that together hold some weights, as this rank sees them.

    Attributes:
        key: of these ranks among all such; files are numbered in this order.
        slices: the ranks that hold slices of the same weights; `slice_rank` is this one's number among them.
        replicas: the ranks that hold copies of the same slices.
    """

    key: tuple[int, int]
    slices: ProcessGroup
    slice_rank: int
    slice_size: int
    replicas: ProcessGroup
    replica_rank: int
    replica_size: int


@dataclass(frozen=True, slots=True)
class _File:
    """A file to be written: what is in it, and which of its holders writes it."""

    name: str
    pieces: tuple[Piece, ...]
    holders: _Holders
    replica_rank: int
    slice_rank: int


class Writing:
    """One set of files in the making.

    Args:
        stem: of the files' names.
        kinds: prefixes of tensors' names; each weight is written once for each.
        parameters: this rank's; those that are copies are left out.
    """

    def __init__(
        self,
        folder: Path,
        stem: str,
        kinds: tuple[str, ...],
        parameters: Sequence[LocalParameter],
        architecture: Architecture,
        place: RankCoordinates,
        max_file_bytes: int,
    ) -> None:
        self.folder, self.stem, self.kinds = folder, stem, kinds
        self.architecture, self.place = architecture, place
        self.max_file_bytes = max_file_bytes
        self.parameters = [local for local in parameters if not local.is_copy]

    def write(self, provide: Provider, *, is_split: bool) -> list[Path]:
        """Write all files; collective over all ranks.

        A rank takes part in the files of two sets of holders, first in all of the one, then in all of the other, in the
        same order as the other holders do: none waits for one that waits for it.

        Args:
            is_split: whether every replica provides a part of each piece; otherwise each provides all of it.

        Returns:
            The files that this rank wrote.
        """
        files = self._plan()
        written = []
        for file in files:
            if file.replica_rank != file.holders.replica_rank and not is_split:
                continue
            if (file.replica_rank, file.slice_rank) == (file.holders.replica_rank, file.holders.slice_rank):
                path = self.folder / file.name
                entries = [entry for piece in file.pieces for entry in self._entries(piece)]
                with SafetensorsWriter(path, entries) as out:
                    for name, tensor in self._tensors(file, provide, is_split):
                        out.write(name, tensor)
                written.append(path)
            else:
                for _ in self._tensors(file, provide, is_split):
                    raise AssertionError("only the writing rank holds whole tensors")
        return [*written, *self._write_index(files)]

    def _plan(self) -> list[_File]:
        """The files of this rank's holders: weights in order, a new file where one would grow too large."""
        by_holders: dict[_Holders, list[Piece]] = {self._holders(is_expert=False): []}
        by_holders[self._holders(is_expert=True)] = []
        for local in self.parameters:
            by_holders[self._holders(local.weight.per_expert)] += local.pieces(self.architecture)
        groups = {holders: self._group(pieces) for holders, pieces in by_holders.items()}
        counts = self._counts({holders.key: len(group) for holders, group in groups.items()})
        total = sum(counts.values())
        files = []
        for holders, group in groups.items():
            first = sum(count for key, count in counts.items() if key < holders.key)
            for index, pieces in enumerate(group):
                name = f"{self.stem}-{first + index + 1:05d}-of-{total:05d}" if total > 1 else self.stem
                replica, part = index % holders.replica_size, index // holders.replica_size % holders.slice_size
                files.append(_File(f"{name}.safetensors", tuple(pieces), holders, replica, part))
        return files

    def _holders(self, is_expert: bool) -> _Holders:
        place = self.place
        # Without expert parallelism those of experts are those of everything else.
        if is_expert and (place.ep_size, place.etp_size) != (1, place.tp_size):
            return _Holders(
                (place.pp_rank, 1 + place.ep_rank),
                expert_tensor_parallel_group(),
                place.etp_rank,
                place.etp_size,
                expert_replica_group(),
                place.expert_replica_rank,
                place.expert_replica_size,
            )
        return _Holders(
            (place.pp_rank, 0),
            tensor_parallel_group(),
            place.tp_rank,
            place.tp_size,
            replica_group(),
            place.replica_rank,
            place.replica_size,
        )

    def _group(self, pieces: Sequence[Piece]) -> list[list[Piece]]:
        groups: list[list[Piece]] = []
        size = 0
        for piece in pieces:
            num_bytes = sum(entry.num_bytes for entry in self._entries(piece))
            if not groups or size + num_bytes > self.max_file_bytes:
                groups.append([])
                size = 0
            groups[-1].append(piece)
            size += num_bytes
        return groups

    def _counts(self, mine: dict[tuple[int, int], int]) -> dict[tuple[int, int], int]:
        """How many files each set of holders writes, of all ranks'."""
        gathered: list[dict[tuple[int, int], int]] = [{}] * self.place.world_size
        torch.distributed.all_gather_object(gathered, mine)
        return {key: count for part in gathered for key, count in part.items()}

    def _dtype(self, local: LocalParameter) -> torch.dtype:
        return local.parameter.dtype if self.stem == "model" else torch.float32

    def _entries(self, piece: Piece) -> list[TensorEntry]:
        dtype = self._dtype(piece.local)
        return [
            TensorEntry(kind + name, shape, dtype)
            for kind in self.kinds
            for name, shape in piece.hf_shapes(self.architecture).items()
        ]

    def _tensors(self, file: _File, provide: Provider, is_split: bool) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face tensors of the file, whole, on the rank that writes it; nothing on the ranks that help."""
        for piece in file.pieces:
            for kind in self.kinds:
                mine = provide(piece, kind)
                if is_split:
                    _add_disjoint(mine, file)
                    if file.replica_rank != file.holders.replica_rank:
                        continue
                slices = self._gather(piece, mine, file)
                if slices is not None:
                    for name, tensor in self._assemble(piece, slices).items():
                        yield kind + name, tensor

    def _gather(self, piece: Piece, mine: Tensor, file: _File) -> list[Tensor] | None:
        """The slices of all tensor-parallel ranks, on the writing one."""
        holders = file.holders
        is_writer = holders.slice_rank == file.slice_rank
        if piece.local.weight.layout is TensorLayout.REPLICATED or holders.slice_size == 1:
            return [mine] if is_writer else None
        slices = [torch.empty_like(mine) for _ in range(holders.slice_size)] if is_writer else None
        torch.distributed.gather(mine.contiguous(), slices, group=holders.slices, group_dst=file.slice_rank)
        return slices

    def _assemble(self, piece: Piece, slices: list[Tensor]) -> dict[str, Tensor]:
        """Put the ranks' slices where their segments say."""
        shapes = piece.hf_shapes(self.architecture)
        whole = {name: torch.empty(shape, dtype=self._dtype(piece.local)) for name, shape in shapes.items()}
        for rank, values in enumerate(slices):
            part = replace(piece.slice, tp_rank=rank)
            position = 0
            for segment in piece.segments(self.architecture, part):
                target = whole[segment.name].narrow(segment.dim, segment.start, segment.stop - segment.start)
                target.copy_(values[position : position + target.numel()].view(target.shape))
                position += target.numel()
        return whole

    def _write_index(self, files: list[_File]) -> list[Path]:
        """The index that says which file holds which tensor, by rank 0; none where one file holds all."""
        mine = {
            entry.name: (file.name, entry.num_bytes)
            for file in files
            if (file.holders.slice_rank, file.holders.replica_rank) == (0, 0)
            for piece in file.pieces
            for entry in self._entries(piece)
        }
        gathered: list[dict[str, tuple[str, int]]] = [{}] * self.place.world_size
        torch.distributed.all_gather_object(gathered, mine)
        merged = {name: value for part in gathered for name, value in part.items()}
        if self.place.rank != 0 or len({file for file, _ in merged.values()}) == 1:
            return []
        path = self.folder / f"{self.stem}.safetensors.index.json"
        index = {
            "metadata": {"total_size": sum(num_bytes for _, num_bytes in merged.values())},
            "weight_map": {name: file for name, (file, _) in sorted(merged.items())},
        }
        with open(path, "w", encoding="utf-8") as out:
            json.dump(index, out, indent=2)
            out.flush()
            os.fsync(out.fileno())
        return [path]


def _add_disjoint(values: Tensor, file: _File) -> None:
    """Put together parts that are zero where another replica's are not, on the one that writes; bit for bit, signs of
    zero too."""
    if file.holders.replica_size > 1:
        torch.distributed.reduce(values.view(torch.int32), group=file.holders.replicas, group_dst=file.replica_rank)
