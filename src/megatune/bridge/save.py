"""Writes the engine's tensors as Hugging Face safetensors, every rank a part of the files.

A file belongs to one pipeline stage. Its tensors are gathered one by one over the tensor-parallel ranks of one
data-parallel replica, to the one rank that writes the file, so that replicas write different files at the same time
and no rank ever holds more than one weight whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatune.architecture import Architecture
from megatune.bridge.parameters import LocalParameter
from megatune.bridge.safetensors_writer import SafetensorsWriter, TensorEntry
from megatune.engine.groups import Place, replica_group, tensor_parallel_group
from megatune.engine.optimizer import MainShard
from megatune.families.weights import Layout

# Hugging Face's own limit of a weight file.
MAX_FILE_BYTES = 5 * 10**9

# (parameter, kind) -> this rank's slice, whole over data-parallel ranks; asked on every rank of a group.
_Provider = Callable[[LocalParameter, str], Tensor]


@dataclass(frozen=True, slots=True)
class _File:
    """A file to be written: which weights it holds, and the data- and tensor-parallel rank that writes it."""

    name: str
    parameters: tuple[LocalParameter, ...]
    dp_rank: int
    tp_rank: int


def save_weights(
    folder: Path,
    parameters: Sequence[LocalParameter],
    architecture: Architecture,
    place: Place,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[Path]:
    """Write the model's weights, in their dtype, as `model*.safetensors`; collective over all ranks.

    Returns:
        The files that this rank wrote.
    """
    writing = _Writing(folder, "model", ("",), parameters, architecture, place, max_file_bytes)
    return writing.write(lambda local, kind: local.parameter.data, reduces_over_dp=False)


def save_optimizer(
    folder: Path,
    parameters: Sequence[LocalParameter],
    shards: Mapping[torch.nn.Parameter, MainShard],
    architecture: Architecture,
    place: Place,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[Path]:
    """Write master weights and running averages, fp32, as `optimizer*.safetensors`; collective over all ranks.

    Tensors are named KIND/HUGGING_FACE_NAME, so that any layout can read them. Master weights are left out where the
    model itself is fp32: they are the model.
    """
    kinds = _agreed({kind for shard in shards.values() for kind in shard.state})
    if any(local.parameter.dtype != torch.float32 for local in parameters):
        kinds = ["main", *kinds]
    tensors = {param: {"main": shard.main, **shard.state} for param, shard in shards.items()}
    return _save_shards(folder, "optimizer", kinds, parameters, shards, tensors, architecture, place, max_file_bytes)


def save_gradients(
    folder: Path,
    parameters: Sequence[LocalParameter],
    shards: Mapping[torch.nn.Parameter, MainShard],
    architecture: Architecture,
    place: Place,
) -> list[Path]:
    """Write the gradients that `forward_backward` left, fp32, as `gradient*.safetensors`, tensors named grad/NAME."""
    tensors = {param: {"grad": shard.grad} for param, shard in shards.items()}
    return _save_shards(folder, "gradient", ["grad"], parameters, shards, tensors, architecture, place, MAX_FILE_BYTES)


def _save_shards(
    folder: Path,
    stem: str,
    kinds: Sequence[str],
    parameters: Sequence[LocalParameter],
    shards: Mapping[torch.nn.Parameter, MainShard],
    tensors: Mapping[torch.nn.Parameter, Mapping[str, Tensor]],
    architecture: Architecture,
    place: Place,
    max_file_bytes: int,
) -> list[Path]:
    """Write tensors of which this rank holds elements start..stop, those of its shard, as fp32."""
    # Only the distributed optimizer splits a parameter; without it every data-parallel rank holds all of them.
    split = _agreed({local.weight.engine for local in parameters if not _is_whole(shards.get(local.parameter), local)})

    def provide(local: LocalParameter, kind: str) -> Tensor:
        shard = shards.get(local.parameter)
        if not split:
            assert shard is not None
            return tensors[local.parameter][kind[:-1]].view(local.parameter.shape)
        whole = torch.zeros(local.parameter.shape, dtype=torch.float32, device=local.parameter.device)
        if shard is not None:
            whole.view(-1)[shard.start : shard.stop] = tensors[local.parameter][kind[:-1]]
        return whole

    names = tuple(f"{kind}/" for kind in kinds)
    writing = _Writing(folder, stem, names, parameters, architecture, place, max_file_bytes)
    return writing.write(provide, reduces_over_dp=bool(split))


def _is_whole(shard: MainShard | None, local: LocalParameter) -> bool:
    return shard is not None and (shard.start, shard.stop) == (0, local.parameter.numel())


def _agreed(local: set[str]) -> list[str]:
    """The union over all ranks: under the distributed optimizer a rank may own no part of any parameter."""
    gathered: list[set[str]] = [set()] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, local)
    return sorted(set().union(*gathered))


class _Writing:
    """One set of files in the making."""

    def __init__(
        self,
        folder: Path,
        stem: str,
        kinds: tuple[str, ...],
        parameters: Sequence[LocalParameter],
        architecture: Architecture,
        place: Place,
        max_file_bytes: int,
    ) -> None:
        self.folder, self.stem, self.kinds = folder, stem, kinds
        self.architecture, self.place = architecture, place
        self.max_file_bytes = max_file_bytes
        self.parameters = [local for local in parameters if not local.is_copy]

    def write(self, provide: _Provider, *, reduces_over_dp: bool) -> list[Path]:
        files = self._plan()
        written = []
        for file in files:
            ours = file.dp_rank == self.place.replica_rank
            if not ours and not reduces_over_dp:
                continue
            if ours and file.tp_rank == self.place.tp_rank:
                path = self.folder / file.name
                with SafetensorsWriter(
                    path, [entry for local in file.parameters for entry in self._entries(local)]
                ) as out:
                    for name, tensor in self._tensors(file, provide, reduces_over_dp):
                        out.write(name, tensor)
                written.append(path)
            else:
                for _ in self._tensors(file, provide, reduces_over_dp):
                    raise AssertionError("only the writing rank holds whole tensors")
        index = self._write_index(files)
        return [*written, *index]

    def _plan(self) -> list[_File]:
        """The files of this stage: weights in order, a new file where one would grow too large."""
        groups: list[list[LocalParameter]] = []
        size = 0
        for local in self.parameters:
            num_bytes = sum(entry.num_bytes for entry in self._entries(local))
            if not groups or size + num_bytes > self.max_file_bytes:
                groups.append([])
                size = 0
            groups[-1].append(local)
            size += num_bytes
        first, total = self._number(len(groups))
        dp, tp = self.place.replica_size, self.place.tp_size
        return [
            _File(
                f"{self.stem}.safetensors"
                if total == 1
                else f"{self.stem}-{first + index + 1:05d}-of-{total:05d}.safetensors",
                tuple(group),
                dp_rank=index % dp,
                tp_rank=index // dp % tp,
            )
            for index, group in enumerate(groups)
        ]

    def _number(self, num_files: int) -> tuple[int, int]:
        """How many files the stages before this one write, and how many all stages write."""
        counts: list[tuple[int, int]] = [(0, 0)] * self.place.world_size
        torch.distributed.all_gather_object(counts, (self.place.pp_rank, num_files))
        by_stage = dict(counts)
        return sum(count for stage, count in by_stage.items() if stage < self.place.pp_rank), sum(by_stage.values())

    def _dtype(self, local: LocalParameter) -> torch.dtype:
        return local.parameter.dtype if self.stem == "model" else torch.float32

    def _entries(self, local: LocalParameter) -> list[TensorEntry]:
        dtype = self._dtype(local)
        return [
            TensorEntry(kind + name, shape, dtype)
            for kind in self.kinds
            for name, shape in local.hf_shapes(self.architecture).items()
        ]

    def _tensors(self, file: _File, provide: _Provider, reduces_over_dp: bool) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face tensors of the file, whole, on the rank that writes it; nothing on the ranks that help."""
        for local in file.parameters:
            for kind in self.kinds:
                mine = provide(local, kind)
                if reduces_over_dp:
                    _add_disjoint(mine, file.dp_rank)
                    if file.dp_rank != self.place.replica_rank:
                        continue
                slices = self._gather(local, mine, file.tp_rank)
                if slices is not None:
                    for name, tensor in self._assemble(local, slices).items():
                        yield kind + name, tensor

    def _gather(self, local: LocalParameter, mine: Tensor, writer: int) -> list[Tensor] | None:
        """The slices of all tensor-parallel ranks, on the writing one."""
        if local.weight.layout is Layout.REPLICATED or self.place.tp_size == 1:
            return [mine] if self.place.tp_rank == writer else None
        group = tensor_parallel_group()
        is_writer = self.place.tp_rank == writer
        slices = [torch.empty_like(mine) for _ in range(self.place.tp_size)] if is_writer else None
        torch.distributed.gather(mine.contiguous(), slices, group=group, group_dst=writer)
        return slices

    def _assemble(self, local: LocalParameter, slices: list[Tensor]) -> dict[str, Tensor]:
        """Put the ranks' slices where their segments say."""
        whole = {
            name: torch.empty(shape, dtype=self._dtype(local))
            for name, shape in local.hf_shapes(self.architecture).items()
        }
        for tp_rank, values in enumerate(slices):
            position = 0
            for segment in local.segments(self.architecture, len(slices), tp_rank):
                target = whole[segment.name].narrow(segment.dim, segment.start, segment.stop - segment.start)
                if segment.dim == 1:
                    target.copy_(values)
                else:
                    target.copy_(values[position : position + len(target)])
                    position += len(target)
        return whole

    def _write_index(self, files: list[_File]) -> list[Path]:
        """The index that says which file holds which tensor, by rank 0; none where one file holds all."""
        mine = {
            entry.name: (file.name, entry.num_bytes)
            for file in files
            for local in file.parameters
            for entry in self._entries(local)
        }
        gathered: list[dict[str, tuple[str, int]]] = [{}] * self.place.world_size
        torch.distributed.all_gather_object(
            gathered, mine if (self.place.tp_rank, self.place.replica_rank) == (0, 0) else {}
        )
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


def _add_disjoint(values: Tensor, dp_rank: int) -> None:
    """Put together parts that are zero where another rank's are not, on `dp_rank`; bit for bit, signs of zero too."""
    torch.distributed.reduce(values.view(torch.int32), group=replica_group(), group_dst=dp_rank)
