"""The multi-token prediction (MTP) layer, see `families.mtp`."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatune.engine.layers.norm import RMSNorm
from megatune.engine.layers.self_attention import ReplicatedLinear
from megatune.engine.sequences import Sequences


class MTPLayer(MegatronModule):
    """Megatron-Core's multi-token prediction layer, with the same parameter names.

    Megatron-Core's own implementation shifts tokens itself, which does not work for our packed rows, and shards its
    projection only to gather the outputs again.

    Args:
        layer: spec of the inner layer, of the same kind as the model's layers.
        index: of this layer after those of the pipeline chunk, from 0.
        recomputed: recompute the layer in the backward pass.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer: ModuleSpec,
        index: int,
        recomputed: bool,
        vp_stage: int | None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        size, epsilon = config.hidden_size, config.layernorm_epsilon
        self.recomputed = recomputed
        self.enorm, self.hnorm = RMSNorm(config, size, epsilon), RMSNorm(config, size, epsilon)
        self.eh_proj = ReplicatedLinear(2 * size, size, config=config)
        # Megatron-Core adds the number of layers of earlier chunks.
        self.transformer_layer = build_module(layer, config=config, layer_number=index + 1, vp_stage=vp_stage)
        self.layer_number = self.transformer_layer.layer_number  # read by the weight map
        self.final_layernorm = RMSNorm(config, size, epsilon)

    @property
    def mtp_model_layer(self) -> torch.nn.Module:
        """The inner layer, by the name that Megatron-Core 0.19 gives it and sets attributes by."""
        return self.transformer_layer

    def forward(self, hidden_states: Tensor, embeddings: Tensor, rotary: Tensor, sequences: Sequences) -> Tensor:
        """Compute the input of the output layer, [s / cp (/ tp), b, h].

        Args:
            hidden_states: [s / cp (/ tp), b, h], the output of the decoder.
            embeddings: of each token's next token, of the same shape.
            rotary: see `DecoderModel`. Attention depends on differences of positions only, which are the same for next
                tokens.
        """

        def compute(hidden_states: Tensor, embeddings: Tensor, rotary: Tensor) -> Tensor:
            both = torch.cat((self.enorm(embeddings), self.hnorm(hidden_states)), -1)
            output, _ = self.transformer_layer(
                hidden_states=self.eh_proj(both),
                attention_mask=None,
                rotary_pos_emb=rotary,
                packed_seq_params=sequences,
            )
            found: Tensor = output
            return found

        if self.recomputed and self.training and torch.is_grad_enabled():
            output = tensor_parallel.checkpoint(compute, False, hidden_states, embeddings, rotary)
        else:
            output = compute(hidden_states, embeddings, rotary)
        normalized: Tensor = self.final_layernorm(output)
        return normalized
