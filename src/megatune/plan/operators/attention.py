"""Self-attention: grouped-query and multi-latent (arXiv:2405.04434), on one rank and across context-parallel ranks.

Every kernel of core attention keeps queries, keys, values, its output, and the log-sum-exp of the scores in fp32 for
each query and head (FlashAttention-2, arXiv:2307.08691); only torch's fallback of matrix products keeps scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatune.architecture import Architecture
from megatune.config.kernels import PLAIN_BACKENDS
from megatune.plan.operators.linear import elementwise, linear, norm_memory, norm_work
from megatune.plan.operators.operator import Attention, Memory, MemoryOp, Operator
from megatune.plan.operators.shapes import Shapes


@dataclass(frozen=True, slots=True)
class Heads:
    """Queries, keys and values of one rank.

    Attributes:
        queries, groups: heads of queries, and of keys and values.
        channels, value_channels: of a query's and key's head, and of a value's.
        query, key, value, context: bytes of the tensors; `context` is the output.
    """

    shapes: Shapes
    queries: int
    groups: int
    channels: int
    value_channels: int
    query: int
    key: int
    value: int
    context: int

    @property
    def padded(self) -> int:
        """Bytes of the output, with values padded to the channels of queries if a flash kernel needs it."""
        flash = self.shapes.kernel in ("padded", "varlen")
        return self.query if flash and self.channels != self.value_channels else self.context

    @property
    def context_copy(self) -> int:
        """Bytes of the context that the output projection saves in addition to the output that attention keeps."""
        return self.context if self.padded != self.context else 0

    @property
    def sums(self) -> int:
        """Bytes of the log-sum-exps."""
        return 4 * self.shapes.tokens * self.queries

    @property
    def gradients(self) -> int:
        """Bytes of the gradients of output, queries, keys and values."""
        return self.context + self.query + self.key + self.value


def self_attention(shapes: Shapes) -> Iterator[Operator]:
    """Yield the operators from the normalized hidden states to the output projection."""
    heads = heads_of(shapes)
    yield from _grouped_query(shapes, heads) if shapes.architecture.mla is None else _latent(shapes, heads)
    yield from core_attention(heads)
    if shapes.architecture.attention_output_gate:
        # It keeps the sigmoid and the product, which is the projection's input.
        work = elementwise(shapes, shapes.tokens * (shapes.architecture.query_size / shapes.tp), 5, 9, 4)
        yield Operator("gate", Memory(2 * heads.context, heads.context, 2 * heads.context), *work)
    yield linear(
        shapes, "self_attention.linear_proj", "proj", heads.queries * heads.value_channels,
        shapes.architecture.hidden_size, scatters=shapes.sequence_parallel, saved=0, shares_gradient=True,
    )  # fmt: skip


def heads_of(shapes: Shapes) -> Heads:
    """Return the heads of this rank."""
    architecture, mla, row = shapes.architecture, shapes.architecture.mla, shapes.tokens * shapes.itemsize
    n = groups = architecture.num_attention_heads // shapes.tp
    if mla is not None:
        d, d_v = mla.qk_head_dim + mla.qk_pos_emb_head_dim, mla.v_head_dim
    else:
        groups, d = max(architecture.num_query_groups // shapes.tp, 1), architecture.kv_channels
        d_v = d
    return Heads(shapes, n, groups, d, d_v, row * n * d, row * groups * d, row * groups * d_v, row * n * d_v)


def _grouped_query(shapes: Shapes, heads: Heads) -> Iterator[Operator]:
    """Yield projection, norms of heads, rotary embedding, and the split into queries, keys and values."""
    architecture, tokens = shapes.architecture, shapes.tokens
    d, query, key = architecture.kv_channels, heads.query, heads.key
    global_heads = architecture.global_heads if shapes.kind.has_global_heads else None
    projections = 1 if global_heads is not None and global_heads.keys_are_values else 2
    mixed = (architecture.gated_query_size + projections * architecture.key_value_size) // shapes.tp
    # With fewer key/value heads than ranks, each rank gathers all projections and uses its part.
    source = mixed * (shapes.tp if architecture.num_query_groups < shapes.tp else 1) * tokens * shapes.itemsize
    yield linear(
        shapes, "self_attention.linear_qkv", "qkv", architecture.hidden_size, mixed, gathers=shapes.sequence_parallel
    )
    sizes = architecture.query_size / shapes.tp, architecture.key_value_size / shapes.tp
    if architecture.qk_layernorm:
        for count, saved, channels in ((heads.queries, query, sizes[0]), (heads.groups, key, sizes[1])):
            one = norm_memory(shapes, tokens * count, d, saved, has_kernel=not architecture.wide_qk_norms)
            memory = one._replace(forward=one.forward + source, backward=one.backward + query + key)
            work = norm_work(shapes, tokens * channels, has_kernel=not architecture.wide_qk_norms)
            yield Operator("qk_norm", memory, *work)
    # Queries of several groups are not contiguous: they are copied.
    copied = query if heads.groups > 1 else 0
    # Both passes compute two products and their sum; fused, they read and write once.
    passes = (2, 2, 2) if shapes.performance.apply_rope_fusion else (7, 7, 14)
    rotated = elementwise(shapes, tokens * sum(sizes), *passes)
    yield Operator("rope", Memory(0, source + copied + 2 * query, source + 2 * query), *rotated)
    # Gates are interleaved with queries: backward their gradients are padded with zeros and added.
    passes = (3, 13, 6) if architecture.attention_output_gate else (2, 2, 3)
    yield Operator("split", Memory(0), *elementwise(shapes, tokens * mixed, *passes))


def _latent(shapes: Shapes, heads: Heads) -> Iterator[Operator]:
    """Yield the operators of multi-latent attention up to queries, keys and values. They keep the latents, and the
    queries, keys and values. The time of the norms and adapters of the down projections is left out."""
    architecture, mla, part = shapes.architecture, shapes.architecture.mla, shapes.sp_tokens
    assert mla is not None
    hidden, spread, name = architecture.hidden_size, shapes.sequence_parallel, "self_attention.linear"
    saves_input = {f"{name}_q_proj", f"{name}_q_down_proj", f"{name}_kv_down_proj"} & shapes.keeps
    into_queries, into_others = heads.queries * heads.channels, heads.queries * (mla.qk_head_dim + mla.v_head_dim)

    def normed(rank: int, saved_rank: int) -> Operator:
        return Operator("qkv", norm_memory(shapes, part, rank, part * saved_rank * shapes.itemsize))

    # The input, which both down projections save.
    yield Operator("qkv", Memory(shapes.hidden if saves_input else 0, shapes.hidden))
    if mla.q_lora_rank is not None:
        yield linear(shapes, f"{name}_q_down_proj", "qkv", hidden, mla.q_lora_rank, saved=0, vectors=part)
        yield normed(mla.q_lora_rank, mla.q_lora_rank)
    yield linear(shapes, f"{name}_kv_down_proj", "qkv", hidden, architecture.latent_size, saved=0, vectors=part)
    yield normed(mla.kv_lora_rank, architecture.latent_size)
    if mla.q_lora_rank is None:
        yield linear(shapes, f"{name}_q_proj", "qkv", hidden, into_queries, gathers=spread, saved=0)
    else:
        yield linear(shapes, f"{name}_q_up_proj", "mla_up_proj", mla.q_lora_rank, into_queries, gathers=spread)
    query, others = shapes.tokens * into_queries * shapes.itemsize, shapes.tokens * into_others * shapes.itemsize
    yield Operator("rope", Memory(0, 2 * query, 3 * query))
    yield linear(shapes, f"{name}_kv_up_proj", "mla_up_proj", mla.kv_lora_rank, into_others, gathers=spread)
    # Rotary embedding of some channels, and concatenation of queries and keys.
    joined = elementwise(shapes, shapes.tokens * (2 * architecture.query_size / shapes.tp), 5, 6, 30)
    yield Operator("mla_up_proj", Memory(0, query + others, query + others), *joined)


def core_attention(heads: Heads) -> Iterator[Operator]:
    """Yield attention, the merging of a ring's steps, and a copy of the context if the projection saves one."""
    shapes = heads.shapes
    across = {"all_gather": _all_gather, "a2a": _all_to_all, "p2p": _ring}
    memory, context_copy = (across[shapes.cp_comm_type] if shapes.cp > 1 else _whole_rows)(heads)
    yield _attention(heads, memory)
    if shapes.architecture.attention_sinks and not shapes.engine.runs:
        # Outputs are scaled in fp32; backward the sinks' gradients need their product with the outputs' gradients.
        numbers = shapes.tokens * heads.queries * heads.value_channels
        yield Operator(
            "core_attn", Memory(0), *elementwise(shapes, numbers, *((6, 14, 6) if shapes.fp32_itemsize else (2, 3, 5)))
        )
    if shapes.cp > 1 and shapes.cp_comm_type == "p2p":
        yield _merging(shapes)
    yield Operator("context", Memory(context_copy))


