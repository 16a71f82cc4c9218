"""Which experts a model of Transformers takes, so that training can take the same."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatune.errors import ExitCode, Finding, MegatuneError


class Recorder:
    """Keeps the choices of the last forward pass.

    Raises:
        MegatuneError: INPUT, where the model has no experts.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        layers: Any = model.get_decoder().layers
        self._num_layers, self._chosen = len(layers), dict[int, Tensor]()
        found = False
        for number, layer in enumerate(layers):
            for module in layer.modules():
                # Of every family, the module that has all experts' matrices in one parameter.
                if getattr(getattr(module, "gate_up_proj", None), "ndim", 0) == 3:
                    module.register_forward_pre_hook(partial(self._keep, number))
                    found = True
        if not found:
            why = f"{model.config.model_type} has no experts"
            finding = Finding("router_replay has nothing to replay", "actor_train", why, "remove router_replay")
            raise MegatuneError(finding, ExitCode.INPUT)

    def _keep(self, layer: int, module: torch.nn.Module, arguments: tuple[Tensor, ...]) -> None:
        """Take the experts [tokens, k] of (tokens, experts, their weights), with which a layer's experts are called."""
        self._chosen[layer] = arguments[1]

    def take(self, rows: int) -> np.ndarray:
        """Return experts by token: int16 [rows, tokens, layers, k], -1 in layers that have none."""
        some = next(iter(self._chosen.values()))
        nowhere = torch.full_like(some, -1)
        found = torch.stack([self._chosen.get(layer, nowhere) for layer in range(self._num_layers)], 1)
        return found.view(rows, -1, *found.shape[1:]).to(torch.int16).cpu().numpy()
