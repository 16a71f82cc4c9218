"""Core attention: what takes the place of Megatron-Core's DotProductAttention in a layer.

Legend: s tokens of a whole row, cp context-parallel ranks, b rows, n query heads and g key/value heads of this rank, d
channels of queries and keys, e channels of values.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatune.engine.layers.attention.context_all_gather import attend_all_gather
from megatune.engine.layers.attention.context_all_to_all import attend_all_to_all
from megatune.engine.layers.attention.context_ring import attend_ring
from megatune.engine.layers.attention.rows import attend_rows
from megatune.engine.sequences import Sequences

_ACROSS_RANKS = {"all_gather": attend_all_gather, "a2a": attend_all_to_all, "p2p": attend_ring}


class CoreAttention(torch.nn.Module):
    """Causal attention inside each document, for queries, keys and values as tensor parallelism leaves them.

    Megatron-Core's own, without Transformer Engine, holds all s × s scores, repeats key/value heads in memory, and
    refuses packed rows and context parallelism.

    Args:
        softmax_scale: multiplies the scores; None is 1 / √d.
        cp_comm_type: how context-parallel ranks attend to each other's tokens.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        assert attn_mask_type == AttnMaskType.causal, "the decoder is causal"
        self.backend = config.attention_backend
        self.softmax_scale = softmax_scale
        self.cp_comm_type = cp_comm_type if config.context_parallel_size > 1 else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        *,
        packed_seq_params: Sequences,
        **unused: Any,
    ) -> Tensor:
        """Attend. Padding is at the end of its document, so no real token sees it and no mask is needed.

        Args:
            query: [s / cp, b, n, d], the tokens that `engine.sequences.local_batch` gives this rank.
            key: [s / cp, b, g, d].
            value: [s / cp, b, g, e].

        Returns:
            [s / cp, b, n · e], in the dtype of `query`.
        """
        scale = self.softmax_scale or 1 / math.sqrt(query.shape[-1])
        boundaries = packed_seq_params.boundaries
        if self.cp_comm_type is None:
            return attend_rows(query, key, value, boundaries, scale, self.backend).flatten(2)
        attend, group = _ACROSS_RANKS[self.cp_comm_type], parallel_state.get_context_parallel_group()
        return attend(query, key, value, boundaries, scale, self.backend, group).flatten(2)
