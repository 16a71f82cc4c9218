"""Attention by matrix products, with all scores of a run in memory: any device, dtype and shape.

Legend: t queries and u keys of a call, n query heads, g key/value heads, d channels of queries and keys, e of values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatune.engine.layers.attention.spans import Spans


class Plain:
    """Matrix products with all scores of a run in memory, in fp32 at least: any device, dtype and shape."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
        outputs, lses = [], []
        for queries, keys in spans.runs:
            scores = _scores(query[queries], key[keys], spans.causal, scale)
            lse = scores.logsumexp(-1)
            outputs.append(
                torch.einsum("grqk,kgd->qgrd", (scores - lse[..., None]).exp(), _wide(value[keys])).flatten(1, 2)
            )
            lses.append(lse.flatten(0, 1))
        return torch.cat(outputs).to(query.dtype), torch.cat(lses, 1)

    def backward(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        lse: Tensor,
        spans: Spans,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups = (key.shape[1], -1)
        delta = (_wide(grad_output) * _wide(output)).sum(-1).T.unflatten(0, groups)
        lse = lse.unflatten(0, groups)
        gradients: tuple[list[Tensor], ...] = ([], [], [])
        for queries, keys in spans.runs:
            scores = _scores(query[queries], key[keys], spans.causal, scale)
            shares = (scores - lse[..., queries, None]).exp()
            grad_run = _wide(grad_output[queries]).unflatten(1, groups)
            grad_shares = torch.einsum("qgrd,kgd->grqk", grad_run, _wide(value[keys]))
            grad_scores = shares * (grad_shares - delta[..., queries, None]) * scale
            query_run = _wide(query[queries]).unflatten(1, groups)
            gradients[0].append(torch.einsum("grqk,kgd->qgrd", grad_scores, _wide(key[keys])).flatten(1, 2))
            gradients[1].append(torch.einsum("grqk,qgrd->kgd", grad_scores, query_run))
            gradients[2].append(torch.einsum("grqk,qgrd->kgd", shares, grad_run))
        grad_query, grad_key, grad_value = (torch.cat(parts).to(query.dtype) for parts in gradients)
        return grad_query, grad_key, grad_value


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    """[g, n / g, t, u], -inf where a query does not see a key."""
    scores = torch.einsum("qgrd,kgd->grqk", _wide(query).unflatten(1, (key.shape[1], -1)), _wide(key)) * scale
    return scores + lower_right(scores, len(query), len(key)) if causal else scores


def lower_right(like: Tensor, t: int, u: int) -> Tensor:
    """[t, u], of the dtype of `like`: -inf for the keys that a query does not see when the last one sees all."""
    return like.new_full((t, u), -torch.inf).triu(1 + u - t)
