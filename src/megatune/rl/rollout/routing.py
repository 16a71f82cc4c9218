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
        layers: Any = model.base_model.layers
        self._num_layers, self._chosen = len(layers), dict[int, Tensor]()
        for number, layer in enumerate(layers):
            for module in layer.modules():
                if type(module).__name__.endswith("Router"):
                    module.register_forward_hook(partial(self._keep, number))
                    self._topk: int = model.config.num_experts_per_tok
        if not hasattr(self, "_topk"):
            why = f"{model.config.model_type} has no experts"
            finding = Finding("router_replay has nothing to replay", "actor_train", why, "remove router_replay")
            raise MegatuneError(finding, ExitCode.INPUT)

    def _keep(self, layer: int, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Take a router's logits, weights and experts, [tokens, k] each."""
        self._chosen[layer] = output[2]

    def take(self, rows: int) -> np.ndarray:
        """Return experts by token: int16 [rows, tokens, layers, k], -1 in layers that have none."""
        some = next(iter(self._chosen.values()))
        nowhere = torch.full_like(some, -1)
        found = torch.stack([self._chosen.get(layer, nowhere) for layer in range(self._num_layers)], 1)
        return found.view(rows, -1, self._num_layers, self._topk).to(torch.int16).cpu().numpy()
