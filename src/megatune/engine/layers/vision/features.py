"""Insert image features in place of their tokens' embeddings, before rows are split over ranks in any way.

Images are distributed over the ranks that hold the same tokens, or parts of the same rows: each is encoded once.
Otherwise every tensor- and context-parallel rank of the first pipeline stage would encode all images of its
micro-batch. `owners` says which rank encodes which; ranks are numbered as in Megatron-Core's combined group, in which
tensor-parallel ranks are adjacent.

Legend: N tokens of all images of a micro-batch, s / cp tokens of a context-parallel rank, b rows, h width of the
decoder, k deepstack mergers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatune.encoders import Vision
from megatune.engine import device
from megatune.engine.sequences import BatchMedia, local_tokens

if TYPE_CHECKING:
    from megatune.engine.layers.vision.tower import Tower


class VisionFeatures:
    """Computes the image features of a micro-batch."""

    def __init__(self, tower: Tower, vision: Vision) -> None:
        self._tower, self._vision = tower, vision

    def __call__(self, media: BatchMedia | None) -> Tensor | None:
        """Encode images; collective over tensor- and context-parallel ranks if there are any.

        An encoder or merger that is trained runs exactly once per micro-batch, because DDP counts gradients to start
        their reduction. A rank without an image encodes zeros, and discards the result.

        Returns:
            [N, 1 + k, h], the same on all of these ranks; None if there is no image and nothing is trained.
        """
        trained = torch.is_grad_enabled() and self._tower.is_trained
        if media is None:
            return self._of_no_media() if trained else None
        with torch.set_grad_enabled(trained):
            return self._encode_own(media, trained)

    def _encode_own(self, media: BatchMedia, trained: bool) -> Tensor:
        rank, size = (
            parallel_state.get_tensor_and_context_parallel_rank(),
            parallel_state.get_tensor_and_context_parallel_world_size(),
        )
        own = media.grids[media.owners == rank]
        if len(own):
            features = self._tower(media.pixel_values.to(device.current(), non_blocking=True), own)
        elif trained:
            features = self._of_no_media()
        else:
            shape = (0, 1 + self._vision.num_deepstack_mergers, self._vision.out_hidden_size)
            features = torch.empty(shape, dtype=self._tower.dtype, device=device.current())
        if size == 1:
            return features
        counts = media.grids.prod(1) // self._vision.spatial_merge_size**2
        return gather_features(features, plan_gather(counts, media.owners, rank, size))

    def _of_no_media(self) -> Tensor:
        """Run the encoder on zeros, and return an empty part of the result: [0, 1 + k, h]."""
        size, vision = self._vision.spatial_merge_size, self._vision
        channels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        zeros = torch.zeros(size**2, channels, device=device.current())
        return self._tower(zeros, torch.tensor([[1, size, size]]))[:0]


def place_features(
    features: Tensor, embeddings: Tensor, media: BatchMedia | None, boundaries: Sequence[int]
) -> tuple[Tensor, Tensor | None]:
    """Insert features in place of embeddings.

    Args:
        features: [N, 1 + k, h], from VisionFeatures.
        embeddings: [s / cp, b, h], whole on every tensor-parallel rank.
        boundaries: see Sequences.

    Returns:
        Embeddings; and the tensor to add to the hidden states after each of the first k layers, [s / cp, b, k, h],
        zeros for text; None if k is 0.
    """
    if media is None:
        return embeddings + features.to(embeddings.dtype).sum(), None
    s, (t, b) = boundaries[-1], embeddings.shape[:2]
    rows, tokens = media.places // s, media.places % s
    features = features.to(embeddings.dtype)
    if t < s:
        cp_rank, cp_size = parallel_state.get_context_parallel_rank(), s // t
        here = torch.full((s,), -1)
        here[local_tokens(boundaries, cp_rank, cp_size)] = torch.arange(t)
        tokens = here[tokens]
        held = (tokens >= 0).nonzero()[:, 0]
        rows, tokens = rows[held], tokens[held]
        features = features.index_select(0, device.send(held))
    places = device.send(tokens * b + rows)
    merged, added = features[:, 0], features[:, 1:]
    embeddings = embeddings.flatten(0, 1).index_copy(0, places, merged).view_as(embeddings)
    if not added.shape[1]:
        return embeddings, None
    deepstack = embeddings.new_zeros(t * b, *added.shape[1:]).index_copy(0, places, added)
    return embeddings, deepstack.unflatten(0, (t, b))


class GatherPlan(NamedTuple):
    """Where features are after all-gather, on the host.

    Attributes:
        longest: number of tokens of the rank that has most; the others pad to it.
        order: int64 [n], indices of the tokens of all images, in order, among the gathered ones.
        own: int64 [m], indices of this rank's tokens among those of all images.
    """

    longest: int
    order: Tensor
    own: Tensor


def plan_gather(counts: Tensor, owners: Tensor, rank: int, size: int) -> GatherPlan:
    """Compute where features will be after all-gather.

    Args:
        counts: int64 [images], tokens of each.
        owners: int64 [images].
        rank, size: of this rank in the group that encodes the images.
    """
    owner_of_token = owners.repeat_interleave(counts)
    by_owner = torch.bincount(owner_of_token, minlength=size)
    sorted_tokens = owner_of_token.argsort(stable=True)
    longest = int(by_owner.max())
    # Sorted by owner tokens are adjacent; after all-gather each owner's begin at a multiple of `longest`.
    gaps = torch.arange(size) * longest - (by_owner.cumsum(0) - by_owner)
    order = torch.empty_like(sorted_tokens)
    order[sorted_tokens] = torch.arange(len(order)) + gaps[owner_of_token[sorted_tokens]]
    return GatherPlan(longest, order, (owner_of_token == rank).nonzero()[:, 0])


def gather_features(own: Tensor, plan: GatherPlan) -> Tensor:
    """Gather the features that every rank has encoded, [m, ...] of this one, to [n, ...] in the order of the tokens.

    Every rank must compute the loss of the tokens that it holds: tensor-parallel ranks then have the same gradient of
    all features, context-parallel ranks that of their own tokens.
    """
    gathered: Tensor = _Gather.apply(own, plan.longest, device.send(plan.order), device.send(plan.own))
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, longest: int, order: Tensor, own_places: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(own_places)
        group = parallel_state.get_tensor_and_context_parallel_group()
        padded = own.new_zeros(longest, *own.shape[1:])
        padded[: len(own)] = own
        gathered = own.new_empty(group.size() * longest, *own.shape[1:])
        torch.distributed.all_gather_into_tensor(gathered, padded, group=group)
        return gathered.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        group = parallel_state.get_context_parallel_group()
        if group.size() > 1:
            # Each element is nonzero on one rank only, so this sum is exact.
            grad = grad.clone()
            torch.distributed.all_reduce(grad, group=group)
        return grad.index_select(0, ctx.saved_tensors[0]), None, None, None


def sum_vision_gradients(model: Sequence[DistributedDataParallel]) -> None:
    """Sum the gradients of the vision encoder's parameters over tensor-parallel ranks, each of which has a part, after
    the reduction over replicas."""
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return
    for buffer in (buffer for chunk in model for buffer in chunk.buffers):
        places = sorted(
            (start, stop, getattr(parameter, "sum_over_tp", False))
            for parameter, (start, stop, _) in buffer.param_index_map.items()
        )
        # Parameters of one module are adjacent in the buffer.
        for sum_over_tp, side_by_side in groupby(places, key=itemgetter(2)):
            if sum_over_tp:
                run = list(side_by_side)
                torch.distributed.all_reduce(buffer.grad_data[run[0][0] : run[-1][1]], group=group)