def _attention(heads: Heads, memory: Memory) -> Operator:
    """Return core attention: s · (query + value channels) multiply-adds per token, as half of the scores is masked;
    2.5 times as many backward, with recomputed scores (arXiv:2205.14135). Flash kernels on GPUs skip blocks outside of
    a window; plain products compute and store all scores."""
    shapes, architecture = heads.shapes, heads.shapes.architecture
    tokens, count = shapes.tokens, architecture.num_attention_heads / shapes.tp
    channels = (architecture.query_size + architecture.attention_size) / shapes.tp
    if shapes.performance.attention_backend not in PLAIN_BACKENDS:
        varlen = shapes.varlen or architecture.merges_attention or shapes.kind.window is not None
        attended = shapes.document if shapes.on_cpu else shapes.attended
        name: Literal["rows", "packed"] = "packed" if varlen and not shapes.engine.runs else "rows"
        kernel = (Attention(tokens, attended, count, channels, name),)
        return Operator("core_attn", memory, kernel, kernel, 3)
    scores = tokens * shapes.document * count
    product, moved = (
        Attention(tokens, shapes.document, count, channels, "plain"),
        scores * (4 * shapes.itemsize + 6 * 4),
    )
    return Operator("core_attn", memory, (product, MemoryOp(moved)), (product, MemoryOp(2 * moved)), 12)


