"""Pictures dealt over the ranks that hold the same tokens, or parts of the same rows: each is encoded once.

Without this every tensor- and context-parallel rank of the first pipeline stage would encode all pictures of its
micro-batch. `owners` say which of them encodes which; ranks are counted as in Megatron-Core's group of both, where
neighbours are tensor-parallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatune.engine import device


class Deal(NamedTuple):
    """Where features are after they were gathered, on the host.

    Attributes:
        longest: tokens of the rank that has most; ranks with fewer send padding behind them.
        order: int64 [n], of the tokens of all pictures in their order, among those of all ranks.
        own: int64 [m], of this rank's tokens among those of all pictures.
    """

    longest: int
    order: Tensor
    own: Tensor


def deal(counts: Tensor, owners: Tensor, rank: int, size: int) -> Deal:
    """Find out where features will be.

    Args:
        counts: int64 [pictures], tokens of each.
        owners: int64 [pictures].
        rank, size: of this rank among those that pictures are dealt to, and their number.
    """
    owner_of_token = owners.repeat_interleave(counts)
    by_owner = torch.bincount(owner_of_token, minlength=size)
    sorted_tokens = owner_of_token.argsort(stable=True)
    longest = int(by_owner.max())
    # In the order of owners tokens lie side by side; gathered, each owner's begin at a multiple of `longest`.
    gaps = torch.arange(size) * longest - (by_owner.cumsum(0) - by_owner)
    order = torch.empty_like(sorted_tokens)
    order[sorted_tokens] = torch.arange(len(order)) + gaps[owner_of_token[sorted_tokens]]
    return Deal(longest, order, (owner_of_token == rank).nonzero()[:, 0])


def gather_features(own: Tensor, dealt: Deal) -> Tensor:
    """Gather what every rank has encoded, [m, ...] of this one, to [n, ...] in the order of the tokens.

    Every rank must find the same loss of the tokens that it holds: tensor-parallel ranks the same gradient of all
    features, context-parallel ranks that of their own tokens.
    """
    gathered: Tensor = _Gather.apply(own, dealt.longest, device.send(dealt.order), device.send(dealt.own))
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, longest: int, order: Tensor, own_places: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(own_places)
        group = parallel_state.get_tensor_and_context_parallel_group()
        padded = own.new_zeros(longest, *own.shape[1:])
        padded[: len(own)] = own
        gathered = own.new_empty(group.size() * longest, *own.shape[1:])
        torch.distributed.all_gather_into_tensor(gathered, padded, group=group)
        return gathered.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        group = parallel_state.get_context_parallel_group()
        if group.size() > 1:
            # A sum of one number and zeros: a token is on one rank only.
            grad = grad.clone()
            torch.distributed.all_reduce(grad, group=group)
        return grad.index_select(0, ctx.saved_tensors[0]), None, None, None


def sum_dealt_gradients(model: Sequence[DistributedDataParallel]) -> None:
    """Sum the gradients of an encoder's parameters, marked so, over tensor-parallel ranks, after those of replicas were
    summed: each rank has found a part."""
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return
    for buffer in (buffer for chunk in model for buffer in chunk.buffers):
        places = sorted(
            (start, stop, getattr(parameter, "is_dealt", False))
            for parameter, (start, stop, _) in buffer.param_index_map.items()
        )
        # Parameters of one module lie side by side.
        for is_dealt, side_by_side in groupby(places, key=itemgetter(2)):
            if is_dealt:
                run = list(side_by_side)
                torch.distributed.all_reduce(buffer.grad_data[run[0][0] : run[-1][1]], group=group)
