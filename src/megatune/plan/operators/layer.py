"""The operators of one decoder layer, in two residual branches."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from megatune.plan.operators.attention import self_attention
from megatune.plan.operators.experts import expert_layer
from megatune.plan.operators.feed_forward import feed_forward
from megatune.plan.operators.linear import layer_norm, residual
from megatune.plan.operators.operator import Operator
from megatune.plan.operators.shapes import Shapes


class Branch(NamedTuple):
    """A norm, what follows it, and the sum into the residual stream."""

    norm: Operator
    inner: tuple[Operator, ...]
    residual: Operator


@lru_cache(maxsize=4096)
def decoder_layer(shapes: Shapes, sparse: bool) -> tuple[Branch, Branch]:
    """Attention, and feed-forward or experts."""
    inner = (
        expert_layer(shapes)
        if sparse
        else feed_forward(shapes, "mlp", shapes.architecture.ffn_hidden_size // shapes.tp)
    )
    norm, last = layer_norm(shapes), residual(shapes)
    return Branch(norm, tuple(self_attention(shapes)), last), Branch(norm, tuple(inner), last)
