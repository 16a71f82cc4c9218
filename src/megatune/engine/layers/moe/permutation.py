"""Permute tokens into rows grouped by expert, and back.

Legend: n tokens, k choices of each token, h hidden size, R rows: a token has a row for each of its choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_LEAST_TOKENS = 1024  # whose choices are summed at a time: fewer would be slow


@dataclass(frozen=True, slots=True)
class Permutation:
    """Which choice each row is of, and which row each choice became.

    Backward passes gather, as forward passes do: nothing is added in an order that a GPU picks anew each time.

    Attributes:
        choices: int64 [R], token · k + number of the choice; n · k for a row of zeros.
        rows: int64 [n, k]; R for a choice that was dropped.
        is_complete: there are neither rows of zeros nor dropped choices.
    """

    choices: Tensor
    rows: Tensor
    is_complete: bool

    def permute(self, tokens: Tensor) -> Tensor:
        """Return the rows of these tokens: [n, h] to [R, h]."""
        return _Rearrange.apply(tokens, self.choices // self.rows.shape[1], self.rows, self.is_complete, True)

    def permute_choices(self, values: Tensor) -> Tensor:
        """Return what each row has of a value for each choice: [n, k] to [R]."""
        column, rows = values.reshape(-1, 1), self.rows.view(-1, 1)
        return _Rearrange.apply(column, self.choices, rows, self.is_complete, True).view(-1)

    def unpermute(self, output: Tensor) -> Tensor:
        """Return the sum of each token's rows: [R, h] to [n, h]."""
        return _Rearrange.apply(output, self.choices // self.rows.shape[1], self.rows, self.is_complete, False)


def group_by_expert(
    experts: Tensor, num_experts: int, *, num_rows: int | None = None, capacity: int | None = None
) -> Permutation:
    """Order choices by expert, and by token for each expert.

    Args:
        experts: int64 [n, k]; num_experts for a choice that is dropped.
        num_rows: choices that are not dropped. None where none is.
        capacity: rows of each expert, filled up with zeros. No expert is chosen more often. None for as many rows as
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
    """Return how often each expert is chosen: int64 [num_experts], without asking the host."""
    flat = experts.reshape(-1)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[:num_experts]


class _Rearrange(torch.autograd.Function):
    """`_take`, or `_sum`: each is the other's gradient."""

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
    """Return values[index], where an index one beyond the last finds zeros."""
    if not is_complete:
        values = torch.nn.functional.pad(values, (0, 0, 0, 1))
    return values.index_select(0, index)


def _sum(values: Tensor, rows: Tensor, is_complete: bool) -> Tensor:
    """Return the sum of values[rows[i]] for each i; 16-bit values are summed in fp32 and rounded once.

    Where most choices were dropped, as they are when every rank has all tokens, there are many more choices than rows
    of `values`: the sums are then computed for as many tokens at a time as take the memory of `values`.
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
