"""Core attention: replaces Megatron-Core's DotProductAttention, on one rank and across context-parallel ranks.

Legend: s tokens of a whole row, cp context-parallel ranks, b rows, n query heads and g key/value heads of this rank, d
channels of queries and keys, e channels of values.

Every variant computes [s, b, n, e] from query [s, b, n, d], key [s, b, g, d] and value [s, b, g, e], with s / cp tokens
per rank if there is a context-parallel group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import P2POp, batch_isend_irecv, irecv, isend
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from megatune.config.kernels import PLAIN_BACKENDS, attention_kernels
from megatune.engine import device
from megatune.engine.layers.attention.kernels import (
    Kernel,
    add_sinks,
    attend,
    attend_with_images,
    equal_channels,
    merge,
    pick,
    sinks_gradient,
)
from megatune.engine.layers.attention.spans import RingStep, causal_spans, gather_order, later_tokens, prefixes, ring
from megatune.engine.sequences import Runs, Sequences

Group: TypeAlias = torch.distributed.ProcessGroup
Steps: TypeAlias = Sequence[RingStep]

# Tags, by which gloo distinguishes messages between the same two ranks.
_KEYS, _GRADIENTS = 1, 2

_SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class Attention(NamedTuple):
    """How the tokens of whole rows attend to each other: causally within each sequence.

    Attributes:
        boundaries: of the sequences in a row.
        scale: multiplies the scores.
        backend: the kernels that may be used.
        window: the largest number of keys that a query sees, counted back from its own; None for all.
        sinks: [n], the scores of the heads' attention sinks, see `kernels.add_sinks`; None without sinks.
        media: runs of image tokens, which also see their whole run.
    """

    boundaries: tuple[int, ...]
    scale: float
    backend: AttnBackend
    window: int | None = None
    sinks: Tensor | None = None
    media: Runs = ()


def attend_rows(query: Tensor, key: Tensor, value: Tensor, how: Attention) -> Tensor:
    """Attend in whole rows, with the fastest kernel that the backend allows."""
    spans, scale, backend, sinks = causal_spans(how.boundaries, how.window), how.scale, how.backend, how.sinks
    if (later := later_tokens(how.media, query.shape[1], len(query))) is not None:
        assert sinks is None, "no family has both"
        return attend_with_images(query, key, value, spans, later, scale, backend)
    if spans.is_one_square and backend.name not in PLAIN_BACKENDS and sinks is None:
        return _one_document(query, key, value, scale, backend)
    output = attend(query.flatten(1, 2), key.flatten(1, 2), value.flatten(1, 2), spans, scale, backend, sinks)
    return output.unflatten(1, query.shape[1:3])


def _one_document(query: Tensor, key: Tensor, value: Tensor, scale: float, backend: AttnBackend) -> Tensor:
    """Attend with torch SDPA, which supports cuDNN, too: the fastest choice for rows of one sequence."""
    channels, grouped, dtype = value.shape[-1], key.shape[2] != query.shape[2], str(query.dtype).removeprefix("torch.")
    kernels = attention_kernels(
        device.compute_capability(), backend.name, dtype, max(query.shape[-1], channels), varlen=False, grouped=grouped
    )
    if kernels[0] == "flash":
        query, key, value = equal_channels(query, key, value)
    query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
    with sdpa_kernel([_SDPA[kernel] for kernel in kernels], set_priority=True):
        output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    return output.permute(2, 0, 1, 3)[..., :channels]


def attend_all_gather(query: Tensor, key: Tensor, value: Tensor, how: Attention, group: Group) -> Tensor:
    """Gather all keys and values first; the backward pass reduce-scatters their gradients."""
    order, spans = prefixes(how.boundaries, group.rank(), group.size(), how.window)
    both = torch.cat((key.flatten(1, 2), value.flatten(1, 2)), -1)
    whole = gather_from_sequence_parallel_region(both, group=group).index_select(0, order)
    keys, values = whole.split((key.shape[-1], value.shape[-1]), -1)
    output = attend(query.flatten(1, 2), keys, values, spans, how.scale, how.backend, how.sinks)
    return output.unflatten(1, query.shape[1:3])


def attend_all_to_all(query: Tensor, key: Tensor, value: Tensor, how: Attention, group: Group) -> Tensor:
    """Exchange sequence for heads (DeepSpeed-Ulysses, arXiv:2309.14509): attention on whole rows of n / cp heads,
    between two all-to-alls; n is a multiple of cp."""
    cp_size = group.size()
    to_row, _ = gather_order(how.boundaries, cp_size)
    # Key/value heads that cannot be split evenly over ranks are copied; autograd sums the gradients of the copies.
    copies = math.lcm(key.shape[2], cp_size) // key.shape[2]
    if copies > 1:
        key, value = key.repeat_interleave(copies, 2), value.repeat_interleave(copies, 2)
    # One all-to-all: for each rank its heads of all three tensors, [cp, s / cp, b, channels].
    shares = [tensor.unflatten(2, (cp_size, -1)).movedim(2, 0) for tensor in (query, key, value)]
    sent = torch.cat([share.flatten(3) for share in shares], -1)
    rows = all_to_all(group, sent).flatten(0, 1).index_select(0, to_row)
    parts = rows.split([share[0, 0, 0].numel() for share in shares], -1)
    heads = [part.unflatten(2, share.shape[3:]) for part, share in zip(parts, shares, strict=True)]
    sinks = None if how.sinks is None else how.sinks.chunk(cp_size)[group.rank()]
    output = attend_rows(heads[0], heads[1], heads[2], how._replace(sinks=sinks))
    return back_to_tokens(output, how.boundaries, group)


def back_to_tokens(rows: Tensor, boundaries: tuple[int, ...], group: Group) -> Tensor:
    """Exchange heads for sequence: from whole rows of a rank's heads, [s, b, n / cp, ...], to its tokens of all heads,
    [s / cp, b, n, ...]."""
    _, from_row = gather_order(boundaries, group.size())
    back = rows.index_select(0, from_row).unflatten(0, (group.size(), -1))
    return all_to_all(group, back).movedim(0, 2).flatten(2, 3)


def attend_ring(query: Tensor, key: Tensor, value: Tensor, how: Attention, group: Group) -> Tensor:
    """Send keys and values around a ring while computing (Ring Attention, arXiv:2310.01889).

    After k steps a rank holds the keys and values of the rank k positions before it. Results for different keys are
    merged by their log-sum-exps; the backward pass sends keys and values around again, followed by their gradients.
    """
    steps = ring(how.boundaries, group.size())
    sinks = None if how.sinks is None else how.sinks.repeat(query.shape[1])
    arguments = (sinks, steps, how.scale, pick(query, value, how.backend), group)
    output = _RingAttention.apply(query.flatten(1, 2), key.flatten(1, 2), value.flatten(1, 2), *arguments)
    return output.unflatten(1, query.shape[1:3])


class _RingAttention(torch.autograd.Function):
    """From query [t, n, d], key [t, g, d], value [t, g, e] and sinks [n] to [t, n, e]: t = s / cp tokens of a rank,
    with rows folded into the heads."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        steps: Steps,
        scale: float,
        kernel: Kernel,
        group: Group,
    ) -> Tensor:
        channels = key.shape[-1], value.shape[-1]
        output, lse = query.new_empty(0), query.new_empty(0)
        for here, (query_index, key_index, spans) in _around(torch.cat((key, value), -1), steps, group):
            keys, values = here.split(channels, -1)
            found, found_lse = kernel.forward(query[query_index], keys[key_index], values[key_index], spans, scale)
            if not len(output):  # the first step
                output, lse = found.to(found_lse.dtype), found_lse
            else:
                merged = merge(output[query_index], lse[:, query_index], found, found_lse)
                output[query_index], lse[:, query_index] = merged
        output, lse = add_sinks(output, lse, sinks)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, lse, sinks)
        ctx.arguments = steps, scale, kernel, group
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse, sinks = ctx.saved_tensors
        steps, scale, kernel, group = ctx.arguments
        channels = key.shape[-1], value.shape[-1]
        grad_query = torch.zeros_like(query, dtype=lse.dtype)
        passing: _Passing | None = None
        for here, (query_index, key_index, spans) in _around(torch.cat((key, value), -1), steps, group):
            keys, values = here.split(channels, -1)
            saved = query[query_index], keys[key_index], values[key_index], output[query_index], lse[:, query_index]
            grad_run, *grad_keys = kernel.backward(grad_output[query_index], saved, spans, scale)
            grad_query[query_index] += grad_run
            # The earlier ranks' gradients of these keys, which were received while this rank computed.
            gradients = passing.wait() if passing else torch.zeros_like(here, dtype=lse.dtype)
            gradients[key_index] += torch.cat(grad_keys, -1)
            passing = _Passing(gradients, group, _GRADIENTS)
        assert passing is not None  # a ring has at least one rank
        grad_key, grad_value = passing.wait().to(key.dtype).split(channels, -1)
        grad_sinks = sinks_gradient(grad_output, output, lse, sinks)
        return grad_query.to(query.dtype), grad_key, grad_value, grad_sinks, None, None, None, None


