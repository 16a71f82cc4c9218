"""Dispatch tokens to the ranks of their experts, grouped by expert, and combine the outputs.

Megatron-Core's dispatchers pass masks of tokens × experts, synchronize with the host for counts that only the device
needs, and split by tensors, which gloo does not support. These pass choices, and synchronize with the host once if
ranks exchange different numbers of rows, otherwise never; recomputation reuses the numbers (`caching_host_values`).

Legend: n tokens of this rank, k choices of each, E experts, L of them local, h hidden size, R rows of local experts;
ep and etp the expert-parallel and expert-tensor-parallel sizes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from megatune.engine import device


@dataclass(frozen=True, slots=True)
class Dispatched:
    """The rows that this rank's experts process.

    Attributes:
        tokens: [R, h], grouped by local expert.
        tokens_per_expert: int64 [L], on the device.
        probs: fp32 [R].
        combine: sends the experts' output [R, h], with expert tensor parallelism a partial sum, back to the ranks of
            the tokens, and sums each token's choices: [n, h].
    """

    tokens: Tensor
    tokens_per_expert: Tensor
    probs: Tensor
    combine: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Dispatcher(ABC):
    """A method to send tokens to the ranks of their experts.

    Attributes:
        capacity: returns the most rows that an expert gets from a rank with this number of tokens; None if nothing is
            dropped.
        pads: pad the rows of every expert from every rank to its capacity with zeros.
    """

    num_experts: int
    capacity: Callable[[int], int] | None
    pads: bool
    groups: ProcessGroupCollection

    @abstractmethod
    def __call__(self, tokens: Tensor, probs: Tensor, experts: Tensor) -> Dispatched:
        """Dispatch [n, h] by probs, fp32 [n, k], and chosen experts, int64 [n, k] with E for dropped choices."""


class AllGatherDispatcher(Dispatcher):
    """All expert-parallel ranks get all tokens, and process those that chose their experts."""

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
            permutation = group_by_expert(mine, num_local, num_rows=None if is_complete else host_values(counts.sum()))

        def combine(output: Tensor) -> Tensor:
            return reduce_scatter(permutation.unpermute(output), group, sizes)

        return Dispatched(permutation.permute(gathered), counts, permutation.permute_choices(probs), combine)


class AllToAllDispatcher(Dispatcher):
    """Each token is sent to the ranks of the experts it chose, once for each choice."""

    def __call__(self, tokens: Tensor, probs: Tensor, experts: Tensor) -> Dispatched:
        counts = count_by_expert(experts, self.num_experts)
        num_rows = capacity = None
        if self.capacity and self.pads:
            capacity = self.capacity(tokens.shape[0])
            counts = torch.full_like(counts, capacity)
        elif self.capacity:
            num_rows = host_values(counts.sum())
        permutation = group_by_expert(experts, self.num_experts, num_rows=num_rows, capacity=capacity)
        rows, probs = permutation.permute(tokens), permutation.permute_choices(probs)
        if self.groups.tp_ep.size() == 1:
            return Dispatched(rows, counts, probs, permutation.unpermute)
        exchange = _Exchange(counts, self.groups)
        rows, probs = exchange.send(rows), exchange.send(probs)
        # Rows arrive sorted by rank, and are regrouped by expert.
        local = exchange.counts.shape[1]
        of_rows = torch.arange(local, device=counts.device).repeat(exchange.counts.shape[0])
        of_rows = of_rows.repeat_interleave(exchange.counts.reshape(-1), output_size=rows.shape[0])
        by_expert = group_by_expert(of_rows[:, None], local)

        def combine(output: Tensor) -> Tensor:
            return permutation.unpermute(exchange.send_back(by_expert.unpermute(output)))

        probs = by_expert.permute_choices(probs[:, None])
        return Dispatched(by_expert.permute(rows), exchange.counts.sum(0), probs, combine)


class _Exchange:
    """Sends rows to the expert-parallel ranks of their experts, and gathers them over expert tensor parallelism, since
    its ranks hold slices of the same experts. Creating it is collective.

    Attributes:
        counts: int64 [etp · ep, L], rows for each local expert from each rank.
        sent, received: rows sent to, and received from, each expert-parallel rank.
        shared: rows that each expert-tensor-parallel rank received.
    """

    def __init__(self, counts: Tensor, groups: ProcessGroupCollection) -> None:
        """Plan the exchange from int64 [E], the number of this rank's rows for each expert."""
        self.groups, ep, etp = groups, groups.ep, groups.expt_tp
        gathered = gather_from_sequence_parallel_region(counts, group=groups.tp_ep)
        # [sending ep, sending etp, receiving ep, L]
        table = gathered.view(ep.size(), etp.size(), ep.size(), -1)
        by_rank = host_values(table.sum(-1))  # the only synchronization: collectives need sizes on the host
        received = [[by_rank[sender][slot][ep.rank()] for sender in range(ep.size())] for slot in range(etp.size())]
        self.counts = table[:, :, ep.rank()].transpose(0, 1).reshape(etp.size() * ep.size(), -1)
        self.sent, self.received = by_rank[ep.rank()][etp.rank()], received[etp.rank()]
        self.shared = [sum(rows) for rows in received]

    def send(self, rows: Tensor) -> Tensor:
        """Send [rows of this rank's tokens, ...]; return [R, ...], in the order of `counts`."""
        return gather(all_to_all(self.groups.ep, rows, self.received, self.sent), self.groups.expt_tp, self.shared)

    def send_back(self, output: Tensor) -> Tensor:
        """Reverse `send`, summing the partial results of expert-tensor-parallel ranks."""
        mine = reduce_scatter(output, self.groups.expt_tp, self.shared)
        return all_to_all(self.groups.ep, mine, self.sent, self.received)


