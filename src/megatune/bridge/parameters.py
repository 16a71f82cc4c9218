"""Which weights this rank holds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatune.architecture import Architecture
from megatune.engine.groups import Place
from megatune.families import FAMILIES
from megatune.families.weights import Segment, Weight, engine_shape, hf_shape, segments

_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..+)")
_OUTPUT_LAYER = "output_layer.weight"
_WORD_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """One parameter of this rank.

    Attributes:
        weight: its entry in the family's weight map.
        layer: its layer, counted over the whole model; 0 for what is in no layer.
        parameter: this rank's slice.
        is_copy: another pipeline stage holds the same weight and writes it (tied embeddings).
    """

    weight: Weight
    layer: int
    parameter: torch.nn.Parameter
    is_copy: bool

    def segments(self, architecture: Architecture, tp_size: int, tp_rank: int) -> list[Segment]:
        """The pieces of Hugging Face tensors that rank `tp_rank` holds of this weight."""
        return segments(self.weight, architecture, tp_size, tp_rank, self.layer)

    def hf_shapes(self, architecture: Architecture) -> dict[str, tuple[int, ...]]:
        """Shapes of the Hugging Face tensors it is made of, by name."""
        return {tensor.name.format(layer=self.layer): hf_shape(tensor, architecture) for tensor in self.weight.hf}


def local_parameters(
    model: Sequence[torch.nn.Module], architecture: Architecture, place: Place
) -> list[LocalParameter]:
    """Every parameter of this rank's chunks, in the order of the model.

    The shapes that the family declares are held against those that Megatron-Core built.
    """
    by_name = {weight.engine: weight for weight in FAMILIES[architecture.model_type].weight_map(architecture)}
    found: list[LocalParameter] = []
    for chunk in model:
        for name, layer, parameter in _named_parameters(chunk):
            is_copy = name == _OUTPUT_LAYER and architecture.tie_word_embeddings
            weight = by_name[_WORD_EMBEDDING if is_copy else name]
            declared = engine_shape(weight, architecture, place.tp_size)
            assert tuple(parameter.shape) == declared, f"{name}: built {tuple(parameter.shape)}, declared {declared}"
            found.append(LocalParameter(weight, layer, parameter, is_copy))
    return found


def _named_parameters(chunk: torch.nn.Module) -> Iterator[tuple[str, int, torch.nn.Parameter]]:
    """Names as the weight map has them, with the layer's number over all pipeline stages beside them."""
    decoder: Any = chunk
    while hasattr(decoder, "module"):  # DDP and mixed-precision wrappers
        decoder = decoder.module
    for name, parameter in decoder.named_parameters():
        match = _LAYER.fullmatch(name)
        if match is None:
            yield name, 0, parameter
        else:
            layer = decoder.decoder.layers[int(match[2])]
            yield f"{match[1]}{{layer}}{match[3]}", layer.layer_number - 1, parameter
