"""Which experts a model chooses, for a trainer that replays them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class Routing:
    """Takes down the experts of each forward pass. Transformers calls a layer's experts with (tokens, experts of each
    token, their weights)."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._layers = model.config.num_hidden_layers
        self._chosen: dict[int, Tensor] = {}
        for layer, block in enumerate(model.base_model.layers):
            for module in block.modules():
                if getattr(getattr(module, "gate_up_proj", None), "ndim", 0) == 3:
                    module.register_forward_pre_hook(self._hook(layer))

    def _hook(self, layer: int) -> Any:
        def note(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            self._chosen[layer] = arguments[1]

        return note

    def take(self, rows: int) -> np.ndarray:
        """Return the experts of the last pass, int16 [rows, tokens, layers, topk]; of layers without experts zeros."""
        first = next(iter(self._chosen.values()))
        none = torch.zeros_like(first)
        every = torch.stack([self._chosen.pop(layer, none) for layer in range(self._layers)], 1)
        return every.view(rows, -1, *every.shape[1:]).to("cpu", torch.int16).numpy()
