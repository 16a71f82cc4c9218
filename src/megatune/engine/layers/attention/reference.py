"""The definition, for tests."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_attention(
    query: Tensor, key: Tensor, value: Tensor, boundaries: tuple[int, ...] | None = None, scale: float | None = None
) -> Tensor:
    """Causal attention with explicit scores, inside each document.

    Args:
        query: [s, b, n, d].
        key: [s, b, g, d].
        value: [s, b, g, e].
        boundaries: of the documents; None for one a row.

    Returns:
        [s, b, n · e].
    """
    s, _, n, d = query.shape
    repeats = n // key.shape[2]
    key, value = key.repeat_interleave(repeats, dim=2), value.repeat_interleave(repeats, dim=2)
    scores = torch.einsum("sbnd,tbnd->bnst", query, key) * (d**-0.5 if scale is None else scale)
    document = torch.bucketize(torch.arange(s), torch.tensor(boundaries or (0, s)), right=True)
    visible = (document[:, None] == document) & torch.ones(s, s, dtype=torch.bool).tril()
    scores = scores.masked_fill(~visible.to(scores.device), -torch.inf)
    return torch.einsum("bnst,tbne->sbne", scores.softmax(-1), value).flatten(2)
