"""Self-attention: grouped-query and multi-latent.

Legend: T tokens of a rank, P = T / tp with sequence parallelism and T without; n query heads and g key/value heads of
a rank, d channels of queries and keys, d_v of values; e bytes of a number.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatune.plan.memory.core_attention import Heads, core_attention
from megatune.plan.memory.linear import linear, norm
from megatune.plan.memory.operators import Operator, chain, recomputed
from megatune.plan.memory.shapes import Shapes


def self_attention(shapes: Shapes) -> Operator:
    """From the normalized hidden states to what is added to the residual stream."""
    operators = _grouped_query(shapes) if shapes.architecture.mla is None else _latent(shapes)
    return chain(operators)


def _grouped_query(shapes: Shapes) -> Iterator[Operator]:
    architecture, tokens, size = shapes.architecture, shapes.tokens, shapes.size
    d, heads = architecture.kv_channels, architecture.num_attention_heads // shapes.tp
    groups = max(architecture.num_query_groups // shapes.tp, 1)
    mixed = (architecture.query_size + 2 * architecture.key_value_size) // shapes.tp
    # With fewer key/value heads than ranks, each rank gathers all projections and takes its part of them.
    source = mixed * (shapes.tp if architecture.num_query_groups < shapes.tp else 1) * tokens * size
    spread = shapes.sequence_parallel
    yield linear(shapes, "linear_qkv", architecture.hidden_size, mixed, gathers=spread)
    query, key = tokens * heads * d * size, tokens * groups * d * size
    # Queries of several groups do not lie side by side: they are copied.
    copied = query if groups > 1 else 0
    if architecture.qk_layernorm:
        for vectors, saved in ((tokens * heads, query), (tokens * groups, key)):
            one = norm(shapes, vectors, d, saved)
            yield one._replace(forward=one.forward + source, backward=one.backward + query + key)
    # Both passes make two products and their sum, or fused two of them.
    yield Operator(0, source + copied + 2 * query, source + 2 * query)
    yield from _core(Heads(shapes, heads, groups, d, d))
    yield linear(
        shapes, "linear_proj", heads * d, architecture.hidden_size, scatters=spread, saved=0, shares_gradient=True
    )


def _latent(shapes: Shapes) -> Iterator[Operator]:
    """Multi-latent attention: narrow latents are kept, and what they are blown up to."""
    architecture, tokens, size, part = shapes.architecture, shapes.tokens, shapes.size, shapes.part
    mla, hidden, spread = architecture.mla, architecture.hidden_size, shapes.sequence_parallel
    assert mla is not None
    heads = architecture.num_attention_heads // shapes.tp
    d, d_v = mla.qk_head_dim + mla.qk_pos_emb_head_dim, mla.v_head_dim
    # The input, which both projections save.
    yield Operator(shapes.hidden if "linear_qkv" in shapes.keeps else 0, shapes.hidden)
    if mla.q_lora_rank is not None:
        yield linear(shapes, "linear_qkv", hidden, mla.q_lora_rank, saved=0, vectors=part, adds_gradient=False)
        yield norm(shapes, part, mla.q_lora_rank, part * mla.q_lora_rank * size)
    yield linear(shapes, "linear_qkv", hidden, architecture.latent_size, saved=0, vectors=part, adds_gradient=False)
    yield norm(shapes, part, mla.kv_lora_rank, part * architecture.latent_size * size)
    into_queries, into_others = heads * d, heads * (mla.qk_head_dim + d_v)
    saved = None if mla.q_lora_rank else 0
    yield linear(shapes, "linear_qkv", mla.q_lora_rank or hidden, into_queries, gathers=spread, saved=saved)
    query, others = tokens * into_queries * size, tokens * into_others * size
    yield Operator(0, 2 * query, 3 * query)
    yield linear(shapes, "linear_qkv", mla.kv_lora_rank, into_others, gathers=spread)
    yield Operator(0, query + others, query + others)
    attended = Heads(shapes, heads, heads, d, d_v)
    if "mla_up_proj" in shapes.modules:
        yield _made_again(attended)
    else:
        yield from _core(attended)
    yield linear(shapes, "linear_proj", heads * d_v, hidden, scatters=spread, saved=0, shares_gradient=True)


def _made_again(heads: Heads) -> Operator:
    """Core attention whose queries, keys and values are discarded and made again, and copied to where they were.
    Values that a kernel filled up are other tensors, which it keeps."""
    inner = chain(_core(heads))
    made = heads.query + heads.key + heads.value
    discarded = made - (heads.value if heads.shapes.kernel == "padded" else 0)
    return Operator(inner.kept - discarded, inner.forward + discarded, inner.backward + discarded + made)


def _core(heads: Heads) -> Iterator[Operator]:
    """Core attention up to the context, which the output projection saves."""
    core, context = core_attention(heads)
    if "core_attn" in heads.shapes.modules:
        # The context is made again, too, and gone before the projection's is.
        yield recomputed(core, heads.query + heads.key + heads.value, heads.context)
        yield Operator(heads.context)
    else:
        yield core
        yield Operator(context)
