"""The tensors of a built model as entries of the family's weight map, and the marks Megatron-Core reads on them."""

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

# Norms that are parts of Transformer Engine's modules, by what the weight map calls them.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
# A tensor of a numbered module: of a layer, whatever stack it is in.
_NUMBERED = re.compile(r"(.+?)\.(\d+)\.(.+)")


def named_weights(chunk: torch.nn.Module, architecture: Architecture) -> Iterator[tuple[Weight, int, Tensor, bool]]:
    """Find every parameter of a pipeline chunk, every quantized matrix, and every buffer that checkpoints hold, in the
    family's weight map.

    Yields:
        The entry; the layer, counted from 0 over all pipeline stages, 0 outside layers; the tensor; and whether another
        stage holds the same weight and this is its copy (tied embeddings, and the one beside layers that predict
        further tokens).
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

    A matrix has the name of the parameter in whose place it is, and what is asked of frozen ones: shape, dtype,
    requires_grad, numel() and data.
    """
    yield from module.named_parameters()
    yield from ((path, cast(Tensor, one)) for path, one in module.named_modules() if isinstance(one, QuantizedMatrix))
    yield from module.named_buffers()


def entry_name(module: torch.nn.Module, path: str, known: Container[str]) -> tuple[str, int]:
    """Return what the weight map calls a tensor of a chunk, with {layer}, and its layer over all pipeline stages.

    Args:
        known: names of the map, which may have numbers of their own.
    """
    match = _NUMBERED.fullmatch(path)
    if path in known or match is None:
        return path, 0
    index = int(match[2])
    # Megatron-Core's layers know their number, from 1; a module of another list is counted by its index.
    layer = getattr(module.get_submodule(f"{match[1]}.{index}"), "layer_number", index + 1) - 1
    return f"{match[1]}.{{layer}}.{_FUSED_NORMS.get(match[3], match[3])}", layer


def rank_slice(weight: Weight, coords: RankCoordinates) -> Slice:
    """Return which part of a weight a rank holds."""
    if weight.per_expert:
        return Slice(coords.etp_size, coords.etp_rank, coords.ep_size, coords.ep_rank)
    return Slice(coords.tp_size, coords.tp_rank)


def mark_weights(chunk: torch.nn.Module, architecture: Architecture) -> None:
    """Mark the weights that tensor parallelism cuts and those of experts, as the weight map lays them out.

    Megatron-Core marks weights only where it draws them at random, and by the class of their module. An unmarked weight
    counts as a copy: the norm of the gradient then misses all but one rank's part of it.
    """
    expert_tensor_rank = groups.expert_tensor_parallel_group().rank()
    for weight, _, tensor, _ in named_weights(chunk, architecture):
        marked: Any = tensor
        # Experts also where they are whole: ranks of tensor parallelism then hold different experts, or replicas as
        # data parallelism has them. Unmarked they would count in the norm on the first of these ranks only.
        marked.tensor_model_parallel = weight.partition_dim is not None or weight.per_expert
        if weight.per_expert and weight.partition_dim is None and expert_tensor_rank:
            marked.shared = True  # with an expert's first rank, on which it counts
        marked.partition_dim = -1 if weight.partition_dim is None else weight.partition_dim
        marked.partition_stride = len(weight.hf) if weight.layout is TensorLayout.GATE_UP else 1
        # By which they may have a learning rate of their own.
        marked.entry = weight
        # Each tensor-parallel rank finds the gradient of the pictures that it encodes.
        marked.sum_over_tp = weight.stack is not Stack.DECODER
        # Gradients of experts are summed over the ranks that hold the same ones, not over all replicas.
        marked.allreduce = not weight.per_expert
