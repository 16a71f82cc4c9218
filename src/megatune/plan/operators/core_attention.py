"""Core attention: what each kernel keeps and computes, on one rank and across context-parallel ranks.

Every kernel keeps queries, keys, values, its output, and for each query and head the logarithm of the sum of its
scores' exponentials in fp32 (FlashAttention-2, arXiv:2307.08691); none keeps scores, but torch's own matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatune.architecture import Architecture
from megatune.plan.operators.operator import Attention, Memory, Moved, Operator
from megatune.plan.operators.shapes import Shapes


@dataclass(frozen=True, slots=True)
class Heads:
    """Queries, keys and values of one rank; `query`, `key`, `value` and `context` (the output) are their bytes.

    Attributes:
        queries, groups: heads of queries, and of keys and values.
        channels, value_channels: of a query's and key's head, and of a value's.
    """

    shapes: Shapes
    queries: int
    groups: int
    channels: int
    value_channels: int

    @property
    def query(self) -> int:
        return self.shapes.tokens * self.queries * self.channels * self.shapes.size

    @property
    def key(self) -> int:
        return self.shapes.tokens * self.groups * self.channels * self.shapes.size

    @property
    def value(self) -> int:
        return self.shapes.tokens * self.groups * self.value_channels * self.shapes.size

    @property
    def context(self) -> int:
        return self.shapes.tokens * self.queries * self.value_channels * self.shapes.size

    @property
    def padded(self) -> int:
        """Bytes of the output, where a flash kernel fills values up to as many channels as queries have."""
        flash = self.shapes.kernel in ("padded", "runs")
        return self.query if flash and self.channels != self.value_channels else self.context

    @property
    def context_copy(self) -> int:
        """Bytes of the context that the output projection saves beside the output that attention keeps."""
        return self.context if self.padded != self.context else 0

    @property
    def sums(self) -> int:
        """Bytes of the log-sum-exps."""
        return 4 * self.shapes.tokens * self.queries

    @property
    def gradients(self) -> int:
        """Bytes of the gradients of output, queries, keys and values."""
        return self.context + self.query + self.key + self.value


def core_attention(heads: Heads) -> Iterator[Operator]:
    """Attention, the merging of a ring's turns, and the context where its consumer saves it in memory of its own."""
    shapes = heads.shapes
    across = {"all_gather": _all_gather, "a2a": _all_to_all, "p2p": _ring}
    memory, context_copy = (across[shapes.cp_comm_type] if shapes.cp > 1 else _whole_rows)(heads)
    yield _attention(heads, memory)
    if shapes.cp > 1 and shapes.cp_comm_type == "p2p":
        yield _merging(shapes)
    yield Operator("context", Memory(context_copy))


def _attention(heads: Heads, memory: Memory) -> Operator:
    """s · (query + value channels) multiply-adds a token, as half of the scores is masked; backward 2.5 times as many,
    for scores are computed again (arXiv:2205.14135). Plain products compute and move all scores."""
    shapes, architecture = heads.shapes, heads.shapes.architecture
    sizes = shapes.tokens, shapes.document, architecture.num_attention_heads / shapes.tp
    channels = (architecture.query_size + architecture.attention_size) / shapes.tp
    if not shapes.unfused:
        kernel = (Attention(*sizes, channels, "packed" if shapes.in_runs else "rows"),)
        return Operator("core_attn", memory, kernel, kernel, 3)
    scores = math.prod(sizes)
    product, moved = Attention(*sizes, channels, "plain"), scores * (4 * shapes.size + 6 * 4)
    return Operator("core_attn", memory, (product, Moved(moved)), (product, Moved(2 * moved)), 12)


