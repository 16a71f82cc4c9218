"""Select what is trained in a built chunk: add adapters to linear layers, and freeze the other weights.

The backward pass ends at the first trained weight, whichever stage it is in.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatune.architecture import Architecture
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.engine import groups
from megatune.engine.layers.adapter import Adapter, ExpertAdapter, Sharding, add_adapter
from megatune.engine.layers.moe.layer import GroupedExperts
from megatune.engine.weights import entry_name, named_tensors, named_weights, rank_slice
from megatune.families import FAMILIES
from megatune.families.adapters import AdapterWeights, adapter_weights, adapters, scaling
from megatune.families.selection import Selection
from megatune.families.table import rows_of
from megatune.families.trained import first_trained_layer, is_trained
from megatune.families.weights import Slice, Stack, TensorLayout, Weight, by_expert, engine_shape


def add_adapters(chunk: Any, architecture: Architecture, settings: FinetuningSettings) -> None:
    """Add adapters to the layers of a DecoderModel; their parameters are uninitialized."""
    chunk.adapter_weights = adapter_weights(architecture, settings)
    entries, rows = adapters(architecture, settings), dict[str, torch.Tensor | None]()
    base = {weight.engine: weight for weight in FAMILIES[architecture.model_type].weight_map(architecture)}
    coords = groups.coordinates()
    for path, _ in list(named_tensors(chunk)):
        name, _ = entry_name(chunk, path, base)
        if name not in entries:
            continue
        module_path, _, attribute = path.rpartition(".")
        linear, weight, entry = chunk.get_submodule(module_path), base[name], entries[name]
        part = rank_slice(weight, coords)
        if name not in rows:  # the layers share it
            rows[name] = _rows(entry, architecture, part)
        adapter = (ExpertAdapter if weight.per_expert else Adapter)(
            engine_shape(entry.a, architecture, part),
            engine_shape(entry.b, architecture, part),
            rows[name],
            decomposed=entry.magnitude is not None,
            scale=scaling(settings),
            dropout=settings.lora_dropout,
            **_parallel(weight, linear, chunk.config),
        )
        if isinstance(linear, GroupedExperts):
            setattr(linear, attribute.replace("weight", "adapter"), adapter)
        else:
            add_adapter(linear, adapter)


def _parallel(weight: Weight, linear: Any, config: TransformerConfig) -> dict[str, Any]:
    """Return how a layer is sharded, and the group of ranks."""
    if weight.per_expert:
        of_inputs = weight.layout is TensorLayout.COLUMNS
        sharding = Sharding.INPUTS_PARTIAL if of_inputs else Sharding.OUTPUTS_GATHERED
        return {"sharding": sharding, "group": groups.expert_tensor_parallel_group(), "sequence_parallel": False}
    explicit = getattr(linear, "explicit_expert_comm", False)
    match weight.layout:
        case TensorLayout.REPLICATED:
            sharding = Sharding.NONE
        case TensorLayout.COLUMNS:
            sharding = Sharding.INPUTS_PARTIAL if explicit else Sharding.INPUTS
        case _:
            sharding = Sharding.OUTPUTS_GATHERED if explicit else Sharding.OUTPUTS
    # Images are distributed over ranks as a whole.
    sequence_parallel = config.sequence_parallel and weight.stack is Stack.DECODER
    return {"sharding": sharding, "group": groups.tensor_parallel_group(), "sequence_parallel": sequence_parallel}


def _rows(entry: AdapterWeights, architecture: Architecture, part: Slice) -> torch.Tensor | None:
    """Return which of a rank's outputs belong to which matrix, bool [o, n]; None if all belong to a single matrix."""
    (one, *_) = by_expert(entry.b, architecture, part)
    *_, outputs, rank = engine_shape(entry.b, architecture, part)
    names = [tensor.name.format(layer=0, expert=one.ep_rank) for tensor in entry.b.hf if tensor.name]
    indices = torch.full((outputs * rank,), -1)  # of each element's matrix
    for row in rows_of(entry.b, architecture, one):
        indices[row.elements] = names.index(row.name)
    indices = indices[::rank]
    if len(names) == 1 and not (indices < 0).any():
        return None
    rows = indices[:, None] == torch.arange(len(names))
    return rows.to(torch.cuda.current_device())


def freeze(chunk: Any, architecture: Architecture, selection: Selection) -> None:
    """Freeze the weights of a DecoderModel that are not trained, and set where its backward pass ends."""
    for weight, layer, tensor, _ in named_weights(chunk, architecture):
        if isinstance(tensor, torch.nn.Parameter):
            tensor.requires_grad_(is_trained(weight, layer, architecture, selection))
    layers, config = chunk.decoder.layers, chunk.config
    begin = layers[0].layer_number - 1 if layers else 0 if chunk.pre_process else architecture.num_layers
    first = first_trained_layer(architecture, selection) - begin
    chunk.propagates_gradient = chunk.pre_process or first < 0
    if config.recompute_granularity is None or not 0 <= first < len(layers):
        return
    # Recomputation computes gradients of weights only if an input of the recomputed block requires one.
    is_uniform = config.recompute_granularity == "full" and config.recompute_method == "uniform"
    if start := first - first % (config.recompute_num_layers if is_uniform else 1):
        layers[start - 1].register_forward_hook(_require_output_grad)
    else:
        chunk.input_requires_grad = True


def _require_output_grad(layer: torch.nn.Module, inputs: Any, output: tuple[Tensor, Any]) -> None:
    if torch.is_grad_enabled():
        output[0].requires_grad_()


def detach_stage_input(hidden_states: Tensor) -> Tensor:
    """Detach the input of a stage. The schedule sends a gradient back nevertheless: zeros."""
    hidden_states.grad = torch.zeros_like(hidden_states)
    return hidden_states.detach()
