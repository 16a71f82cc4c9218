"""Context parallelism that trades sequence for heads (DeepSpeed-Ulysses, arXiv:2309.14509).

Legend: s tokens of a whole row, cp context-parallel ranks, b rows, n query heads and g key/value heads of this rank, d
channels of queries and keys, e channels of values.
"""

from __future__ import annotations

import math

import torch
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor

from megatune.engine.layers.attention.rows import attend_rows
from megatune.engine.layers.attention.spans import gathered


def attend_all_to_all(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: tuple[int, ...],
    scale: float,
    backend: AttnBackend,
    group: torch.distributed.ProcessGroup,
) -> Tensor:
    """Exchange twice: whole rows of n / cp heads attend, in between.

    Args:
        query: [s / cp, b, n, d], n a multiple of cp.
        key: [s / cp, b, g, d].
        value: [s / cp, b, g, e].
        boundaries: of the documents in the whole row.

    Returns:
        [s / cp, b, n, e].
    """
    cp_size = group.size()
    order = gathered(boundaries, cp_size)
    # Where ranks cannot share the key/value heads equally they get copies, of which autograd adds up the gradients.
    copies = math.lcm(key.shape[2], cp_size) // key.shape[2]
    if copies > 1:
        key, value = key.repeat_interleave(copies, 2), value.repeat_interleave(copies, 2)
    # One message: for each rank its heads of all three, [cp, s / cp, b, channels].
    shares = [tensor.unflatten(2, (cp_size, -1)).movedim(2, 0) for tensor in (query, key, value)]
    sent = torch.cat([share.flatten(3) for share in shares], -1)
    rows = all_to_all(group, sent).flatten(0, 1).index_select(0, order.to_row)
    parts = rows.split([share[0, 0, 0].numel() for share in shares], -1)
    heads = [part.unflatten(2, share.shape[3:]) for part, share in zip(parts, shares, strict=True)]
    output = attend_rows(heads[0], heads[1], heads[2], boundaries, scale, backend)
    back = output.index_select(0, order.from_row).unflatten(0, (cp_size, -1))
    return all_to_all(group, back).movedim(0, 2).flatten(2, 3)