def _around(here: Tensor, steps: Steps, group: Group) -> Iterator[tuple[Tensor, RingStep]]:
    """Yield this rank's keys and values at each step, and their spans, while the next ones are received."""
    for step in range(group.size()):
        arriving = _Passing(here, group, _KEYS) if step + 1 < group.size() else None
        yield here, steps[0 if step == 0 else 1 if step <= group.rank() else 2]
        if arriving is not None:
            here = arriving.wait()


class _Passing:
    """A tensor being sent to the next rank of the ring, while one of the same shape is received from the previous rank.

    It must not change until `wait`.
    """

    def __init__(self, tensor: Tensor, group: Group, tag: int) -> None:
        ranks = torch.distributed.get_process_group_ranks(group)
        after, before = ranks[(group.rank() + 1) % group.size()], ranks[group.rank() - 1]
        self._sent, self._received = tensor, torch.empty_like(tensor)
        self._works = batch_isend_irecv(
            [P2POp(isend, self._sent, after, group, tag), P2POp(irecv, self._received, before, group, tag)]
        )

    def wait(self) -> Tensor:
        """Return the received tensor."""
        for work in self._works:
            work.wait()
        return self._received


_ACROSS_RANKS: dict[str, Callable[..., Tensor]] = {
    "all_gather": attend_all_gather,
    "a2a": attend_all_to_all,
    "p2p": attend_ring,
}


