"""Gated delta nets: projections, convolution, the chunked rule and the gated norm, on one rank.

Legend: T tokens; k key heads and n value heads of this rank; d channels of a key, e of a value; C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatune.architecture import DeltaNet
from megatune.plan.operators.linear import elementwise, linear
from megatune.plan.operators.operator import Memory, Operator, Product
from megatune.plan.operators.shapes import Shapes

# As the engine has them: tokens of a chunk, and tokens that are in memory at once with all that is computed of them.
CHUNK, TOKENS_AT_ONCE = 64, 1024
_NAME = "self_attention"


def delta_net(shapes: Shapes) -> Iterator[Operator]:
    """Yield the operators from the normalized hidden states to what is added to the residual stream."""
    architecture, delta, tokens = shapes.architecture, shapes.architecture.delta, shapes.tokens
    assert delta is not None
    hidden, size, spread = architecture.hidden_size, shapes.size, shapes.sequence_parallel
    rows, mixed = (delta.qkvz_size + delta.ba_size) // shapes.tp, delta.conv_size // shapes.tp
    values, heads = delta.value_size // shapes.tp, delta.num_value_heads // shapes.tp
    yield linear(shapes, f"{_NAME}.in_proj", "qkv", hidden, rows, gathers=spread)
    # What the projection gives is kept whole: the convolution and the norm's gate save parts of it.
    kept, wide = tokens * rows * size, 4 * tokens * mixed
    conv = elementwise(shapes, tokens * mixed, 12, 24, 10)
    yield Operator("conv", Memory(kept, 3 * wide + tokens * mixed * size, 6 * wide), *conv)
    # Three numbers of each head in fp32: what decays, its softplus and its argument; and one of the dtype.
    small = tokens * heads * (12 + size)
    yield Operator("decay", Memory(small, 4 * tokens * heads, 8 * tokens * heads))
    yield _rule(shapes, delta, heads, mixed)
    # Its input, the rule's output; fp32 copies are made on the way.
    gated = elementwise(shapes, tokens * values, 8, 16, 8)
    yield Operator("norm", Memory(tokens * values * size, 12 * tokens * values, 24 * tokens * values), *gated)
    yield linear(shapes, f"{_NAME}.out_proj", "proj", values, hidden, scatters=spread, shares_gradient=True)


def _rule(shapes: Shapes, delta: DeltaNet, heads: int, mixed: int) -> Operator:
    """Kept are queries, keys and values, and a state of each head for every TOKENS_AT_ONCE tokens; all that chunks
    compute is in memory for that many tokens, in fp32."""
    tokens, d, e = shapes.tokens, delta.key_head_dim, delta.value_head_dim
    whole = tokens * shapes.cp // max(shapes.rows, 1)
    parts = -(-whole // TOKENS_AT_ONCE) * shapes.rows / shapes.cp
    states = int(4 * heads * d * e * parts)
    at_once = min(tokens * shapes.cp, TOKENS_AT_ONCE * shapes.rows) // shapes.cp
    # Of a token and head: corrections, readings, what is solved for, queries and keys of the state; rows of chunks.
    inside = 4 * at_once * heads * (4 * e + 6 * d + 4 * CHUNK) + 4 * at_once * heads * d * e // CHUNK
    output = 4 * tokens * heads * e
    memory = Memory(tokens * mixed * shapes.size + states, 2 * output + inside, 2 * output + 3 * inside)
    # Products of a token and head: with keys and queries of the chunk, of the triangular system, with the state.
    columns = 3 * e + 2 * CHUNK + (CHUNK * (d + e) / 2 + CHUNK * e) / d
    forward = Product(tokens * heads, columns, d, 4)
    launches = 40 * int(parts + 1) + 4 * whole // CHUNK
    return Operator("rule", memory, (forward,), (forward, forward, forward), launches)
