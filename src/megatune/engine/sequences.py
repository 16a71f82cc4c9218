"""Which tokens of a micro-batch this rank holds, and which sequence each belongs to.

A row is one sequence, or several packed sequences. Context parallelism cuts every sequence into 2 · cp equal parts and
gives rank r the parts r and 2 · cp - 1 - r: under the causal mask early tokens cost less than late ones, so this
balances the ranks.

Legend: b rows, s tokens of a whole row, cp context-parallel ranks; a rank holds s / cp tokens of each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor

from megatune.engine.device import current, send

# Extra of tokens, int16 [b, s, layers, k]: the experts that the rollout engine chose in every layer of the decoder,
# each index + 1; 0 where the router chooses itself. Layers without experts have an entry, too.
ROUTING = "routing"
# Extra of tokens, int64 [b, s], from `engine.layers.noise.noise_keys`: their word embeddings get noise.
NOISE = "noise"


# Runs of tokens: start and end of each in the flattened rows, [b · s].
Runs: TypeAlias = tuple[tuple[int, int], ...]


class Extra(Protocol):
    """Data of a micro-batch besides its tokens: images, rewards, log-probabilities of a reference model."""

    def on_rank(self, tokens: Tensor | None, device: torch.device) -> Any:
        """Return this rank's part of it, on the device.

        Args:
            tokens: int64 [s / cp], indices of this context-parallel rank's tokens in the whole row; None without
                context parallelism.
        """
        ...


class BatchMedia(Protocol):
    """The images and videos of one micro-batch, see `data.batches.BatchMedia`, in the order of their tokens."""

    @property
    def pixel_values(self) -> Tensor: ...
    @property
    def grids(self) -> Tensor: ...
    @property
    def owners(self) -> Tensor: ...
    @property
    def places(self) -> Tensor: ...
    @property
    def rotary_position_ids(self) -> Tensor: ...


class MicroBatch(Protocol):
    """Token rows of one micro-batch, see `data.batches.Batch`. `labels` are shifted: labels[:, t] is predicted at t.
    `extras` pass data to the objective; `media` is None for text alone."""

    @property
    def input_ids(self) -> Tensor: ...
    @property
    def labels(self) -> Tensor: ...
    @property
    def position_ids(self) -> Tensor: ...
    @property
    def lengths(self) -> tuple[int, ...]: ...
    @property
    def cu_seqlens(self) -> Tensor | None: ...
    @property
    def extras(self) -> Mapping[str, Extra]: ...
    @property
    def media(self) -> BatchMedia | None: ...


@dataclass(kw_only=True)
class Sequences(PackedSeqParams):
    """The metadata of a micro-batch that every layer gets as Megatron-Core's `packed_seq_params`.

    Attributes:
        boundaries: where sequences begin in a whole row, and s at the end. Without packing (0, s), for every row.
        position_ids: int64 [s / cp], of this rank's tokens in their sequences; the same for all rows.
        lengths: int64 [b, 1], or packed [1, s / cp]: the length of each token's sequence, without padding.
        is_padding: bool [b, s / cp].
        normalizer: int64 [], what the whole micro-batch adds to the divisor of the loss.
        trained: int64 [n], indices of this rank's trained tokens in its flattened rows. Computed on the host: on a GPU
            their number would only be known after a synchronization.
        rotary_position_ids: int64 [3, b, s / cp], of time, height and width, if rows hold images; None if all three
            are the token's position in its sequence.
        routing: [b, s / cp, layers, k], see ROUTING; None if all routers choose themselves.
        noise: int64 [b, s / cp], see NOISE; None without noise.
        media: runs of adjacent image tokens, in whole rows.
    """

    boundaries: tuple[int, ...]
    position_ids: Tensor
    lengths: Tensor
    is_padding: Tensor
    normalizer: Tensor
    trained: Tensor
    rotary_position_ids: Tensor | None = None
    routing: Tensor | None = None
    noise: Tensor | None = None
    media: Runs = ()

    def __post_init__(self) -> None:
        # Rows stay [s, b, ...] inside Megatron-Core's layers; its packed format ("thd") would drop a dimension.
        self.qkv_format = "sbhd"

    @property
    def is_packed(self) -> bool:
        """Whether a row has several sequences; then there is only one row."""
        return len(self.boundaries) > 2

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of a whole row, including padding."""
        return max(stop - start for start, stop in pairwise(self.boundaries))

    @property
    def local_lengths(self) -> list[int]:
        """This rank's number of tokens of each sequence of a packed row; the same share of every sequence."""
        cp_size = self.boundaries[-1] // self.is_padding.shape[1]
        return [(stop - start) // cp_size for start, stop in pairwise(self.boundaries)]


class MTPTargets(NamedTuple):
    """Tokens and labels shifted by one further token, on the device; 0 and -100 after the end of a sequence.

    Attributes:
        input_ids, labels: int64 [b, s / cp].
        trained: int64 [n], indices of the trained tokens in the flattened labels.
    """

    input_ids: Tensor
    labels: Tensor
    trained: Tensor


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """This context-parallel rank's part of a micro-batch, on the device.

    Attributes:
        input_ids, labels: int64 [b, s / cp].
        extras: the results of `Extra.on_rank`.
        media: those of the whole micro-batch, on the host; the vision encoder takes its share of them.
        mtp_targets: None for a model without multi-token prediction.
    """

    input_ids: Tensor
    labels: Tensor
    sequences: Sequences
    extras: Mapping[str, Any]
    media: BatchMedia | None
    mtp_targets: MTPTargets | None = None


def local_tokens(boundaries: Sequence[int], cp_rank: int, cp_size: int) -> Tensor:
    """Return which tokens of the whole row a context-parallel rank holds, in the rank's order: int64 [s / cp]."""
    if cp_size == 1:
        return torch.arange(boundaries[-1])
    parts = []
    for start, stop in pairwise(boundaries):
        size, rest = divmod(stop - start, 2 * cp_size)
        assert not rest, f"a sequence of {stop - start} tokens cannot be cut into {2 * cp_size} equal parts"
        firsts = (start + part * size for part in (cp_rank, 2 * cp_size - 1 - cp_rank))
        parts += [torch.arange(first, first + size) for first in firsts]
    return torch.cat(parts)


def local_batch(batch: MicroBatch, normalizer: Tensor | None = None, *, with_mtp: bool = False) -> LocalBatch:
    """Copy this rank's part of a micro-batch, which every rank holds as a whole, to the device.

    Args:
        normalizer: see Sequences; None counts the trained tokens.
        with_mtp: also return `mtp_targets`.
    """
    s = batch.input_ids.shape[1]
    boundaries = (0, s) if batch.cu_seqlens is None else tuple(batch.cu_seqlens.tolist())
    rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    tokens = None if size == 1 else local_tokens(boundaries, rank, size)
    lengths = torch.tensor(batch.lengths)
    spans = None if batch.cu_seqlens is None else torch.diff(batch.cu_seqlens.long())
    lengths = lengths[:, None] if spans is None else lengths.repeat_interleave(spans)

    def of_this_rank(rows: Tensor) -> Tensor:
        return rows if tokens is None else rows[..., tokens]

    def to_device(rows: Tensor) -> Tensor:
        return send(of_this_rank(rows))

    extras = {name: extra.on_rank(tokens, current()) for name, extra in batch.extras.items()}
    media = batch.media
    if normalizer is None:
        normalizer = (batch.labels >= 0).sum()
    sequences = Sequences(
        boundaries=boundaries,
        position_ids=to_device(batch.position_ids[0]),
        lengths=send(lengths) if spans is None else to_device(lengths)[None],
        is_padding=to_device(batch.position_ids >= lengths),
        normalizer=send(normalizer),
        trained=send((of_this_rank(batch.labels).reshape(-1) >= 0).nonzero()[:, 0]),
        rotary_position_ids=None if media is None else to_device(media.rotary_position_ids),
        routing=extras.pop(ROUTING, None),
        noise=extras.pop(NOISE, None),
        media=() if media is None else media_runs(media.places, boundaries),
    )
    mtp_targets = None
    if with_mtp:
        tokens_after, labels_after = (_shifted(each, boundaries) for each in (batch.input_ids, batch.labels))
        places = (of_this_rank(labels_after).reshape(-1) >= 0).nonzero()[:, 0]
        mtp_targets = MTPTargets(to_device(tokens_after.clamp(min=0)), to_device(labels_after), send(places))
    return LocalBatch(to_device(batch.input_ids), to_device(batch.labels), sequences, extras, media, mtp_targets)


def _shifted(rows: Tensor, boundaries: Sequence[int]) -> Tensor:
    """Shift whole rows, int64 [b, s], left by one token within their sequences; the last tokens become -100."""
    shifted = rows.roll(-1, 1)
    shifted[:, torch.tensor(boundaries[1:]) - 1] = -100
    return shifted


def media_runs(places: Tensor, boundaries: Sequence[int]) -> Runs:
    """Return the runs of adjacent tokens in `places`, int64 [tokens], sorted; a run ends with its sequence or row."""
    row, token = places // boundaries[-1], places % boundaries[-1]
    sequence = torch.bucketize(token, torch.tensor(boundaries), right=True) + row * len(boundaries)
    ends = ((places.diff() != 1) | (sequence.diff() != 0)).nonzero()[:, 0] + 1
    edges = [0, *ends.tolist(), len(places)]
    return tuple((int(places[start]), int(places[stop - 1]) + 1) for start, stop in pairwise(edges) if stop > start)


def sequence_sums(values: Tensor, sequences: Sequences) -> Tensor:
    """Sum values over the tokens of each sequence; the result is equal on all context-parallel ranks.

    The backward pass gives each rank's tokens the gradient that the rank computed, without summing over ranks, because
    all compute the same loss from the same sums (torch.distributed.nn.all_reduce would multiply gradients by cp).

    Args:
        values: [b, s / cp, ...].

    Returns:
        [D, ...]: one for each row, or for each sequence of the packed row, padding at its end included.
    """
    if sequences.is_packed:
        lengths = send(torch.tensor(sequences.local_lengths))
        # unsafe=True skips a check that would synchronize with the device.
        sums = torch.segment_reduce(values[0], "sum", lengths=lengths, unsafe=True)
    else:
        sums = values.sum(1)
    if parallel_state.get_context_parallel_world_size() == 1:
        return sums
    return reduce_from_tensor_model_parallel_region(sums, group=parallel_state.get_context_parallel_group())


def expand_to_tokens(values: Tensor, sequences: Sequences) -> Tensor:
    """Expand values of sequences, [D], to each of this rank's tokens: [b, s / cp]."""
    if not sequences.is_packed:
        return values[:, None].expand_as(sequences.is_padding)
    lengths = send(torch.tensor(sequences.local_lengths))
    return values.repeat_interleave(lengths, output_size=sequences.is_padding.shape[1])[None]


def sequence_totals(values: Tensor, sequences: Sequences) -> Tensor:
    """Return for each token the sum over its whole sequence, across context-parallel ranks: fp64 [b, s / cp].

    Every rank may use it in the loss of its own tokens: the backward pass sums gradients over ranks, too.

    Args:
        values: [b, s / cp], summed in fp64.
    """
    totals: Tensor = _SequenceTotals.apply(values.double(), sequences)
    return totals


@torch.no_grad()
def run_totals(values: Tensor, mask: Tensor, sequences: Sequences) -> Tensor:
    """Return for each token the sum over its run of tokens in the mask, fp64 [b, s / cp], and 0 outside the mask;
    collective over context-parallel ranks, without gradient.

    Args:
        values: [b, s / cp].
        mask: bool [b, s / cp]; False at the last token of every sequence, so that no run spans two.
    """
    boundaries, size = sequences.boundaries, parallel_state.get_context_parallel_world_size()
    masked = torch.where(mask, values.double(), 0.0)
    whole = whole_rows(torch.stack([masked, mask.double()], -1), boundaries)
    inside = whole[..., 1].flatten()
    number = (inside.diff(prepend=inside.new_zeros(1)) > 0).cumsum(0)  # of the latest run; 0 before the first
    sums = torch.zeros(len(inside) + 1, dtype=torch.float64, device=inside.device)
    sums.index_add_(0, number, whole[..., 0].flatten())
    totals = (sums[number] * inside).view_as(whole[..., 0])
    if size == 1:
        return totals
    return totals[:, send(local_tokens(boundaries, parallel_state.get_context_parallel_rank(), size))]


class _SequenceTotals(torch.autograd.Function):
    """Sum and expand: a symmetric matrix, so the backward pass is the same operation."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, sequences: Sequences) -> Tensor:  # type: ignore[override]
        ctx.sequences = sequences
        return expand_to_tokens(sequence_sums(values, sequences), sequences)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _SequenceTotals.forward(ctx, gradient, ctx.sequences), None


def whole_rows(mine: Tensor, boundaries: Sequence[int]) -> Tensor:
    """Gather the context-parallel ranks' tokens in the order of the row; collective over them, without gradient.

    From [b, s / cp, ...] to [b, s, ...], on every rank.
    """
    group, size = parallel_state.get_context_parallel_group(), parallel_state.get_context_parallel_world_size()
    if size == 1:
        return mine
    parts = [torch.empty_like(mine) for _ in range(size)]
    torch.distributed.all_gather(parts, mine.contiguous(), group=group)
    whole = torch.cat(parts, 1)
    order = send(torch.cat([local_tokens(boundaries, rank, size) for rank in range(size)]))
    return torch.empty_like(whole).index_copy_(1, order, whole)
