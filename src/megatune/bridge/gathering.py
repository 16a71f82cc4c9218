"""Whole Hugging Face tensors from the slices that ranks hold: what saving and exporting share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatune.architecture import Architecture
from megatune.bridge.parameters import Piece
from megatune.engine import groups
from megatune.engine.groups import RankCoordinates
from megatune.families.weights import TensorLayout


@dataclass(frozen=True, slots=True)
class Holders:
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


def holders_of(place: RankCoordinates, *, experts: bool) -> Holders:
    """Find the ranks that hold this rank's experts, or its other weights."""
    # Without expert parallelism those of experts are those of everything else.
    if experts and (place.ep_size, place.etp_size) != (1, place.tp_size):
        return Holders(
            (place.pp_rank, 1 + place.ep_rank),
            groups.expert_tensor_parallel_group(),
            place.etp_rank,
            place.etp_size,
            groups.expert_replica_group(),
            place.expert_replica_rank,
            place.expert_replica_size,
        )
    return Holders(
        (place.pp_rank, 0),
        groups.tensor_parallel_group(),
        place.tp_rank,
        place.tp_size,
        groups.replica_group(),
        place.replica_rank,
        place.replica_size,
    )


def gather_piece(
    piece: Piece, mine: Tensor, holders: Holders, slice_rank: int, architecture: Architecture, device: torch.device
) -> dict[str, Tensor] | None:
    """Gather the slices of a piece on one of the ranks that hold them.

    Args:
        mine: this rank's slice, flattened, [n].
        slice_rank: the rank that gets them.
        device: for the whole tensors.

    Returns:
        On that rank the Hugging Face tensors, whole, in memory of their own; None elsewhere.
    """
    slices = [mine]
    if piece.local.weight.layout is not TensorLayout.REPLICATED and holders.slice_size > 1:
        wanted = holders.slice_rank == slice_rank
        slices = [torch.empty_like(mine) for _ in range(holders.slice_size)] if wanted else []
        torch.distributed.gather(mine.contiguous(), slices or None, group=holders.slices, group_dst=slice_rank)
    if holders.slice_rank != slice_rank:
        return None
    shapes = piece.hf_shapes(architecture)
    whole = {name: torch.empty(shape, dtype=mine.dtype, device=device) for name, shape in shapes.items()}
    for rank, values in enumerate(slices):
        position = 0
        for segment in piece.segments(architecture, replace(piece.slice, tp_rank=rank)):
            target = whole[segment.name].narrow(segment.dim, segment.start, segment.stop - segment.start)
            target.copy_(values[position : position + target.numel()].view(target.shape))
            position += target.numel()
    return whole
