"""Whole Hugging Face tensors from the slices that ranks hold: what saving and exporting share."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatune.architecture import Architecture
from megatune.bridge.parameters import Piece
from megatune.engine import groups
from megatune.engine.groups import RankCoordinates
from megatune.families.weights import TensorLayout, segments


class Holders(NamedTuple):
    """The ranks that together hold some weights, as this rank sees them.

    Attributes:
        key: of these ranks among all such; files are numbered in this order.
        slices: the ranks that hold slices of the same weights.
        replicas: the ranks that hold copies of the same slices.
    """

    key: tuple[int, int]
    slices: ProcessGroup
    replicas: ProcessGroup


def holders_of(place: RankCoordinates, *, experts: bool) -> Holders:
    """Find the ranks that hold this rank's experts, or its other weights."""
    # Without expert parallelism those of experts are those of everything else.
    if experts and (place.ep_size, place.etp_size) != (1, place.tp_size):
        key = (place.pp_rank, 1 + place.ep_rank)
        return Holders(key, groups.expert_tensor_parallel_group(), groups.expert_replica_group())
    return Holders((place.pp_rank, 0), groups.tensor_parallel_group(), groups.replica_group())


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
    local, slices = piece.local, [mine]
    if local.weight.layout is not TensorLayout.REPLICATED and holders.slices.size() > 1:
        wanted = holders.slices.rank() == slice_rank
        slices = [torch.empty_like(mine) for _ in range(holders.slices.size())] if wanted else []
        torch.distributed.gather(mine.contiguous(), slices or None, group=holders.slices, group_dst=slice_rank)
    if holders.slices.rank() != slice_rank:
        return None
    shapes = piece.hf_shapes(architecture)
    whole = {name: torch.empty(shape, dtype=mine.dtype, device=device) for name, shape in shapes.items()}
    for rank, values in enumerate(slices):
        position = 0
        for segment in segments(local.weight, architecture, replace(piece.slice, tp_rank=rank), local.layer):
            target = whole[segment.name].narrow(segment.dim, segment.start, segment.stop - segment.start)
            target.copy_(values[position : position + target.numel()].view(target.shape))
            position += target.numel()
    return whole
