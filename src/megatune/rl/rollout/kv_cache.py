"""A cache of keys and values with one row a response, and the attention that reads it.

Responses in flight fill the first rows, so that a step computes no others. Legend: n rows, H heads, K heads of keys
and values, q new tokens of a row, l tokens of the cache, d size of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ATTENTION = "megatune_slots"
_GRAIN = 64  # tokens that the cache grows by


@dataclass(frozen=True, slots=True)
class Prompts:
    """New rows, filled from their first token on; nothing but each prompt itself is seen.

    Attributes:
        rows: int64 [n]; tokens behind a shorter prompt are computed and never read.
    """

    rows: Tensor


@dataclass(frozen=True, slots=True)
class Next:
    """One more token of each of the first n rows.

    Attributes:
        index: int64 [n], 0 to n - 1.
        positions: int64 [n], of the token in its row.
        length: l, the longest row with its new token.
        mask: [n, 1, 1, l], 0 or -inf, of the model's dtype; None where all rows are of one length.
    """

    index: Tensor
    positions: Tensor
    length: int
    mask: Tensor | None


class KVCache(Cache):
    """Keys and values [rows, K, tokens, d] of each layer; grows as it is needed.

    `plan` says which rows and places a forward pass writes and reads.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.plan: Prompts | Next | None = None
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}
        self._rows, self._tokens = 0, 0

    def reserve(self, rows: int, tokens: int, most_rows: int) -> None:
        """Make room, and keep what is there; rows for more than asked, up to `most_rows`, since they come by and by."""
        if rows <= self._rows and tokens <= self._tokens:
            return
        if rows > self._rows:
            self._rows = max(rows, min(self._rows * 3 // 2, most_rows))
        self._tokens = max(self._tokens, -(-tokens // _GRAIN) * _GRAIN)
        for layer, pair in self._pairs.items():
            self._pairs[layer] = (self._grown(pair[0]), self._grown(pair[1]))

    def clear(self) -> None:
        """Free the memory."""
        self._pairs.clear()
        self._rows, self._tokens = 0, 0

    @property
    def bytes_of_a_token(self) -> int:
        """Bytes of one token of a row, in all layers that have been computed."""
        tensors = (tensor for pair in self._pairs.values() for tensor in pair)
        return sum(tensor.shape[1] * tensor.shape[3] * tensor.element_size() for tensor in tensors)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first tokens of a row to another."""
        for pair in self._pairs.values():
            for tensor in pair:
                tensor[target, :, :length] = tensor[source, :, :length]

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values [n, K, q, d] of a layer, and return what the queries see."""
        if layer_idx not in self._pairs:
            self._pairs[layer_idx] = self._empty(key), self._empty(value)
        keys, values = self._pairs[layer_idx]
        plan = self.plan
        if isinstance(plan, Prompts):
            keys[plan.rows, :, : key.shape[2]] = key
            values[plan.rows, :, : value.shape[2]] = value
            return key, value
        assert plan is not None
        keys[plan.index, :, plan.positions] = key[:, :, 0]
        values[plan.index, :, plan.positions] = value[:, :, 0]
        count = len(plan.index)
        return keys[:count, :, : plan.length], values[:count, :, : plan.length]

    def _empty(self, like: Tensor) -> Tensor:
        return like.new_zeros(self._rows, like.shape[1], self._tokens, like.shape[3])

    def _grown(self, old: Tensor) -> Tensor:
        new = self._empty(old)
        new[: old.shape[0], :, : old.shape[2]] = old
        return new


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend as a model of Transformers asks for it; returns [n, q, H, d of values].

    A prompt attends to itself. One new token attends to its row with the heads that share keys as its queries, so that
    keys are not repeated.
    """
    plan: Prompts | Next = options.pop("slots")
    if isinstance(plan, Prompts):
        return sdpa_attention_forward(module, query, key, value, None, **{**options, "is_causal": True})
    rows, heads, _, size = query.shape
    grouped = query.view(rows, key.shape[1], heads // key.shape[1], size)
    seen = scaled_dot_product_attention(grouped, key, value, plan.mask, scale=options.get("scaling"))
    return seen.reshape(rows, 1, heads, value.shape[3]), None


AttentionInterface.register(ATTENTION, attend)


def next_plan(lengths: Sequence[int], dtype: torch.dtype, device: torch.device) -> Next:
    """Return the plan of one more token for rows that have so many."""
    positions = torch.tensor(lengths, device=device)
    longest, mask = max(lengths) + 1, None
    if min(lengths) + 1 < longest:
        hidden = torch.arange(longest, device=device) > positions[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)[:, None, None]
    return Next(torch.arange(len(lengths), device=device), positions, longest, mask)
