"""The norm of a model's weights, as of its Hugging Face checkpoint, in any layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatune.architecture import Architecture
from megatune.bridge.parameters import LocalParameter, holders_of
from megatune.engine import groups
from megatune.engine.groups import RankCoordinates
from megatune.families.table import rows_of
from megatune.families.weights import TensorLayout


@torch.no_grad()
def parameters_norm(parameters: Sequence[LocalParameter], architecture: Architecture, place: RankCoordinates) -> float:
    """Compute the L2 norm of all weights, each element counted once; collective over all ranks.

    Weights that several ranks hold are counted by one of them, and padding by none. Squares are summed in fp32 within a
    weight and in fp64 over weights and ranks.
    """
    total = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
    for local in parameters:
        if _is_counted_here(local, place):
            values = local.parameter.data.reshape(-1)
            for row in rows_of(local.weight, architecture, local.slice, local.layer):  # without padding
                part = values[row.start : row.start + row.box.numel]
                total += torch.linalg.vector_norm(part, dtype=torch.float32).double().square()
    groups.add_up(total)
    return float(total.sqrt())


def _is_counted_here(local: LocalParameter, place: RankCoordinates) -> bool:
    """Return whether this rank is the first of those that hold the same slice."""
    holders = holders_of(place, experts=local.weight.per_expert)
    is_whole = local.weight.layout is TensorLayout.REPLICATED
    return not local.is_copy and holders.replicas.rank() == 0 and (not is_whole or holders.slices.rank() == 0)
