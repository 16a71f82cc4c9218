"""Self-attention: grouped-query and multi-latent (arXiv:2405.04434).

Legend: T tokens of a rank, P = T / tp with sequence parallelism and T without; n query heads and g key/value heads of
a rank, d channels of queries and keys, d_v of values; e bytes of a number.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatune.plan.operators.core_attention import Heads, core_attention
from megatune.plan.operators.linear import elementwise, linear, linear_memory, linear_work, norm_memory, norm_work
from megatune.plan.operators.operator import Memory, Operator
from megatune.plan.operators.shapes import Shapes


def self_attention(shapes: Shapes) -> Iterator[Operator]:
    """From the normalized hidden states to what is added to the residual stream."""
    heads = heads_of(shapes)
    yield from _grouped_query(shapes, heads) if shapes.architecture.mla is None else _latent(shapes, heads)
    yield from core_attention(heads)
    yield linear(
        shapes, "linear_proj", "proj", heads.queries * heads.value_channels, shapes.architecture.hidden_size,
        scatters=shapes.sequence_parallel, saved=0, shares_gradient=True,
    )  # fmt: skip


def heads_of(shapes: Shapes) -> Heads:
    """Return the heads of this rank."""
    architecture, mla = shapes.architecture, shapes.architecture.mla
    queries = architecture.num_attention_heads // shapes.tp
    if mla is not None:
        return Heads(shapes, queries, queries, mla.qk_head_dim + mla.qk_pos_emb_head_dim, mla.v_head_dim)
    groups = max(architecture.num_query_groups // shapes.tp, 1)
    return Heads(shapes, queries, groups, architecture.kv_channels, architecture.kv_channels)


def _grouped_query(shapes: Shapes, heads: Heads) -> Iterator[Operator]:
    """Projection, norms of heads, rotary embedding, and the split into queries, keys and values."""
    architecture, tokens = shapes.architecture, shapes.tokens
    d, query, key = architecture.kv_channels, heads.query, heads.key
    mixed = (architecture.query_size + 2 * architecture.key_value_size) // shapes.tp
    # With fewer key/value heads than ranks, each rank gathers all projections and takes its part of them.
    source = mixed * (shapes.tp if architecture.num_query_groups < shapes.tp else 1) * tokens * shapes.size
    yield linear(shapes, "linear_qkv", "qkv", architecture.hidden_size, mixed, gathers=shapes.sequence_parallel)
    sizes = architecture.query_size / shapes.tp, architecture.key_value_size / shapes.tp
    if architecture.qk_layernorm:
        for count, saved, channels in ((heads.queries, query, sizes[0]), (heads.groups, key, sizes[1])):
            one = norm_memory(shapes, tokens * count, d, saved)
            memory = one._replace(forward=one.forward + source, backward=one.backward + query + key)
            yield Operator("qk_norm", memory, *norm_work(shapes, tokens * channels))
    # Queries of several groups do not lie side by side: they are copied.
    copied = query if heads.groups > 1 else 0
    # Both passes make two products and their sum, or fused two of them.
    rotated = elementwise(shapes, tokens * sum(sizes), *((2, 2, 2) if shapes.rope_fusion else (7, 7, 14)))
    yield Operator("rope", Memory(0, source + copied + 2 * query, source + 2 * query), *rotated)
    yield Operator("split", Memory(0), *elementwise(shapes, tokens * mixed, 2, 2, 3))


def _latent(shapes: Shapes, heads: Heads) -> Iterator[Operator]:
    """Narrow latents are kept, and the queries, keys and values that are projected up from them.

    Of the narrow projections' norms and adapters the time is left out.
    """
    architecture, mla, part = shapes.architecture, shapes.architecture.mla, shapes.part
    assert mla is not None
    hidden, spread, name = architecture.hidden_size, shapes.sequence_parallel, "linear_qkv"
    into_queries, into_others = heads.queries * heads.channels, heads.queries * (mla.qk_head_dim + mla.v_head_dim)

    def down(rank: int) -> Operator:
        memory = linear_memory(shapes, name, hidden, rank, saved=0, vectors=part, adds_gradient=False)
        return Operator("qkv", memory, *linear_work(shapes, part, rank, hidden))

    def normed(rank: int, saved_rank: int) -> Operator:
        return Operator("qkv", norm_memory(shapes, part, rank, part * saved_rank * shapes.size))

    # The input, which both projections save.
    yield Operator("qkv", Memory(shapes.hidden if name in shapes.keeps else 0, shapes.hidden))
    if mla.q_lora_rank is not None:
        yield down(mla.q_lora_rank)
        yield normed(mla.q_lora_rank, mla.q_lora_rank)
    yield down(architecture.latent_size)
    yield normed(mla.kv_lora_rank, architecture.latent_size)
    if mla.q_lora_rank is None:
        yield linear(shapes, name, "qkv", hidden, into_queries, gathers=spread, saved=0)
    else:
        yield linear(shapes, name, "mla_up_proj", mla.q_lora_rank, into_queries, gathers=spread)
    query, others = shapes.tokens * into_queries * shapes.size, shapes.tokens * into_others * shapes.size
    yield Operator("rope", Memory(0, 2 * query, 3 * query))
    yield linear(shapes, name, "mla_up_proj", mla.kv_lora_rank, into_others, gathers=spread)
    # Rotary embedding of a part of the channels, and queries and keys concatenated from their parts.
    joined = elementwise(shapes, shapes.tokens * (2 * architecture.query_size / shapes.tp), 6, 6, 30)
    yield Operator("mla_up_proj", Memory(0, query + others, query + others), *joined)