def gather(mine: Tensor, group: ProcessGroup, sizes: list[int]) -> Tensor:
    """Concatenate the ranks' rows; gradients are summed over the ranks.

    Args:
        sizes: number of rows of each rank.
    """
    if len(set(sizes)) == 1:
        return gather_from_sequence_parallel_region(mine, group=group)
    # gloo only gathers equal sizes, and NCCL sends unequal ones one by one.
    return all_to_all(group, mine.repeat(len(sizes), *[1] * (mine.dim() - 1)), sizes, [mine.shape[0]] * len(sizes))


def reduce_scatter(whole: Tensor, group: ProcessGroup, sizes: list[int]) -> Tensor:
    """Sum over ranks, and return this rank's rows; the reverse of `gather`."""
    if len(set(sizes)) == 1:
        return reduce_scatter_to_sequence_parallel_region(whole, group=group)
    mine = sizes[group.rank()]
    parts = all_to_all(group, whole, [mine] * len(sizes), sizes)
    return parts.view(len(sizes), mine, *whole.shape[1:]).sum(0)


def _gather_sizes(size: int, group: ProcessGroup) -> list[int]:
    """Return every rank's number of tokens; data-parallel ranks may have micro-batches of different lengths."""
    if group.size() == 1:
        return [size]
    sizes = torch.tensor([size], device=torch.cuda.current_device())
    found: list[int] = host_values(gather_from_sequence_parallel_region(sizes, group=group))
    return found


_LEAST_TOKENS = 1024  # smallest number of tokens whose choices are summed at once, for speed


