"""Dispatch tokens to the ranks of their experts, and combine the outputs.

Megatron-Core's dispatchers pass masks of tokens × experts around, ask the host for counts that the device needs, and
split by tensors that gloo refuses. These send choices, and ask the host once where ranks exchange different numbers of
rows, and otherwise not at all.

Legend: n tokens of this rank, k choices of each, E experts, L of them local, h hidden size, R rows of local experts;
ep and etp the expert-parallel and expert-tensor-parallel sizes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from megatune.engine.host_answers import on_host
from megatune.engine.layers.moe.permutation import count_by_expert, group_by_expert


@dataclass(frozen=True, slots=True)
class Dispatched:
    """The rows that this rank's experts compute.

    Attributes:
        tokens: [R, h], grouped by local expert.
        tokens_per_expert: int64 [L], on the device.
        probs: fp32 [R].
        combine: takes the experts' output [R, h], with expert tensor parallelism a part of a sum, back to the ranks
            of the tokens: the sum over each token's choices, [n, h].
    """

    tokens: Tensor
    tokens_per_expert: Tensor
    probs: Tensor
    combine: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Dispatcher(ABC):
    """A way of tokens to the ranks of their experts.

    Attributes:
        capacity: the most rows that an expert gets from a rank with this number of tokens; None where nothing is
            dropped.
        pads: every expert gets as many from every rank, some of them zeros.
    """

    num_experts: int
    capacity: Callable[[int], int] | None
    pads: bool
    groups: ProcessGroupCollection

    @abstractmethod
    def __call__(self, tokens: Tensor, probs: Tensor, experts: Tensor) -> Dispatched:
        """Dispatch [n, h] by probs, fp32 [n, k], and chosen experts, int64 [n, k] with E for dropped choices."""


class AllGatherDispatcher(Dispatcher):
    """All ranks of expert parallelism get all tokens, and compute those that chose their experts."""

    def __call__(self, tokens: Tensor, probs: Tensor, experts: Tensor) -> Dispatched:
        group, ep_size = self.groups.tp_ep, self.groups.ep.size()
        sizes = _gather_sizes(tokens.shape[0], group)
        gathered, probs, experts = (gather(each, group, sizes) for each in (tokens, probs, experts))
        num_local = self.num_experts // ep_size
        mine = experts - self.groups.ep.rank() * num_local
        mine = torch.where((mine >= 0) & (mine < num_local), mine, num_local)
        counts = count_by_expert(mine, num_local)
        if self.capacity and self.pads:
            capacity = sum(map(self.capacity, sizes))
            counts = torch.full_like(counts, capacity)
            permutation = group_by_expert(mine, num_local, capacity=capacity)
        else:
            is_complete = ep_size == 1 and not self.capacity
            permutation = group_by_expert(mine, num_local, num_rows=None if is_complete else on_host(counts.sum()))

        def combine(output: Tensor) -> Tensor:
            return reduce_scatter(permutation.unpermute(output), group, sizes)

        return Dispatched(permutation.permute(gathered), counts, permutation.permute_choices(probs), combine)


class AllToAllDispatcher(Dispatcher):
    """Each token is sent to the ranks of the experts it chose, once for each of them."""

    def __call__(self, tokens: Tensor, probs: Tensor, experts: Tensor) -> Dispatched:
        counts = count_by_expert(experts, self.num_experts)
        num_rows = capacity = None
        if self.capacity and self.pads:
            capacity = self.capacity(tokens.shape[0])
            counts = torch.full_like(counts, capacity)
        elif self.capacity:
            num_rows = on_host(counts.sum())
        permutation = group_by_expert(experts, self.num_experts, num_rows=num_rows, capacity=capacity)
        rows, probs = permutation.permute(tokens), permutation.permute_choices(probs)
        if self.groups.tp_ep.size() == 1:
            return Dispatched(rows, counts, probs, permutation.unpermute)
        exchange = _Exchange(counts, self.groups)
        rows, probs = exchange.send(rows), exchange.send(probs)
        # Rows arrive rank by rank; experts take them expert by expert.
        local = exchange.counts.shape[1]
        of_rows = torch.arange(local, device=counts.device).repeat(exchange.counts.shape[0])
        of_rows = of_rows.repeat_interleave(exchange.counts.reshape(-1), output_size=rows.shape[0])
        by_expert = group_by_expert(of_rows[:, None], local)

        def combine(output: Tensor) -> Tensor:
            return permutation.unpermute(exchange.send_back(by_expert.unpermute(output)))

        probs = by_expert.permute_choices(probs[:, None])
        return Dispatched(by_expert.permute(rows), exchange.counts.sum(0), probs, combine)


class _Exchange:
    """Rows sent to the ranks of their experts, over expert parallelism; then, as these ranks hold slices of their
    experts only, shared over expert tensor parallelism. Planning it is collective.

    Attributes:
        counts: int64 [etp · ep, L], rows of each local expert that come from each rank.
        sent, received: rows that go to, and come from, each expert-parallel rank.
        shared: rows that each expert-tensor-parallel rank received.
    """

    def __init__(self, counts: Tensor, groups: ProcessGroupCollection) -> None:
        """Plan it from int64 [E], the rows that this rank has for each expert."""
        self.groups, ep, etp = groups, groups.ep, groups.expt_tp
        gathered = gather_from_sequence_parallel_region(counts, group=groups.tp_ep)
        # [sending ep, sending etp, receiving ep, L]
        table = gathered.view(ep.size(), etp.size(), ep.size(), -1)
        by_rank = on_host(table.sum(-1))  # the one wait for the device: collectives must know their sizes
        received = [[by_rank[sender][slot][ep.rank()] for sender in range(ep.size())] for slot in range(etp.size())]
        self.counts = table[:, :, ep.rank()].transpose(0, 1).reshape(etp.size() * ep.size(), -1)
        self.sent, self.received = by_rank[ep.rank()][etp.rank()], received[etp.rank()]
        self.shared = [sum(rows) for rows in received]

    def send(self, rows: Tensor) -> Tensor:
        """Send [rows of this rank's tokens, ...]; return [R, ...], in the order of `counts`."""
        return gather(all_to_all(self.groups.ep, rows, self.received, self.sent), self.groups.expt_tp, self.shared)

    def send_back(self, output: Tensor) -> Tensor:
        """Return the opposite of `send`, summing the parts of expert-tensor-parallel ranks."""
        mine = reduce_scatter(output, self.groups.expt_tp, self.shared)
        return all_to_all(self.groups.ep, mine, self.sent, self.received)


def gather(mine: Tensor, group: ProcessGroup, sizes: list[int]) -> Tensor:
    """Return the ranks' rows, one rank's after the other's; gradients are summed over the ranks.

    Args:
        sizes: rows of each rank.
    """
    if len(set(sizes)) == 1:
        return gather_from_sequence_parallel_region(mine, group=group)
    # gloo gathers equal parts only, and NCCL sends unequal ones one by one.
    return all_to_all(group, mine.repeat(len(sizes), *[1] * (mine.dim() - 1)), sizes, [mine.shape[0]] * len(sizes))


def reduce_scatter(whole: Tensor, group: ProcessGroup, sizes: list[int]) -> Tensor:
    """Return the sum over the ranks of this rank's rows; the opposite of `gather`."""
    if len(set(sizes)) == 1:
        return reduce_scatter_to_sequence_parallel_region(whole, group=group)
    mine = sizes[group.rank()]
    parts = all_to_all(group, whole, [mine] * len(sizes), sizes)
    return parts.view(len(sizes), mine, *whole.shape[1:]).sum(0)


def _gather_sizes(size: int, group: ProcessGroup) -> list[int]:
    """Return every rank's number of tokens; micro-batches of data-parallel ranks differ in length."""
    if group.size() == 1:
        return [size]
    sizes = torch.tensor([size], device=torch.cuda.current_device())
    found: list[int] = on_host(gather_from_sequence_parallel_region(sizes, group=group))
    return found
