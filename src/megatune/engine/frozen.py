"""Chunks of which something is frozen: gradients end at the first weight that is trained, in whatever stage it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatune.architecture import Architecture
from megatune.engine.weights import named_weights
from megatune.families.selection import Selection
from megatune.families.trained import first_trained_layer, is_trained


def freeze(chunk: Any, architecture: Architecture, selection: Selection) -> None:
    """Freeze the weights of a DecoderModel that are not trained, and tell it where its gradients begin."""
    for weight, layer, tensor, _ in named_weights(chunk, architecture):
        if isinstance(tensor, torch.nn.Parameter):
            tensor.requires_grad_(is_trained(weight, layer, architecture, selection))
    layers, config = chunk.decoder.layers, chunk.config
    begin = layers[0].layer_number - 1 if layers else 0 if chunk.pre_process else architecture.num_layers
    first = first_trained_layer(architecture, selection) - begin
    chunk.passes_gradient = chunk.pre_process or first < 0
    if config.recompute_granularity is None or not 0 <= first < len(layers):
        return
    # Recomputation gives weights a gradient only where an input of what is recomputed together has one.
    is_uniform = config.recompute_granularity == "full" and config.recompute_method == "uniform"
    if start := first - first % (config.recompute_num_layers if is_uniform else 1):
        layers[start - 1].register_forward_hook(_ask_for_gradient)
    else:
        chunk.asks_for_gradient = True


def _ask_for_gradient(layer: torch.nn.Module, inputs: Any, output: tuple[Tensor, Any]) -> None:
    if torch.is_grad_enabled():
        output[0].requires_grad_()


def without_gradient(hidden_states: Tensor) -> Tensor:
    """Cut the graph at what a stage received. The schedule sends a gradient back all the same: zeros."""
    hidden_states.grad = torch.zeros_like(hidden_states)
    return hidden_states.detach()