def _merging(shapes: Shapes) -> Operator:
    """Return the accumulation in fp32 in a ring's steps: three of four queries take part in a step after the first.

    Forward their outputs are converted to fp32 and merged with those so far (26 bytes per channel), and once before and
    after all steps (12); backward the gradients of queries (10), and of keys and values with copies (16), are added.
    """
    architecture, later = shapes.architecture, 0.75 * (shapes.cp - 1)
    keys_values = keys_values_size(architecture)
    forward = (26 * later + 12) * architecture.attention_size
    backward = (10 * later + 14) * architecture.query_size + 16 * (later + 1) * keys_values
    forward, backward = (shapes.tokens / shapes.tp * data for data in (forward, backward))
    return Operator("core_attn", Memory(0), (MemoryOp(forward),), (MemoryOp(backward),), 20 * (shapes.cp - 1))


def keys_values_size(architecture: Architecture) -> int:
    """Return the channels of all heads' keys and values."""
    if architecture.mla is None:
        return 2 * architecture.key_value_size
    return architecture.query_size + architecture.attention_size


def _whole_rows(heads: Heads) -> tuple[Memory, int]:
    kept = heads.query + heads.key + heads.value + heads.padded + heads.sums
    match heads.shapes.kernel:
        case "plain":
            return _plain(heads, kept), 0
        case "math":
            return _math(heads), 0
        case "padded":
            # It keeps the padded values instead of its input.
            kept = heads.query + heads.key * 2 + heads.padded + heads.sums
            return Memory(kept, heads.value, heads.gradients + heads.query), heads.context_copy
        case "varlen":
            # Sequences are computed separately and concatenated.
            return Memory(kept, heads.padded, heads.gradients + heads.query + 2 * heads.key), heads.context_copy
    return Memory(kept, 0, heads.gradients), 0


def _plain(heads: Heads, kept: int) -> Memory:
    """Matrix products hold the fp32 scores of a document three times forward, five times backward."""
    shapes, document = heads.shapes, heads.shapes.document_tokens
    rows = shapes.rows if document == shapes.length else 1
    scores = 4 * rows * heads.queries * document**2
    copies = (heads.gradients * 4 // shapes.itemsize) if shapes.fp32_itemsize else 0
    return Memory(kept, 3 * scores + copies, heads.gradients + heads.context + copies + 5 * scores)


def _math(heads: Heads) -> Memory:
    """torch's fallback keeps all scores, and queries, keys and values for each query head, in fp32."""
    shapes = heads.shapes
    scores = 4 * shapes.rows * heads.queries * shapes.length**2
    repeated = 4 * shapes.tokens * heads.queries * (2 * heads.channels + heads.value_channels)
    kept = repeated + scores + heads.context
    return Memory(kept, 2 * scores, heads.gradients + repeated + 2 * scores)


def _all_gather(heads: Heads) -> tuple[Memory, int]:
    """Keys and values of all ranks are kept in the order of the row, the first ones twice: (2 · cp + 1) / 2 times those
    of this rank. A CPU's flash kernel needs a mask."""
    shapes = heads.shapes
    mine = heads.key + heads.value
    whole = mine * (2 * shapes.cp + 1) // 2
    masked = shapes.on_cpu and shapes.kernel == "varlen"
    mask = shapes.itemsize * shapes.document_tokens**2 // (2 * shapes.cp) if masked else 0
    kept = heads.query + whole + heads.padded + heads.sums
    backward = heads.context + heads.query + 2 * whole + mine * shapes.cp + mask
    return Memory(kept, mine * shapes.cp + mask, backward), heads.context_copy


def _ring(heads: Heads) -> tuple[Memory, int]:
    """Two pairs of keys and values are in messages, and in the backward pass also their fp32 gradients."""
    moving = heads.key + heads.value
    wide = moving * 4 // heads.shapes.itemsize
    # 16-bit outputs are merged in fp32 and rounded into a new tensor.
    output, copy = (heads.context, 0) if heads.shapes.fp32_itemsize else (heads.padded, heads.context_copy)
    kept = heads.query + heads.key + heads.value + output + heads.sums
    return Memory(kept, 2 * (moving + heads.context), heads.gradients + 2 * moving + 3 * wide), copy


def _all_to_all(heads: Heads) -> tuple[Memory, int]:
    """Whole rows of n / cp heads; key/value heads are repeated first if ranks cannot share them evenly. The context is
    a new tensor."""
    shapes = heads.shapes
    copies = math.lcm(heads.groups, shapes.cp) // heads.groups
    rows = heads.query + copies * (heads.key + heads.value)
    # Padded values are new tensors, not part of the rows.
    filled = copies * heads.key if shapes.kernel == "padded" else 0
    kept = rows + filled + heads.padded + heads.sums
    return Memory(kept, 2 * rows, 3 * rows + heads.context), heads.context
