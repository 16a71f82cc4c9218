"""One decoder layer, and a run of them with what is recomputed."""

from __future__ import annotations

from megatune.plan.memory.attention import self_attention
from megatune.plan.memory.experts import expert_layer
from megatune.plan.memory.feed_forward import feed_forward
from megatune.plan.memory.linear import norm
from megatune.plan.memory.operators import Operator, chain, recomputed
from megatune.plan.memory.shapes import Shapes


def decoder_layer(shapes: Shapes, sparse: bool) -> Operator:
    """Norm, attention, norm, feed-forward or experts, each around a residual connection."""
    if sparse:
        inner = expert_layer(shapes)
        if "moe" in shapes.modules:
            inner = recomputed(inner, shapes.hidden, shapes.hidden)
    else:
        inner = feed_forward(shapes, shapes.architecture.ffn_hidden_size // shapes.tp)
        if "mlp" in shapes.modules:
            inner = recomputed(inner, shapes.hidden, shapes.hidden)
    return chain((_branch(shapes, self_attention(shapes)), _branch(shapes, inner)), hold=shapes.hidden)


def _branch(shapes: Shapes, inner: Operator) -> Operator:
    """A norm and what follows it."""
    before = norm(shapes, shapes.part, shapes.architecture.hidden_size, shapes.hidden)
    if "layernorm" not in shapes.modules:
        return chain((before, inner))
    # The norm's output, which `inner` saves first, is made again before anything of it is needed, in memory of its
    # own and copied to where it was.
    extra = before.kept - shapes.hidden + 2 * shapes.hidden
    return Operator(
        shapes.hidden + inner.kept - min(inner.kept, shapes.hidden),
        inner.forward + shapes.hidden,
        max(inner.backward, before.backward - shapes.hidden) + extra,
    )
