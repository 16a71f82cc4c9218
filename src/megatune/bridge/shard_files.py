"""Write the optimizer state or gradients of all ranks as safetensors files; every rank writes its own boxes.

Nothing is gathered. A box is named after the Hugging Face tensor of which it is a part (see `part_name`), so that every
layout can read exactly what it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatune.architecture import Architecture
from megatune.bridge.file_set import gather_dict
from megatune.bridge.file_stream import TensorFile, WrittenFile, flat_pieces, index_files
from megatune.bridge.parameters import LocalParameter, holders_of
from megatune.bridge.safetensors_files import TensorEntry, part_name
from megatune.engine import groups
from megatune.engine.groups import RankCoordinates
from megatune.engine.optimizer import MainShard
from megatune.families.table import Box, Row
from megatune.families.weights import TensorLayout

# Smaller parameters are not split between the ranks with copies of them: one rank writes all of it.
_SMALL = 2**16


@dataclass(frozen=True, slots=True)
class _Entry:
    """A box that this rank writes.

    Attributes:
        row: in the table.
        parts: elements start..stop of `values`, which are consecutive in the box.
        values: this rank's elements of the parameter, flattened.
    """

    kind: str
    row: Row
    parts: Sequence[tuple[int, int]]
    values: Tensor

    @property
    def tensor(self) -> TensorEntry:
        name, shape, box = self.row.name, self.row.shape, self.row.box
        in_file = f"{self.kind}/{part_name(name, shape, box)}"
        whole = box.numel == torch.Size(shape).numel()
        return TensorEntry(in_file, shape if whole else box.shape, torch.float32)


class ShardFiles:
    """Files of tensors in the layout of this rank's optimizer shards, as fp32; constructed by all ranks together.

    Args:
        stem: the common part of the files' names, with their folder.
        kinds: of the tensors, the prefixes of their names.
        tensors: for each parameter, the elements of its shard, for each of its kinds.
    """

    def __init__(
        self,
        stem: str,
        kinds: Sequence[str],
        parameters: Sequence[LocalParameter],
        shards: Mapping[Tensor, MainShard],
        tensors: Mapping[Tensor, Mapping[str, Tensor]],
        architecture: Architecture,
        coords: RankCoordinates,
    ) -> None:
        self._stem, self._coords = stem, coords
        trained = [local for local in parameters if local.parameter.requires_grad]

        def is_whole(local: LocalParameter) -> bool:
            shard = shards.get(local.parameter)
            return shard is not None and (shard.start, shard.stop) == (0, local.parameter.numel())

        # Only the distributed optimizer splits parameters; otherwise every replica holds all of them.
        is_split = not all(groups.all_gather_object(all(is_whole(local) for local in trained)))
        mine = [
            (local, shards[local.parameter], rank_range(local, shards[local.parameter], coords, is_split))
            for local in trained
            if local.parameter in shards and not local.is_copy
        ]
        self._entries = [
            _Entry(kind, row, parts, tensors[local.parameter][kind])
            for kind in kinds
            for local, shard, (start, stop) in mine
            if kind in tensors[local.parameter]
            for row, parts in _joined(local, architecture, start, stop, shard.start)
        ]

    @property
    def num_bytes(self) -> int:
        """The number of bytes of the tensors that this rank writes."""
        return sum(entry.tensor.num_bytes for entry in self._entries)

    def files(self) -> Iterator[WrittenFile]:
        """Yield this rank's file and, on rank 0, the index; collective over all ranks."""
        writers = [rank for rank, count in enumerate(groups.all_gather_object(len(self._entries))) if count] or [0]
        places: dict[str, tuple[str, int]] = {}
        if self._coords.rank in writers:
            number, total = writers.index(self._coords.rank) + 1, len(writers)
            name = f"{self._stem}-{number:05d}-of-{total:05d}" if total > 1 else self._stem
            entries = [entry.tensor for entry in self._entries]
            places = {entry.name: (f"{name}.safetensors", entry.num_bytes) for entry in entries}
            yield TensorFile(f"{name}.safetensors", entries, self._tensors())
        index = index_files(self._stem, gather_dict(places))
        yield from index if self._coords.rank == 0 else ()

    def _tensors(self) -> Iterator[Tensor]:
        for entry in self._entries:
            for start, stop in entry.parts:
                yield from flat_pieces(entry.values[start:stop], torch.float32)


