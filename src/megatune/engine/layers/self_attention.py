"""Grouped-query attention, and what it shares with latent attention."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from megatune.engine.layers.norm import RMSNorm
from megatune.engine.layers.rotary import fused_rotate, rotate
from megatune.engine.sequences import Sequences


class GroupedQueryAttention(SelfAttention):
    """Megatron-Core's self-attention with its own rotary embedding: `engine.layers.rotary` knows of YaRN, and of
    positions that restart in a row, without a copy or an angle that a layer need not make.

    Queries, keys and values are parts of one projection, and with more tensor-parallel ranks than key/value heads of a
    gathered one: what is kept of them for the backward pass lies in memory of its own, so that the projection's is free
    before attention begins."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: None,
        rotary_pos_emb: Tensor,
        packed_seq_params: Sequences,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        """Project, rotate, attend, project.

        Args:
            hidden_states: [s / cp (/ tp), b, h].
            rotary_pos_emb: [2, s / cp, 1, 1, d], see `engine.layers.rotary.cos_sin`.

        Returns:
            [s / cp (/ tp), b, h], and no bias.
        """
        query, key, value = self.get_query_key_value_tensors(hidden_states, None)
        turn = fused_rotate if self.config.apply_rope_fusion else rotate
        query, key, value = turn(query, rotary_pos_emb), turn(key, rotary_pos_emb), value.contiguous()
        recompute = self.checkpoint_core_attention and self.training
        context = attend(self.core_attention, query, key, value, packed_seq_params, recompute=recompute)
        output, _ = self.linear_proj(context)
        return output, None


class HeadNorm(RMSNorm):
    """Norm of each head's query or key. It keeps its input, which must not keep the projection that it is a part of."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize [s / cp, b, heads of this rank, channels of a head]."""
        return super().forward(hidden_states.contiguous())


def attend(
    core_attention: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Sequences,
    *,
    recompute: bool,
) -> Tensor:
    """Core attention, computed again in the backward pass where asked.

    Args:
        query, key, value: [s / cp, b, heads of this rank, channels of a head].

    Returns:
        [s / cp, b, heads of this rank · channels of a value].
    """

    def compute(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        context: Tensor = core_attention(query, key, value, None, packed_seq_params=sequences)
        return context

    if not recompute:
        return compute(query, key, value)
    context: Tensor = tensor_parallel.checkpoint(compute, False, query, key, value)
    return context
