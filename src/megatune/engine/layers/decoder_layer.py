"""One layer of the decoder."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class DecoderLayer(TransformerLayer):
    """Megatron-Core's layer, which passes the micro-batch's sequences to the feed-forward, too: experts need to know
    which tokens are padding. They are an argument, so that a recomputed layer sees those of its own forward pass,
    whatever micro-batches came in between."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """hidden_states [s / cp (/ tp), b, h] to the same; see TransformerLayer."""
        kwargs.pop("dynamic_inference_decode_only", None)
        hidden_states, context = self._forward_attention(*args, **kwargs)
        return self._forward_mlp(hidden_states, padding_mask=kwargs["packed_seq_params"]), context
