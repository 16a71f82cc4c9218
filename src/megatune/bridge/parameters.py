"""The weights on this rank, whole Hugging Face tensors from the slices of all ranks, and the norm of all weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatune.architecture import Architecture
from megatune.engine import device, groups
from megatune.engine.groups import RankCoordinates
from megatune.engine.layers.quantized import QuantizedMatrix
from megatune.engine.weights import named_weights, rank_slice
from megatune.families.table import Row, rows_of
from megatune.families.weights import Slice, TensorLayout, Weight, by_expert, engine_shape, hf_shapes


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """One parameter of this rank, or a quantized matrix or buffer that is loaded and saved like one.

    Attributes:
        weight: its entry in the family's weight map.
        layer: its layer index in the whole model; 0 for weights outside layers.
        slice: which part of the weight this rank holds.
        parameter: that part; `data` of a quantized matrix is dequantized on access.
        is_copy: another pipeline stage holds the same weight and writes it (tied embeddings).
    """

    weight: Weight
    layer: int
    slice: Slice
    parameter: Tensor
    is_copy: bool

    @property
    def kept(self) -> Tensor:
        """The tensor in memory: the parameter, or the codes of a quantized matrix."""
        return self.parameter.codes if isinstance(self.parameter, QuantizedMatrix) else self.parameter

    def rows(self, architecture: Architecture, start: int = 0, stop: int | None = None) -> Iterator[Row]:
        """Yield the rows of the table for elements start..stop of this rank's slice; for all if `stop` is None."""
        return rows_of(self.weight, architecture, self.slice, self.layer, start, stop)

    def hf_shapes(self, architecture: Architecture) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the Hugging Face tensors that it is a part of, by name; only of this rank's experts."""
        return hf_shapes(self.weight, architecture, self.layer, self.slice)

    def pieces(self, architecture: Architecture, run: int = 1) -> list[Piece]:
        """Split the parameter into runs of `run` experts, in order; a parameter without experts is one piece."""
        parts = by_expert(self.weight, architecture, self.slice, run)
        size = self.parameter.numel() // len(parts)
        return [Piece(self, part, index * size, (index + 1) * size) for index, part in enumerate(parts)]

    def all_experts(self, architecture: Architecture) -> list[Piece]:
        """List the pieces of all experts, in order; those of other ranks' experts are empty."""
        parts = by_expert(self.weight, architecture, replace(self.slice, ep_size=1, ep_rank=0))
        mine = {piece.slice: piece for piece in self.pieces(architecture)}
        return [mine.get(part) or Piece(self, part, 0, 0) for part in parts]


@dataclass(frozen=True, slots=True)
class Piece:
    """The unit of gathering and writing: a weight, or a single expert's part of it.

    Attributes:
        slice: which part of the weight it is.
        start, stop: its elements of `local.parameter`, flattened.
    """

    local: LocalParameter
    slice: Slice
    start: int
    stop: int

    @property
    def values(self) -> Tensor:
        """This rank's elements of it, flattened."""
        return self.local.parameter.data.view(-1)[self.start : self.stop]


def local_parameters(
    model: Sequence[torch.nn.Module], architecture: Architecture, coords: RankCoordinates
) -> list[LocalParameter]:
    """List every parameter of this rank's chunks, every quantized matrix and every buffer in the weight map, in this
    order, each in the order of the model.

    The shapes that the family declares are compared with those that Megatron-Core built.
    """
    found: list[LocalParameter] = []
    for chunk in model:
        for weight, layer, tensor, is_copy in named_weights(chunk, architecture):
            part, built = rank_slice(weight, coords), tuple(tensor.shape)
            declared = engine_shape(weight, architecture, part)
            assert built == declared, f"{weight.engine}: built {built}, declared {declared}"
            found.append(LocalParameter(weight, layer, part, tensor, is_copy))
    return found


class Holders(NamedTuple):
    """The ranks that together hold some weights, from this rank's view.

    Attributes:
        key: identifies these ranks; files are numbered in the order of the keys.
        slices: the ranks that hold slices of the same weights.
        replicas: the ranks that hold copies of the same slices.
    """

    key: tuple[int, int]
    slices: ProcessGroup
    replicas: ProcessGroup


