"""Causal attention in which the tokens of a picture see each other, those behind them too (Gemma 3).

What causal attention leaves out is attention of its own, over runs of the same kernel, merged by the log-sum-exps. No
window cuts it: a window ends a number of tokens before the query.

Legend: t tokens of whole rows, b rows folded into the heads, n query heads and g key/value heads of a row, d channels
of queries and keys, e channels of values.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor

from megatune.engine.layers.attention.kernels import Kernel, merge, pick
from megatune.engine.layers.attention.spans import LaterTokens, Spans


def attend_with_pictures(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, later: LaterTokens, scale: float, backend: AttnBackend
) -> Tensor:
    """Attend within `spans`, and to `later` tokens of pictures: [t, b, n, d], [t, b, g, d] and [t, b, g, e] to
    [t, b, n, e]."""
    kernel = pick(query, value, backend)
    output: Tensor = _PictureAttention.apply(query, key, value, spans, later, scale, kernel)
    return output


class _PictureAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        spans: Spans,
        later: LaterTokens,
        scale: float,
        kernel: Kernel,
    ) -> Tensor:
        rows, (of_query, of_key, of_later) = query.shape[1], later
        output, lse = kernel.forward(query.flatten(1, 2), key.flatten(1, 2), value.flatten(1, 2), spans, scale)
        output, lse = output.unflatten(1, query.shape[1:3]), _by_token(lse, rows)
        by_token = [each.flatten(0, 1) for each in (query, key, value, output)]
        keys, values = (each[of_key] for each in by_token[1:3])
        found, of_found = kernel.forward(by_token[0][of_query], keys, values, of_later, scale)
        merged, lse[:, of_query] = merge(by_token[3][of_query].to(lse.dtype), lse[:, of_query], found, of_found)
        output = by_token[3].index_copy(0, of_query, merged.to(output.dtype)).view_as(output)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.arguments = spans, later, scale, kernel
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, lse = ctx.saved_tensors
        spans, (of_query, of_key, of_later), scale, kernel = ctx.arguments
        rows = grad_output.shape[1]
        saved = (*(each.flatten(1, 2) for each in tensors), _by_row(lse, rows))
        gradients = kernel.backward(grad_output.flatten(1, 2), saved, spans, scale)
        query, key, value, output = (each.flatten(0, 1) for each in tensors)
        saved = query[of_query], key[of_key], value[of_key], output[of_query], lse[:, of_query]
        of_runs = kernel.backward(grad_output.flatten(0, 1)[of_query], saved, of_later, scale)
        whole = []
        for tensor, gradient, places, of_run in zip(
            tensors, gradients, (of_query, of_key, of_key), of_runs, strict=False
        ):
            by_token = gradient.unflatten(1, tensor.shape[1:3]).flatten(0, 1)
            whole.append(by_token.index_add(0, places, of_run).view_as(tensor))
        return *whole, None, None, None, None


def _by_token(lse: Tensor, rows: int) -> Tensor:
    """[b · n, t] to [n, t · b]."""
    return lse.unflatten(0, (rows, -1)).permute(1, 2, 0).flatten(1)


def _by_row(lse: Tensor, rows: int) -> Tensor:
    """[n, t · b] to [b · n, t]."""
    return lse.unflatten(1, (-1, rows)).permute(2, 0, 1).flatten(0, 1)
