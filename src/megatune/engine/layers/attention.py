"""Core attention through torch's scaled_dot_product_attention.

Legend: s sequence, b micro-batch, n query heads of this rank, g key/value heads of this rank, d head dimension.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class SDPAttention(torch.nn.Module):
    """Causal attention that never holds the s × s scores and never repeats key/value heads in memory it keeps.

    Megatron-Core's local DotProductAttention does both. It takes this class's place in the layer spec, with the same
    constructor and forward arguments.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        assert attn_mask_type == AttnMaskType.causal, "the decoder is causal"
        assert config.context_parallel_size == 1, "refused by the settings' rules"
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        **unused: Any,
    ) -> Tensor:
        """Attend causally. Padding is on the right, so no real token sees it and no mask is needed.

        Args:
            query: [s, b, n, d].
            key: [s, b, g, d].
            value: [s, b, g, d].

        Returns:
            [s, b, n·d], in the dtype of `query`.
        """
        s, b, n, d = query.shape
        output_bnsd = scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=key.shape[2] != n,
        )
        return output_bnsd.permute(2, 0, 1, 3).reshape(s, b, n * d)


def reference_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention with explicit scores, for tests of `SDPAttention`; same shapes."""
    s, b, n, d = query.shape
    repeats = n // key.shape[2]
    key, value = key.repeat_interleave(repeats, dim=2), value.repeat_interleave(repeats, dim=2)
    scores = torch.einsum("sbnd,tbnd->bnst", query, key) / math.sqrt(d)
    future = torch.ones(s, s, dtype=torch.bool, device=query.device).triu(1)
    return torch.einsum("bnst,tbnd->sbnd", scores.masked_fill(future, -torch.inf).softmax(-1), value).reshape(
        s, b, n * d
    )