@dataclass(frozen=True, slots=True)
class Permutation:
    """The choice of each row, and the row of each choice.

    Backward passes gather, like forward passes: nothing is summed in a nondeterministic order on a GPU.

    Attributes:
        choices: int64 [R], token · k + index of the choice; n · k for a row of zeros.
        rows: int64 [n, k]; R for a choice that was dropped.
        is_complete: whether there are neither rows of zeros nor dropped choices.
    """

    choices: Tensor
    rows: Tensor
    is_complete: bool

    def permute(self, tokens: Tensor) -> Tensor:
        """Gather the tokens of the rows: [n, h] to [R, h]."""
        return _Rearrange.apply(tokens, self.choices // self.rows.shape[1], self.rows, self.is_complete, True)

    def permute_choices(self, values: Tensor) -> Tensor:
        """Gather each row's value from the values of choices: [n, k] to [R]."""
        column, rows = values.reshape(-1, 1), self.rows.view(-1, 1)
        return _Rearrange.apply(column, self.choices, rows, self.is_complete, True).view(-1)

    def unpermute(self, output: Tensor) -> Tensor:
        """Sum the rows of each token: [R, h] to [n, h]."""
        return _Rearrange.apply(output, self.choices // self.rows.shape[1], self.rows, self.is_complete, False)


def group_by_expert(
    experts: Tensor, num_experts: int, *, num_rows: int | None = None, capacity: int | None = None
) -> Permutation:
    """Sort choices by expert, and by token for each expert.

    Args:
        experts: int64 [n, k]; num_experts for a choice that is dropped.
        num_rows: number of choices that are not dropped; None if none is.
        capacity: rows of each expert, padded with zeros; no expert is chosen more often. None for as many rows as
            choices.
    """
    k, flat = experts.shape[1], experts.reshape(-1)
    by_expert, order = flat.sort(stable=True)
    places = torch.arange(flat.shape[0], device=flat.device)
    if capacity is None:
        num_rows = flat.shape[0] if num_rows is None else num_rows
        rows = torch.empty_like(order).scatter_(0, order, places).clamp_(max=num_rows)
        return Permutation(order[:num_rows], rows.view(-1, k), is_complete=num_rows == flat.shape[0])
    num_rows = num_experts * capacity
    starts = torch.searchsorted(by_expert, torch.arange(num_experts + 1, device=flat.device))
    filled = (by_expert * capacity + places - starts[by_expert]).clamp_(max=num_rows)
    choices = torch.full((num_rows + 1,), flat.shape[0], device=flat.device).scatter_(0, filled, order)[:num_rows]
    rows = torch.empty_like(order).scatter_(0, order, filled)
    return Permutation(choices, rows.view(-1, k), is_complete=False)


def count_by_expert(experts: Tensor, num_experts: int) -> Tensor:
    """Return how often each expert is chosen: int64 [num_experts], without synchronizing with the host."""
    flat = experts.reshape(-1)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[:num_experts]


class _Rearrange(torch.autograd.Function):
    """`_take` or `_sum`; each is the other's gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, sources: Tensor, rows: Tensor, is_complete: bool, takes: bool) -> Tensor:
        ctx.save_for_backward(rows if takes else sources)
        ctx.is_complete, ctx.takes = is_complete, takes
        return _take(values, sources, is_complete) if takes else _sum(values, rows, is_complete)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (index,), transposed = ctx.saved_tensors, _sum if ctx.takes else _take
        return transposed(grad, index, ctx.is_complete), None, None, None, None


def _take(values: Tensor, index: Tensor, is_complete: bool) -> Tensor:
    """Return values[index]; an index one past the end returns zeros."""
    if not is_complete:
        values = torch.nn.functional.pad(values, (0, 0, 0, 1))
    return values.index_select(0, index)


def _sum(values: Tensor, rows: Tensor, is_complete: bool) -> Tensor:
    """Return the sum of values[rows[i]] for each i; 16-bit values are summed in fp32 and rounded once.

    If most choices were dropped, as when every rank has all tokens, there are many more choices than rows of `values`.
    The sums are therefore computed in chunks of tokens that take about as much memory as `values`.
    """
    k = rows.shape[1]
    if k == 1:
        return _take(values, rows.view(-1), is_complete)
    if not is_complete:
        values = torch.nn.functional.pad(values, (0, 0, 0, 1))
    size = max(len(values) // k, _LEAST_TOKENS)
    sums = values.new_empty(len(rows), values.shape[1])
    for start in range(0, len(rows), size):
        some = rows[start : start + size]
        taken = values.index_select(0, some.reshape(-1)).view(*some.shape, values.shape[1])
        torch.sum(taken, 1, out=sums[start : start + size])
    return sums


class _HostValues:
    """Host values read by a function that runs several times, in order.

    Attributes:
        position: index of the next read in the current run.
    """

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.position = 0


_CURRENT: ContextVar[_HostValues | None] = ContextVar("answers", default=None)


def host_values(values: Tensor) -> Any:
    """Return a tensor's `tolist()`; within `caching_host_values` that of the first run."""
    return _cached(values.tolist)


def cached_host_copy(values: Tensor) -> device.HostCopy:
    """Start copying a tensor to the host; within `caching_host_values` return the copy of the first run."""
    return _cached(lambda: device.HostCopy(values))


def _cached(find: Callable[[], Any]) -> Any:
    answers = _CURRENT.get()
    if answers is None:
        return find()
    if answers.position == len(answers.kept):
        answers.kept.append(find())
    answers.position += 1
    return answers.kept[answers.position - 1]


def caching_host_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that is run several times on the same inputs: only its first run synchronizes with the host."""
    answers = _HostValues()

    def run(*args: Any) -> Any:
        answers.position = 0
        before = _CURRENT.set(answers)
        try:
            return function(*args)
        finally:
            _CURRENT.reset(before)

    return run