def _merging(shapes: Shapes) -> Operator:
    """Return what the turns of a ring add up in fp32: three of four queries take part in a turn after the first.

    Forward their outputs are widened and interpolated with those so far (26 bytes a channel), before and after all
    turns once more (12); backward gradients of queries (10), and of keys and values with their copies (16), are added.
    """
    architecture, later = shapes.architecture, 0.75 * (shapes.cp - 1)
    keys_values = keys_values_size(architecture)
    forward = (26 * later + 12) * architecture.attention_size
    backward = (10 * later + 14) * architecture.query_size + 16 * (later + 1) * keys_values
    forward, backward = (shapes.tokens / shapes.tp * data for data in (forward, backward))
    return Operator("core_attn", Memory(0), (Moved(forward),), (Moved(backward),), 20 * (shapes.cp - 1))


def keys_values_size(architecture: Architecture) -> int:
    """Channels of all heads' keys and values."""
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
            # It keeps the values that were filled up, not those it was given.
            kept = heads.query + heads.key * 2 + heads.padded + heads.sums
            return Memory(kept, heads.value, heads.gradients + heads.query), heads.context_copy
        case "runs":
            # Runs are computed apart and joined.
            return Memory(kept, heads.padded, heads.gradients + heads.query + 2 * heads.key), heads.context_copy
    return Memory(kept, 0, heads.gradients), 0


def _plain(heads: Heads, kept: int) -> Memory:
    """Matrix products with the scores of a document in fp32: three of their size forward, five backward."""
    shapes, document = heads.shapes, heads.shapes.document_tokens
    rows = shapes.rows if document == shapes.length else 1
    scores = 4 * rows * heads.queries * document**2
    copies = (heads.gradients * 4 // shapes.size) if shapes.wide else 0
    return Memory(kept, 3 * scores + copies, heads.gradients + heads.context + copies + 5 * scores)


def _math(heads: Heads) -> Memory:
    """torch's fallback keeps all scores, and queries, keys and values of each query head, in fp32."""
    shapes = heads.shapes
    scores = 4 * shapes.rows * heads.queries * shapes.length**2
    repeated = 4 * shapes.tokens * heads.queries * (2 * heads.channels + heads.value_channels)
    kept = repeated + scores + heads.context
    return Memory(kept, 2 * scores, heads.gradients + repeated + 2 * scores)


def _all_gather(heads: Heads) -> tuple[Memory, int]:
    """Keys and values of all ranks are kept in the order of the row, the early ones twice: (2 · cp + 1) / 2 times this
    rank's. A CPU's flash kernel takes a mask of which of them a query sees."""
    shapes = heads.shapes
    mine = heads.key + heads.value
    whole = mine * (2 * shapes.cp + 1) // 2
    mask = (
        shapes.size * shapes.document_tokens**2 // (2 * shapes.cp) if shapes.on_cpu and shapes.kernel == "runs" else 0
    )
    kept = heads.query + whole + heads.padded + heads.sums
    backward = heads.context + heads.query + 2 * whole + mine * shapes.cp + mask
    return Memory(kept, mine * shapes.cp + mask, backward), heads.context_copy


def _ring(heads: Heads) -> tuple[Memory, int]:
    """Return two pairs of keys and values in messages, and in the backward pass their gradients in fp32, too."""
    moving = heads.key + heads.value
    wide = moving * 4 // heads.shapes.size
    # 16-bit outputs are merged in fp32, and rounded into memory of their own.
    output, copy = (heads.context, 0) if heads.shapes.wide else (heads.padded, heads.context_copy)
    kept = heads.query + heads.key + heads.value + output + heads.sums
    return Memory(kept, 2 * (moving + heads.context), heads.gradients + 2 * moving + 3 * wide), copy


def _all_to_all(heads: Heads) -> tuple[Memory, int]:
    """Whole rows of n / cp heads; key/value heads that ranks cannot share equally are copied first. The context returns
    in memory of its own."""
    shapes = heads.shapes
    copies = math.lcm(heads.groups, shapes.cp) // heads.groups
    rows = heads.query + copies * (heads.key + heads.value)
    # Values that a kernel fills up are no longer a part of the rows.
    filled = copies * heads.key if shapes.kernel == "padded" else 0
    kept = rows + filled + heads.padded + heads.sums
    return Memory(kept, 2 * rows, 3 * rows + heads.context), heads.context