class CoreAttention(torch.nn.Module):
    """Causal attention within each sequence, for the query, key and value shards of tensor parallelism.

    Megatron-Core's own, without Transformer Engine, stores all s × s scores, repeats key/value heads in memory, and
    supports neither packed rows nor context parallelism.

    A layer with a sliding window gathers keys and values if others use ring attention, whose steps have no positions.

    Args:
        softmax_scale: multiplies the scores; None means 1 / √d.
        cp_comm_type: how context-parallel ranks attend to each other's tokens.

    Attributes:
        softmax_offset: the sink scores of this rank's heads, [n]; None without sinks.
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
        self.window: int | None = config.windows[layer_number - 1]
        if self.window is not None and cp_comm_type == "p2p":
            cp_comm_type = "all_gather"
        self.bidirectional_images: bool = config.bidirectional_images and (
            self.window is not None or not config.whole_in_windows
        )
        self.cp_comm_type = cp_comm_type if config.context_parallel_size > 1 else None
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            sinks = torch.empty(heads, dtype=config.params_dtype, device=torch.cuda.current_device())
            self.softmax_offset = torch.nn.Parameter(sinks)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, packed_seq_params: Sequences) -> Tensor:
        """Attend, for the tokens of `engine.sequences.local_batch`, to [s / cp, b, n · e] in the dtype of `query`.

        Padding is at the end of its sequence, so no real token sees it and no mask is needed.
        """
        scale = self.softmax_scale or 1 / math.sqrt(query.shape[-1])
        media = packed_seq_params.media if self.bidirectional_images else ()
        how = Attention(packed_seq_params.boundaries, scale, self.backend, self.window, self.softmax_offset, media)
        if self.cp_comm_type is None:
            return attend_rows(query, key, value, how).flatten(2)
        assert not how.media or self.cp_comm_type == "a2a", "the settings' rules require whole rows for images"
        across, group = _ACROSS_RANKS[self.cp_comm_type], parallel_state.get_context_parallel_group()
        return across(query, key, value, how, group).flatten(2)
