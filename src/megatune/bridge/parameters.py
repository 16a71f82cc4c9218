"""Which weights this rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatune.architecture import Architecture
from megatune.engine.groups import RankCoordinates
from megatune.engine.weights import named_weights
from megatune.families.weights import Segment, Slice, Weight, by_expert, engine_shape, hf_shapes, segments


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """One parameter of this rank, or a buffer that is loaded and saved like one.

    Attributes:
        weight: its entry in the family's weight map.
        layer: its layer, counted over the whole model; 0 for what is in no layer.
        slice: which part of the weight this rank holds.
        parameter: that part.
        is_copy: another pipeline stage holds the same weight and writes it (tied embeddings).
    """

    weight: Weight
    layer: int
    slice: Slice
    parameter: Tensor
    is_copy: bool

    def segments(self, architecture: Architecture) -> list[Segment]:
        """List the pieces of Hugging Face tensors that make up this rank's slice."""
        return segments(self.weight, architecture, self.slice, self.layer)

    def hf_shapes(self, architecture: Architecture) -> dict[str, tuple[int, ...]]:
        """Find the shapes of the Hugging Face tensors that it is a part of, by name; of this rank's experts only."""
        return hf_shapes(self.weight, architecture, self.layer, self.slice)

    def pieces(self, architecture: Architecture) -> list[Piece]:
        """Cut the parameter into its experts, in order; into one piece where it belongs to none."""
        parts = by_expert(self.weight, architecture, self.slice)
        size = self.parameter.numel() // len(parts)
        return [Piece(self, part, index * size, (index + 1) * size) for index, part in enumerate(parts)]


@dataclass(frozen=True, slots=True)
class Piece:
    """What is gathered and written at a time: a weight, or a single expert's part of it.

    Attributes:
        slice: which part of the weight it is.
        start, stop: its elements of `local.parameter`, flattened.
    """

    local: LocalParameter
    slice: Slice
    start: int
    stop: int

    def hf_shapes(self, architecture: Architecture) -> dict[str, tuple[int, ...]]:
        """Find the shapes of the Hugging Face tensors that it is a part of, by name."""
        return hf_shapes(self.local.weight, architecture, self.local.layer, self.slice)


def local_parameters(
    model: Sequence[torch.nn.Module], architecture: Architecture, place: RankCoordinates
) -> list[LocalParameter]:
    """List every parameter of this rank's chunks and every buffer in the weight map, in the order of the model.

    The shapes that the family declares are held against those that Megatron-Core built.
    """
    whole = Slice(place.tp_size, place.tp_rank)
    experts = Slice(place.etp_size, place.etp_rank, place.ep_size, place.ep_rank)
    found: list[LocalParameter] = []
    for chunk in model:
        for weight, layer, tensor, is_copy in named_weights(chunk, architecture):
            part, built = (experts if weight.per_expert else whole), tuple(tensor.shape)
            declared = engine_shape(weight, architecture, part)
            assert built == declared, f"{weight.engine}: built {built}, declared {declared}"
            found.append(LocalParameter(weight, layer, part, tensor, is_copy))
    return found
