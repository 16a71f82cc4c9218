"""Context parallelism that collects all keys and values first.

Legend: s tokens of a whole row, cp context-parallel ranks, b rows, n query heads and g key/value heads of this rank, d
channels of queries and keys, e channels of values.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor

from megatune.engine.layers.attention.kernels import attend
from megatune.engine.layers.attention.spans import prefixes


def attend_all_gather(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: tuple[int, ...],
    scale: float,
    backend: AttnBackend,
    group: torch.distributed.ProcessGroup,
) -> Tensor:
    """Gather keys and values; the backward pass adds their gradients up and scatters them.

    Args:
        query: [s / cp, b, n, d].
        key: [s / cp, b, g, d].
        value: [s / cp, b, g, e].
        boundaries: of the documents in the whole row.

    Returns:
        [s / cp, b, n, e].
    """
    b = query.shape[1]
    seen = prefixes(boundaries, group.rank(), group.size())
    both = torch.cat((key.flatten(1, 2), value.flatten(1, 2)), -1)
    whole = gather_from_sequence_parallel_region(both, group=group).index_select(0, seen.order)
    keys, values = whole.split((key.shape[-1], value.shape[-1]), -1)
    output = attend(query.flatten(1, 2), keys, values, seen.spans, scale, backend)
    return output.unflatten(1, (b, -1))