def holders_of(coords: RankCoordinates, *, experts: bool, fused: bool = False) -> Holders:
    """Return the ranks that hold this rank's experts, or its other weights.

    Args:
        fused: return the ranks that hold the experts of all expert-parallel ranks.
    """
    # Without expert parallelism, experts are held by the same ranks as all other weights.
    if not experts or (coords.ep_size, coords.etp_size) == (1, coords.tp_size):
        return Holders((coords.pp_rank, 0), groups.tensor_parallel_group(), groups.replica_group())
    if fused:
        return Holders((coords.pp_rank, 1), groups.expert_slices_group(), groups.expert_replica_group())
    key = (coords.pp_rank, 1 + coords.ep_rank)
    return Holders(key, groups.expert_tensor_parallel_group(), groups.expert_replica_group())


def gather_piece(
    piece: Piece, holders: Holders, slice_rank: int, architecture: Architecture, device: torch.device
) -> dict[str, Tensor] | None:
    """Gather the slices of a piece on one of the ranks that hold them.

    Args:
        slice_rank: the rank that receives them.
        device: for the whole tensors.

    Returns:
        On that rank the whole Hugging Face tensors, in new memory; None on the other ranks.
    """
    mine = piece.values
    slices = [mine]
    if piece.local.weight.layout is not TensorLayout.REPLICATED and holders.slices.size() > 1:
        wanted = holders.slices.rank() == slice_rank
        slices = [torch.empty_like(mine) for _ in range(holders.slices.size())] if wanted else []
        torch.distributed.gather(mine.contiguous(), slices or None, group=holders.slices, group_dst=slice_rank)
    if holders.slices.rank() != slice_rank:
        return None
    return _whole_tensors(piece, slices, architecture, device)


def send_expert(
    piece: Piece, holders: Holders, coords: RankCoordinates, writer: int, architecture: Architecture
) -> dict[str, Tensor] | None:
    """Send an expert's slices to one of the ranks that hold any experts of its layer.

    Args:
        piece: of one expert, whether or not this rank holds it.
        holders: of all experts, see `holders_of`.
        writer: the rank of `holders.slices` that receives them.

    Returns:
        On that rank the expert's whole Hugging Face tensors, on the CPU; None on the other ranks.
    """
    moe, local = architecture.moe, piece.local
    assert moe is not None
    owner = piece.slice.ep_rank * coords.ep_size // moe.num_experts
    # Ranks of expert tensor parallelism are next to each other in the group.
    sources = range(owner * coords.etp_size, (owner + 1) * coords.etp_size)
    rank, mine = holders.slices.rank(), piece.values
    if rank != writer:
        if rank in sources:
            torch.distributed.send(mine.contiguous(), group=holders.slices, group_dst=writer)
        return None
    slices = []
    for source in sources:
        if source == rank:
            slices.append(mine)
            continue
        slices.append(mine.new_empty(math.prod(engine_shape(local.weight, architecture, piece.slice))))
        torch.distributed.recv(slices[-1], group=holders.slices, group_src=source)
    return _whole_tensors(piece, slices, architecture, torch.device("cpu"))


def _whole_tensors(
    piece: Piece, slices: Sequence[Tensor], architecture: Architecture, device: torch.device
) -> dict[str, Tensor]:
    """Assemble slices, in order of their ranks, to Hugging Face tensors."""
    local, dtype = piece.local, slices[0].dtype
    shapes = hf_shapes(local.weight, architecture, local.layer, piece.slice)
    whole = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
    for rank, values in enumerate(slices):
        for row in rows_of(local.weight, architecture, replace(piece.slice, tp_rank=rank), local.layer):
            target = whole[row.name].view(row.shape[0], -1)[row.box.slices]
            target.copy_(values[row.elements].view(target.shape))
    return whole


@torch.no_grad()
def parameters_norm(parameters: Sequence[LocalParameter], architecture: Architecture, coords: RankCoordinates) -> float:
    """Compute the L2 norm of all weights, counting each element once; collective over all ranks.

    A weight on several ranks is counted by one of them; padding is not counted. Squares are summed in fp32 within a
    weight and in fp64 over weights and ranks.
    """
    total = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
    for local in parameters:
        if _is_counted_here(local, coords):
            values = local.parameter.data.reshape(-1)
            for row in local.rows(architecture):  # without padding
                total += device.norm([values[row.elements]]).double().square()
    groups.all_reduce(total)
    return float(total.sqrt())


def _is_counted_here(local: LocalParameter, coords: RankCoordinates) -> bool:
    """Return whether this rank is the first one that holds the slice."""
    holders = holders_of(coords, experts=local.weight.per_expert)
    is_whole = local.weight.layout is TensorLayout.REPLICATED
    return not local.is_copy and holders.replicas.rank() == 0 and (not is_whole or holders.slices.rank() == 0)
