"""Definitions that native layers are compared with, written as their papers write them."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: tuple[int, ...] | None = None,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the definition, with explicit scores, for tests.

    Args:
        query: [s, b, n, d].
        key: [s, b, g, d].
        value: [s, b, g, e].
        boundaries: of the documents; None for one a row.
        window: the tokens that a query sees, its own among them; None for all.
        sinks: [n], one more score of each query of a head, whose value is zero.

    Returns:
        [s, b, n · e].
    """
    s, _, n, d = query.shape
    repeats = n // key.shape[2]
    key, value = key.repeat_interleave(repeats, dim=2), value.repeat_interleave(repeats, dim=2)
    scores = torch.einsum("sbnd,tbnd->bnst", query, key) * (d**-0.5 if scale is None else scale)
    document = torch.bucketize(torch.arange(s), torch.tensor(boundaries or (0, s)), right=True)
    visible = (document[:, None] == document) & torch.ones(s, s, dtype=torch.bool).tril()
    visible &= torch.ones(s, s, dtype=torch.bool).triu(1 - (window or s))
    scores = scores.masked_fill(~visible.to(scores.device), -torch.inf)
    if sinks is not None:
        of_sinks = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        return torch.einsum("bnst,tbne->sbne", torch.cat((scores, of_sinks), -1).softmax(-1)[..., :-1], value).flatten(
            2
        )
    return torch.einsum("bnst,tbne->sbne", scores.softmax(-1), value).flatten(2)


def reference_token_losses(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return cross-entropy of each token from all logits, on one rank and without padding of the vocabulary."""
    logits = torch.nn.functional.linear(hidden_states, weight).float().permute(1, 2, 0)
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="none")


def reference_rms_norm(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm as its paper writes it."""
    wide = hidden_states.double()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()).to(hidden_states.dtype)
