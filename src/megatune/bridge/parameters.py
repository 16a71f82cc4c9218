"""Which weights this rank holds."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatune.architecture import Architecture
from megatune.engine.groups import Place
from megatune.families import FAMILIES
from megatune.families.weights import Segment, Slice, Weight, by_expert, engine_shape, hf_shapes, segments

_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..+)")
_OUTPUT_LAYER = "output_layer.weight"
_WORD_EMBEDDING = "embedding.word_embeddings.weight"


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
        """The pieces of Hugging Face tensors that make up this rank's slice."""
        return segments(self.weight, architecture, self.slice, self.layer)

    def hf_shapes(self, architecture: Architecture) -> dict[str, tuple[int, ...]]:
        """Shapes of the Hugging Face tensors that it is a part of, by name; of this rank's experts only."""
        return hf_shapes(self.weight, architecture, self.layer, self.slice)

    def pieces(self, architecture: Architecture) -> list[Piece]:
        """The parameter expert by expert, in order; as one piece where it is no expert's."""
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
        """Shapes of the Hugging Face tensors that it is a part of, by name."""
        return hf_shapes(self.local.weight, architecture, self.local.layer, self.slice)

    def segments(self, architecture: Architecture, part: Slice) -> list[Segment]:
        """The pieces of those tensors that another rank's slice of it is made of."""
        return segments(self.local.weight, architecture, part, self.local.layer)


def slice_of(weight: Weight, place: Place) -> Slice:
    """The part of a weight that a rank holds."""
    if weight.per_expert:
        return Slice(place.etp_size, place.etp_rank, place.ep_size, place.ep_rank)
    return Slice(place.tp_size, place.tp_rank)


def local_parameters(
    model: Sequence[torch.nn.Module], architecture: Architecture, place: Place
) -> list[LocalParameter]:
    """Every parameter of this rank's chunks and every buffer in the weight map, in the order of the model.

    The shapes that the family declares are held against those that Megatron-Core built.
    """
    by_name = {weight.engine: weight for weight in FAMILIES[architecture.model_type].weight_map(architecture)}
    found: list[LocalParameter] = []
    for chunk in model:
        for name, layer, parameter in _named_tensors(chunk, by_name):
            is_copy = name == _OUTPUT_LAYER and architecture.tie_word_embeddings
            weight = by_name[_WORD_EMBEDDING if is_copy else name]
            part = slice_of(weight, place)
            declared = engine_shape(weight, architecture, part)
            assert tuple(parameter.shape) == declared, f"{name}: built {tuple(parameter.shape)}, declared {declared}"
            found.append(LocalParameter(weight, layer, part, parameter, is_copy))
    return found


def _named_tensors(chunk: torch.nn.Module, by_name: dict[str, Weight]) -> Iterator[tuple[str, int, Tensor]]:
    """Names as the weight map has them, with the layer's number over all pipeline stages beside them.

    Every parameter, and of the buffers those that the map declares: others are computed.
    """
    decoder: Any = chunk
    while hasattr(decoder, "module"):  # DDP and mixed-precision wrappers
        decoder = decoder.module
    for name, tensor in itertools.chain(decoder.named_parameters(), decoder.named_buffers()):
        match = _LAYER.fullmatch(name)
        layer = 0
        if match is not None:
            layer = decoder.decoder.layers[int(match[2])].layer_number - 1
            name = f"{match[1]}{{layer}}{match[3]}"
        if isinstance(tensor, torch.nn.Parameter) or (name in by_name and by_name[name].is_buffer):
            yield name, layer, tensor
