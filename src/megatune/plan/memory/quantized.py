"""What a base in few bits (QLoRA, arXiv:2305.14314) takes, and what it takes to compute with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import prod

from megatune.architecture import Architecture, LayerKind
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.settings import ParallelSettings
from megatune.families import FAMILIES
from megatune.families.quantized import form_of, is_quantized, quantized_buffers
from megatune.families.weights import Slice, Weight, engine_shape, is_in_layer
from megatune.plan.memory.tensors import ChunkContent

_BYTES = {"uint8": 1, "int8": 1, "int32": 4, "float32": 4}


def saved_bytes(
    architecture: Architecture,
    trainable: FinetuningSettings,
    parallel: ParallelSettings,
    chunks: Iterable[ChunkContent],
    itemsize: int,
) -> int:
    """Return bytes that the chunks of a rank hold less than they would with every element in `itemsize` bytes."""
    if form_of(trainable) is None:
        return 0
    kinds = Counter(layer.kind for chunk in chunks for layer in chunk.layers)
    return sum(
        count * _saved_in_layer(architecture, trainable, parallel, itemsize, kind) for kind, count in kinds.items()
    )


@lru_cache(maxsize=4096)
def _saved_in_layer(
    architecture: Architecture,
    trainable: FinetuningSettings,
    parallel: ParallelSettings,
    itemsize: int,
    kind: LayerKind,
) -> int:
    form, saved = form_of(trainable), 0
    for weight, part in _quantized(architecture, trainable, parallel, kind):
        assert form is not None
        buffers = quantized_buffers(weight, architecture, form, part).values()
        kept = sum(_BYTES[dtype] * prod(shape) for dtype, shape in buffers)
        saved += prod(engine_shape(weight, architecture, part)) * itemsize - kept
    return saved


def _quantized(
    architecture: Architecture, trainable: FinetuningSettings, parallel: ParallelSettings, kind: LayerKind
) -> Iterator[tuple[Weight, Slice]]:
    """Yield the quantized weights of a layer of the decoder, and what a rank has of them."""
    dense = Slice(tp_size=parallel.tensor_model_parallel_size)
    expert = Slice(tp_size=parallel.expert_tensor_size, ep_size=parallel.expert_model_parallel_size)
    for weight in FAMILIES[architecture.model_type].weight_map(architecture):
        if is_in_layer(weight, kind) and is_quantized(weight, trainable):
            yield weight, expert if weight.per_expert else dense
