"""Features of pictures in place of their tokens' embeddings, before a row is cut over ranks in any way.

Legend: N tokens of all pictures of a micro-batch, s / cp tokens of a context-parallel rank, b rows, h width of the
decoder, k deepstack mergers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatune.encoders import Vision
from megatune.engine import device
from megatune.engine.layers.vision.dealing import deal, gather_features
from megatune.engine.sequences import Pictures, local_tokens

if TYPE_CHECKING:
    from megatune.engine.layers.vision.tower import Tower


class PictureFeatures:
    """Makes the features of a micro-batch."""

    def __init__(self, tower: Tower, vision: Vision) -> None:
        self._tower, self._vision = tower, vision

    def __call__(self, pictures: Pictures | None) -> Tensor | None:
        """Encode pictures; collective over tensor- and context-parallel ranks where there are any.

        An encoder or merger that is trained runs once in every micro-batch, since gradients that are reduced while
        others are computed are counted: with no picture for this rank on one of zeros, which no token gets.

        Returns:
            [N, 1 + k, h], the same on all of these ranks; None where there is no picture and nothing is trained.
        """
        trained = torch.is_grad_enabled() and self._tower.is_trained
        if pictures is None:
            return self._of_no_picture() if trained else None
        with torch.set_grad_enabled(trained):
            return self._dealt(pictures, trained)

    def _dealt(self, pictures: Pictures, trained: bool) -> Tensor:
        rank, size = (
            parallel_state.get_tensor_and_context_parallel_rank(),
            parallel_state.get_tensor_and_context_parallel_world_size(),
        )
        own = pictures.grids[pictures.owners == rank]
        if len(own):
            features = self._tower(pictures.pixel_values.to(device.current(), non_blocking=True), own)
        elif trained:
            features = self._of_no_picture()
        else:
            shape = (0, 1 + self._vision.num_deepstack_mergers, self._vision.out_hidden_size)
            features = torch.empty(shape, dtype=self._tower.dtype, device=device.current())
        if size == 1:
            return features
        counts = pictures.grids.prod(1) // self._vision.spatial_merge_size**2
        return gather_features(features, deal(counts, pictures.owners, rank, size))

    def _of_no_picture(self) -> Tensor:
        """Run the encoder on zeros, and return none of what it makes of them: [0, 1 + k, h]."""
        size, vision = self._vision.spatial_merge_size, self._vision
        channels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        zeros = torch.zeros(size**2, channels, device=device.current())
        return self._tower(zeros, torch.tensor([[1, size, size]]))[:0]


def place_features(
    features: Tensor, embeddings: Tensor, pictures: Pictures | None, boundaries: Sequence[int]
) -> tuple[Tensor, Tensor | None]:
    """Put features in the place of embeddings.

    Args:
        features: [N, 1 + k, h], as PictureFeatures makes them.
        embeddings: [s / cp, b, h], whole on every tensor-parallel rank.
        boundaries: as in Sequences.

    Returns:
        Embeddings; and what is added to the hidden states after each of the first k layers, [s / cp, b, k, h], zeros
        at text; None where there is nothing to add.
    """
    if pictures is None:
        return embeddings + features.to(embeddings.dtype).sum(), None
    s, (t, b) = boundaries[-1], embeddings.shape[:2]
    rows, tokens = pictures.places // s, pictures.places % s
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