def rank_range(local: LocalParameter, shard: MainShard, coords: RankCoordinates, is_split: bool) -> tuple[int, int]:
    """Return the elements of its shard that a rank writes; ranks with the same elements write a part each."""
    holders = holders_of(coords, experts=local.weight.per_expert)
    copies, copy = (1, 0) if is_split else (holders.replicas.size(), holders.replicas.rank())
    if local.weight.layout is TensorLayout.REPLICATED:
        copies, copy = copies * holders.slices.size(), copy * holders.slices.size() + holders.slices.rank()
    return copy_range(shard.start, shard.stop, copies, copy, local.layer)


def copy_range(start: int, stop: int, copies: int, copy: int, turn: int) -> tuple[int, int]:
    """Return the part of elements start..stop that one of several copies writes; few elements are written by one."""
    length = stop - start
    if length <= _SMALL:
        return (start, stop) if turn % copies == copy else (start, start)
    return start + length * copy // copies, start + length * (copy + 1) // copies


def _joined(
    local: LocalParameter, architecture: Architecture, start: int, stop: int, first: int
) -> Iterator[tuple[Row, list[tuple[int, int]]]]:
    """Yield the table's rows of elements start..stop, merged if they are adjacent in a Hugging Face tensor, each with
    its elements counted from `first`: queries, keys and values alternate."""
    open_rows: dict[str, tuple[Row, list[tuple[int, int]]]] = {}
    for row in local.rows(architecture, start, stop):
        part = (row.start - first, row.start - first + row.box.numel)
        if (before := open_rows.get(row.name)) is not None and (box := _below(before[0].box, row.box)) is not None:
            open_rows[row.name] = before[0]._replace(box=box), [*before[1], part]
            continue
        if before is not None:
            yield before
        open_rows[row.name] = row, [part]
    yield from open_rows.values()


def _below(box: Box, other: Box) -> Box | None:
    """Return the union of two boxes if the other one is directly below the first; otherwise None."""
    is_below = (box.last, box.left, box.right) == (other.first, other.left, other.right)
    return box._replace(last=other.last) if is_below else None


def optimizer_files(
    parameters: Sequence[LocalParameter],
    shards: Mapping[Tensor, MainShard],
    architecture: Architecture,
    coords: RankCoordinates,
    *,
    folder: str = "",
) -> ShardFiles:
    """Return files with master weights and moments, fp32, as `optimizer*.safetensors`.

    Tensors are named KIND/HUGGING_FACE_NAME, so that every layout can read them. Master weights are omitted if all
    trained weights are fp32, as they are the same.

    Args:
        folder: their folder, "training/" or nothing.
    """
    # With the distributed optimizer a rank may own no part of any parameter.
    kinds = sorted(gather_dict({kind: None for shard in shards.values() for kind in shard.state}))
    is_narrow = any(local.parameter.dtype != torch.float32 for local in parameters if local.parameter.requires_grad)
    # In addition to adapters, which are fp32, a stage may have a module that is trained whole.
    if any(groups.all_gather_object(is_narrow)):
        kinds = ["main", *kinds]
    tensors = {param: {"main": shard.main, **shard.state} for param, shard in shards.items()}
    return ShardFiles(f"{folder}optimizer", kinds, parameters, shards, tensors, architecture, coords)


def save_gradients(
    folder: Path,
    parameters: Sequence[LocalParameter],
    shards: Mapping[Tensor, MainShard],
    architecture: Architecture,
    coords: RankCoordinates,
) -> list[Path]:
    """Write the gradients of the last `forward_backward`, fp32, as `gradient*.safetensors`, named grad/NAME."""
    tensors = {param: {"grad": shard.grad} for param, shard in shards.items()}
    files = ShardFiles("gradient", ["grad"], parameters, shards, tensors, architecture, coords)
    return [file.write(folder) for file in files.files()]
