"""Map the tensors of a built model to the family's weight map, and set the attributes that Megatron-Core reads."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from megatune.architecture import Architecture
from megatune.engine import groups
from megatune.engine.groups import RankCoordinates
from megatune.engine.layers.quantized import QuantizedMatrix
from megatune.families import FAMILIES
from megatune.families.dense import EMBEDDING, OUTPUT_LAYER
from megatune.families.weights import Slice, Stack, TensorLayout, Weight

# Norms that are fused into Transformer Engine's modules, and their names in the weight map.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
# A tensor of a numbered module: of a layer, in any stack.
_NUMBERED = re.compile(r"(.+?)\.(\d+)\.(.+)")


def named_weights(chunk: torch.nn.Module, architecture: Architecture) -> Iterator[tuple[Weight, int, Tensor, bool]]:
    """Find the weight-map entry of every parameter, quantized matrix and checkpointed buffer of a pipeline chunk.

    Yields:
        The entry; the layer, counted from 0 over all pipeline stages, 0 outside layers; the tensor; and whether this is
        a copy of a weight on another stage (tied embeddings, and the embedding next to multi-token prediction layers).
    """
    module: Any = chunk
    while hasattr(module, "module"):  # DDP and mixed-precision wrappers
        module = module.module
    weights = (*FAMILIES[architecture.model_type].weight_map(architecture), *getattr(module, "adapter_weights", ()))
    by_name = {weight.engine: weight for weight in weights}
    for path, tensor in named_tensors(module):
        name, layer = entry_name(module, path, by_name)
        is_copy = name == OUTPUT_LAYER.engine and architecture.tie_word_embeddings
        is_copy |= name == EMBEDDING.engine and not module.pre_process
        if isinstance(tensor, torch.nn.Parameter | QuantizedMatrix):
            yield by_name[EMBEDDING.engine if is_copy else name], layer, tensor, is_copy
        elif name in by_name and by_name[name].is_buffer:
            yield by_name[name], layer, tensor, False


def named_tensors(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, quantized matrices and buffers by their names.

    A matrix has the name of the parameter that it replaces, and the attributes that are read from frozen parameters:
    shape, dtype, requires_grad, numel() and data.
    """
    yield from module.named_parameters()
    yield from ((path, cast(Tensor, one)) for path, one in module.named_modules() if isinstance(one, QuantizedMatrix))
    yield from module.named_buffers()


def entry_name(module: torch.nn.Module, path: str, known: Container[str]) -> tuple[str, int]:
    """Return the weight map's name of a chunk's tensor, with {layer}, and its layer over all pipeline stages.

    Args:
        known: names of the map, which may contain numbers themselves.
    """
    match = _NUMBERED.fullmatch(path)
    if path in known or match is None:
        return path, 0
    index = int(match[2])
    # Megatron-Core's layers have a layer_number, from 1; other numbered modules count by index.
    layer = getattr(module.get_submodule(f"{match[1]}.{index}"), "layer_number", index + 1) - 1
    return f"{match[1]}.{{layer}}.{_FUSED_NORMS.get(match[3], match[3])}", layer


def rank_slice(weight: Weight, coords: RankCoordinates) -> Slice:
    """Return which part of a weight a rank holds."""
    if weight.per_expert:
        return Slice(coords.etp_size, coords.etp_rank, coords.ep_size, coords.ep_rank)
    return Slice(coords.tp_size, coords.tp_rank)


def mark_weights(chunk: torch.nn.Module, architecture: Architecture) -> None:
    """Set the attributes of weights that tensor parallelism shards, and of experts, as the weight map defines them.

    Megatron-Core sets them only when it initializes weights, depending on the module's class. A weight without them
    counts as a copy, so that the gradient norm misses all but one rank's part of it.
    """
    expert_tensor_rank = groups.expert_tensor_parallel_group().rank()
    for weight, _, tensor, _ in named_weights(chunk, architecture):
        marked: Any = tensor
        # Experts also if they are not sharded: tensor-parallel ranks then hold different experts, or replicas as in
        # data parallelism. Otherwise the norm would only include the first of these ranks.
        marked.tensor_model_parallel = weight.partition_dim is not None or weight.per_expert
        if weight.per_expert and weight.partition_dim is None and expert_tensor_rank:
            marked.shared = True  # with the expert's first rank, which includes it in the norm
        marked.partition_dim = -1 if weight.partition_dim is None else weight.partition_dim
        marked.partition_stride = len(weight.hf) if weight.layout is TensorLayout.GATE_UP else 1
        # Read to choose the learning rate.
        marked.entry = weight
        # Each tensor-parallel rank computes the gradient of the images that it encodes.
        marked.sum_over_tp = weight.stack is not Stack.DECODER
        # Gradients of experts are summed over expert replicas only.
        marked.allreduce = not weight.per_expert
