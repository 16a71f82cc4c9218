"""Which tokens of a micro-batch this rank holds, and which document each belongs to.

A row is one document, or, packed, several. Context parallelism cuts every document into 2 · cp equal parts and gives
rank r the parts r and 2 · cp - 1 - r: under the causal mask early tokens cost less than late ones, and so all ranks
compute the same.

Legend: b rows, s tokens of a whole row, cp context-parallel ranks; a rank holds s / cp tokens of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


class MicroBatch(Protocol):
    """Token rows of one micro-batch, as `data.batches.Batch` has them; `labels` are shifted: labels[:, t] is to be
    predicted at t."""

    @property
    def input_ids(self) -> Tensor: ...
    @property
    def labels(self) -> Tensor: ...
    @property
    def position_ids(self) -> Tensor: ...
    @property
    def lengths(self) -> tuple[int, ...]: ...
    @property
    def cu_seqlens(self) -> Tensor | None: ...


@dataclass(kw_only=True)
class Sequences(PackedSeqParams):
    """What every layer is told of the micro-batch, as Megatron-Core's `packed_seq_params`.

    Attributes:
        boundaries: where documents begin in a whole row, and s at the end. Without packing (0, s), for every row.
        position_ids: int64 [s / cp], of this rank's tokens in their documents; the same for all rows.
        is_padding: bool [b, s / cp].
        num_trained: int64 [], trained tokens of the whole micro-batch, over all context-parallel ranks.
        trained: int64 [n], where this rank's trained tokens are in its flattened rows. Found on the host: on a GPU,
            how many there are could only be known by waiting for it.
    """

    boundaries: tuple[int, ...]
    position_ids: Tensor
    is_padding: Tensor
    num_trained: Tensor
    trained: Tensor

    def __post_init__(self) -> None:
        # Rows stay [s, b, ...] inside Megatron-Core's layers; its own packed format would drop a dimension.
        self.qkv_format = "sbhd"

    @property
    def is_packed(self) -> bool:
        """Several documents in a row; then there is one row."""
        return len(self.boundaries) > 2


@dataclass(frozen=True, slots=True)
class Share:
    """This context-parallel rank's part of a micro-batch, on the device.

    Attributes:
        input_ids, labels: int64 [b, s / cp].
    """

    input_ids: Tensor
    labels: Tensor
    sequences: Sequences


def local_tokens(boundaries: Sequence[int], cp_rank: int, cp_size: int) -> Tensor:
    """Places in the whole row of the tokens that a context-parallel rank holds, in its order: int64 [s / cp]."""
    if cp_size == 1:
        return torch.arange(boundaries[-1])
    parts = []
    for start, stop in pairwise(boundaries):
        size, rest = divmod(stop - start, 2 * cp_size)
        assert not rest, f"a document of {stop - start} tokens is not cut into {2 * cp_size} equal parts"
        parts += [
            torch.arange(start + part * size, start + (part + 1) * size)
            for part in (cp_rank, 2 * cp_size - 1 - cp_rank)
        ]
    return torch.cat(parts)


def share(batch: MicroBatch) -> Share:
    """Take this rank's tokens of the micro-batch, which is whole on every rank, to the device."""
    device = torch.cuda.current_device()
    s = batch.input_ids.shape[1]
    boundaries = (0, s) if batch.cu_seqlens is None else tuple(batch.cu_seqlens.tolist())
    rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    mine = local_tokens(boundaries, rank, size)
    lengths = torch.tensor(batch.lengths)
    if batch.cu_seqlens is None:
        is_padding = batch.position_ids >= lengths[:, None]
    else:
        spans = torch.diff(batch.cu_seqlens.long())
        is_padding = batch.position_ids >= lengths.repeat_interleave(spans)

    def of_this_rank(rows: Tensor) -> Tensor:
        return rows if size == 1 else rows[..., mine]

    def to_device(rows: Tensor) -> Tensor:
        return of_this_rank(rows).to(device, non_blocking=True)

    sequences = Sequences(
        boundaries=boundaries,
        position_ids=to_device(batch.position_ids[0]),
        is_padding=to_device(is_padding),
        num_trained=(batch.labels >= 0).sum().to(device, non_blocking=True),
        trained=(of_this_rank(batch.labels).reshape(-1) >= 0).nonzero()[:, 0].to(device, non_blocking=True),
    )
    return Share(to_device(batch.input_ids), to_device(batch.labels), sequences)


def whole_rows(mine: Tensor, boundaries: Sequence[int]) -> Tensor:
    """Put the context-parallel ranks' tokens back into the order of the row; collective over them, no gradient.

    Args:
        mine: [b, s / cp, ...].

    Returns:
        [b, s, ...], on every rank.
    """
    group, size = parallel_state.get_context_parallel_group(), parallel_state.get_context_parallel_world_size()
    if size == 1:
        return mine
    parts = [torch.empty_like(mine) for _ in range(size)]
    torch.distributed.all_gather(parts, mine.contiguous(), group=group)
    whole = torch.cat(parts, 1)
    order = torch.cat([local_tokens(boundaries, rank, size) for rank in range(size)]).to(mine.device)
    return torch.empty_like(whole).index_copy_(1, order, whole)
