"""Saves the engine's tensors as Hugging Face safetensors: weights, the optimizer's state, gradients.

A file belongs to the ranks that together hold its weights: those of a pipeline stage, for experts those of a stage that
hold the same experts. Its tensors are gathered one by one over the tensor-parallel ranks of one replica, to the one
rank that writes the file, so that ranks write different files at the same time and none ever holds more than one weight
(of experts: one expert's) whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from megatune.architecture import Architecture
from megatune.bridge.adapter_files import ADAPTER, AS_IN_PEFT
from megatune.bridge.adapter_writer import is_rewritten, join_adapter
from megatune.bridge.parameters import Holders, LocalParameter, Piece, gather_piece, holders_of, send_expert
from megatune.bridge.safetensors_files import TensorEntry, safetensors_writer
from megatune.engine import groups
from megatune.engine.groups import RankCoordinates
from megatune.engine.optimizer import MainShard
from megatune.families.forms import AS_MAPPED, CheckpointForm
from megatune.families.selection import Selection
from megatune.families.weights import hf_shapes

# Hugging Face's own limit of a weight file.
MAX_FILE_BYTES = 5 * 10**9

K = TypeVar("K")
V = TypeVar("V")


def save_weights(
    folder: Path,
    parameters: Sequence[LocalParameter],
    architecture: Architecture,
    place: RankCoordinates,
    *,
    form: CheckpointForm = AS_MAPPED,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[Path]:
    """Write the model's weights, in their dtype, as `model*.safetensors`; collective over all ranks.

    Args:
        form: names and arrangement of the tensors in the files.

    Returns:
        The files that this rank wrote.
    """

    def provide(piece: Piece, kind: str) -> Tensor:
        return piece.local.parameter.data.view(-1)[piece.start : piece.stop]

    files = _FileSet(folder, "model", ("",), None, provide, False, architecture, place, max_file_bytes, form)
    return files.write(parameters)


def save_adapters(
    folder: Path,
    parameters: Sequence[LocalParameter],
    architecture: Architecture,
    place: RankCoordinates,
    selection: Selection,
) -> list[Path]:
    """Write what is trained beside a base, adapters and whole modules, each in its dtype, as peft's
    `adapter_model.safetensors`; collective over all ranks.

    Ranks write files of their own, which the first one puts together: peft reads a single file, and some experts'
    tensors stacked.

    Args:
        selection: what is trained.

    Returns:
        The files that this rank wrote.
    """

    def provide(piece: Piece, kind: str) -> Tensor:
        return piece.local.parameter.data.view(-1)[piece.start : piece.stop]

    trained = [local for local in parameters if local.parameter.requires_grad]
    layout = False, architecture, place, MAX_FILE_BYTES, AS_IN_PEFT
    written = _FileSet(folder, ADAPTER, ("",), None, provide, *layout).write(trained)
    is_one = groups.total(len(written)) == 1
    if is_one and not is_rewritten(architecture, selection):
        return written
    return [join_adapter(folder, architecture, selection)] if place.rank == 0 else []


def save_optimizer(
    folder: Path,
    parameters: Sequence[LocalParameter],
    shards: Mapping[Tensor, MainShard],
    architecture: Architecture,
    place: RankCoordinates,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[Path]:
    """Write master weights and running averages, fp32, as `optimizer*.safetensors`; collective over all ranks.

    Tensors are named KIND/HUGGING_FACE_NAME, so that any layout can read them. Master weights are left out where all
    that is trained is fp32: they are the weights.
    """
    # Under the distributed optimizer a rank may own no part of any parameter.
    kinds = sorted(_united({kind: None for shard in shards.values() for kind in shard.state}))
    is_narrow = any(local.parameter.dtype != torch.float32 for local in parameters if local.parameter.requires_grad)
    # Beside adapters, which are fp32, a stage may have a module that is trained whole.
    if any(groups.gather(is_narrow)):
        kinds = ["main", *kinds]
    tensors = {param: {"main": shard.main, **shard.state} for param, shard in shards.items()}
    return _save_shards(folder, "optimizer", kinds, parameters, shards, tensors, architecture, place, max_file_bytes)


def save_gradients(
    folder: Path,
    parameters: Sequence[LocalParameter],
    shards: Mapping[Tensor, MainShard],
    architecture: Architecture,
    place: RankCoordinates,
) -> list[Path]:
    """Write the gradients that `forward_backward` left, fp32, as `gradient*.safetensors`, tensors named grad/NAME."""
    tensors = {param: {"grad": shard.grad} for param, shard in shards.items()}
    return _save_shards(folder, "gradient", ["grad"], parameters, shards, tensors, architecture, place, MAX_FILE_BYTES)


def _save_shards(
    folder: Path,
    stem: str,
    kinds: Sequence[str],
    parameters: Sequence[LocalParameter],
    shards: Mapping[Tensor, MainShard],
    tensors: Mapping[Tensor, Mapping[str, Tensor]],
    architecture: Architecture,
    place: RankCoordinates,
    max_file_bytes: int,
) -> list[Path]:
    """Write tensors of which this rank holds elements start..stop, those of its shard, as fp32."""
    trained = [local for local in parameters if local.parameter.requires_grad]

    def is_whole(local: LocalParameter) -> bool:
        shard = shards.get(local.parameter)
        return shard is not None and (shard.start, shard.stop) == (0, local.parameter.numel())

    # Only the distributed optimizer splits a parameter; without it every replica holds all of them.
    is_split = not all(groups.gather(all(is_whole(local) for local in trained)))

    def provide(piece: Piece, kind: str) -> Tensor:
        param, shard = piece.local.parameter, shards.get(piece.local.parameter)
        if not is_split:
            # Averages may lie in the host's memory, or be narrower.
            return tensors[param][kind[:-1]][piece.start : piece.stop].to(param.device, torch.float32)
        whole = torch.zeros(piece.stop - piece.start, dtype=torch.float32, device=param.device)
        if shard is not None:
            first, last = max(shard.start, piece.start), min(shard.stop, piece.stop)
            if first < last:
                mine = tensors[param][kind[:-1]]
                whole[first - piece.start : last - piece.start] = mine[first - shard.start : last - shard.start]
        return whole

    names = tuple(f"{kind}/" for kind in kinds)
    files = _FileSet(folder, stem, names, torch.float32, provide, is_split, architecture, place, max_file_bytes)
    return files.write(trained)


def _united(mine: dict[K, V]) -> dict[K, V]:
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


@dataclass(frozen=True, slots=True)
class _FileSet:
    """One set of files, such as those of a model.

    Attributes:
        stem: of the files' names.
        kinds: prefixes of tensors' names; each weight is written once for each.
        dtype: of all tensors; None for those of the parameters.
        provide: (piece, kind) -> this rank's elements of it, [n]; zero for other replicas' elements where `is_split`.
        is_split: whether every replica provides a part of each piece; otherwise each provides all of it.
    """

    folder: Path
    stem: str
    kinds: tuple[str, ...]
    dtype: torch.dtype | None
    provide: Callable[[Piece, str], Tensor]
    is_split: bool
    architecture: Architecture
    place: RankCoordinates
    max_file_bytes: int
    form: CheckpointForm = AS_MAPPED

    def write(self, parameters: Sequence[LocalParameter]) -> list[Path]:
        """Write all files; collective over all ranks.

        A rank takes part in the files of two sets of holders, first in all of the one, then in all of the other, in the
        same order as the other holders do: none waits for one that waits for it.

        Returns:
            The files that this rank wrote.
        """
        files = self._plan([local for local in parameters if not local.is_copy])
        written = []
        for file in files:
            if file.replica_rank != file.holders.replicas.rank() and not self.is_split:
                continue
            if (file.replica_rank, file.slice_rank) == (file.holders.replicas.rank(), file.holders.slices.rank()):
                path = self.folder / file.name
                entries = [entry for piece in file.pieces for entry in self._entries(piece)]
                with safetensors_writer(path, entries) as write:
                    for name, tensor in self._tensors(file):
                        write(name, tensor)
                written.append(path)
            else:
                for _ in self._tensors(file):
                    raise AssertionError("only the writing rank holds whole tensors")
        return [*written, *self._write_index(files)]

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
        counts = _united({holders.key: len(contents) for holders, contents in by_holders.items()})
        total = sum(counts.values())
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

    def _write_index(self, files: list[_File]) -> list[Path]:
        """Write, on rank 0, the index that says which file holds which tensor; none where one file holds all."""
        mine = {
            entry.name: (file.name, entry.num_bytes)
            for file in files
            if (file.holders.slices.rank(), file.holders.replicas.rank()) == (0, 0)
            for piece in file.pieces
            for entry in self._entries(piece)
        }
        merged = _united(mine)
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
