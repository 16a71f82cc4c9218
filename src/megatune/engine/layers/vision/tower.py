"""Build and run the vision encoder: the engine's own, or Transformers' module with one attention call for all images.

Legend: n patches of the images, m² patches to a token, c channels of a patch, h width of the decoder, k deepstack
mergers.
"""

from __future__ import annotations

import importlib
import json
import math
import typing
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.initialization import no_init_weights
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from megatune.architecture import Architecture
from megatune.encoders import Vision
from megatune.engine import device
from megatune.engine.layers.attention.kernels import attend
from megatune.engine.layers.attention.spans import Spans
from megatune.engine.layers.vision.encoder import VisionEncoder
from megatune.families import FAMILIES

# Transformers passes the bounds of all images together to attention implementations with "flash" in their name.
_ATTENTION = "megatune_flash"


def build_encoder(architecture: Architecture, config: TransformerConfig) -> torch.nn.Module:
    """Build the encoder with its mergers: the engine's own, or Transformers' module with its parameter names.

    Weights are uninitialized. There is no dropout, and layers are recomputed if the decoder is recomputed in full.
    """
    vision, recompute = architecture.vision, config.recompute_granularity == "full"
    assert vision is not None
    if vision.layers is not None:
        with device.current(), no_init_weights():
            return VisionEncoder(vision, vision.layers, recompute=recompute)
    family = FAMILIES[architecture.model_type]
    assert family.vision is not None
    module_name, _, class_name = family.vision.encoder.partition(":")
    encoder_class: Any = getattr(importlib.import_module(module_name), class_name)
    settings = typing.get_type_hints(encoder_class)["config"].from_dict(json.loads(vision.config))
    with device.current(), no_init_weights():
        encoder = encoder_class(settings)
    encoder.config._attn_implementation = _ATTENTION
    for module in encoder.modules():
        # Frequencies of rotary embeddings stay in fp32, even if the module is converted: they must not be buffers.
        for name in list(module._buffers):
            buffer = module._buffers.pop(name)
            setattr(module, name, None if buffer is None else buffer.detach())
    # A convolution whose stride is the kernel size is a product with the flattened patches.
    encoder.patch_embed.proj.__class__ = PatchProjection
    if recompute:
        for layer in encoder.blocks:
            # As Transformers' gradient_checkpointing_enable, which would also require gradients of patches.
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    return encoder  # type: ignore[no-any-return]


class PatchProjection(torch.nn.Conv3d):
    """The linear projection of patches."""

    def forward(self, patches: Tensor) -> Tensor:
        """Project [n, channels, frames, height, width] to [n, V]."""
        return linear(patches.flatten(1), self.weight.flatten(1), self.bias)


class Tower:
    """Calls an encoder built by `build_encoder`.

    Args:
        encoder: a submodule of the model, which holds its parameters.
    """

    def __init__(self, encoder: torch.nn.Module, vision: Vision, config: TransformerConfig) -> None:
        self._encoder, self._vision, self._backend = encoder, vision, config.attention_backend

    @property
    def is_trained(self) -> bool:
        """Whether any parameter of the encoder, or of a merger, is trained."""
        return any(parameter.requires_grad for parameter in self._encoder.parameters())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of features."""
        return next(self._encoder.parameters()).dtype

    def __call__(self, pixel_values: Tensor, grids: Tensor) -> Tensor:
        """Encode images.

        Args:
            pixel_values: [n, c] on the device, image after image.
            grids: int64 [images, 3] on the host.

        Returns:
            [n / m², 1 + k, h]: features of tokens, and what is added to them after the decoder's first layers.
        """
        inputs = encoder_inputs(grids, self._vision) if self._vision.layers is None else {}
        output = self._encoder(pixel_values, grid_thw=grids, backend=self._backend, **inputs)
        features = output.pooler_output
        return torch.stack((features, *(getattr(output, "deepstack_features", None) or ())), 1)


def encoder_inputs(grids: Tensor, vision: Vision) -> dict[str, Any]:
    """Compute the encoder's inputs on the host, so that it does not synchronize with the device."""
    merge_size = vision.spatial_merge_size
    frames = _squares(get_vision_cu_seqlens(grids))
    inputs: dict[str, Any] = {
        # Passed through Transformers unchanged, to `_attend`.
        "cu_seqlens": frames,
        "max_seqlen": frames.on_device[2],
        "position_ids": device.send(get_vision_position_ids(grids, merge_size)),
    }
    if vision.window_size is not None:
        order, bounds = get_vision_window_index(grids, merge_size, vision.window_size, vision.patch_size)
        windows = _squares(bounds)
        inputs |= {
            "window_index": device.send(order),
            "cu_window_seqlens": windows,
            "max_window_seqlen": windows.on_device[2],
        }
    if vision.num_position_embeddings:
        places, weights = get_vision_interpolation_indices_and_weights(
            grids, math.isqrt(vision.num_position_embeddings), align_corners=True, spatial_merge_size=merge_size
        )
        inputs |= {"interp_indices": device.send(places), "interp_weights": device.send(weights)}
    return inputs


def _squares(bounds: Tensor) -> Spans:
    """Return the spans of patches that all attend to each other, from int [spans + 1]."""
    edges = tuple(bounds.tolist())
    return Spans(edges, edges, causal=False)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: Spans,
    backend: AttnBackend,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attend within images or windows: [1, heads, n, channels], each, to [n, heads, channels]."""
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    return attend(query, key, value, cu_seq_lens_q, scaling, backend), None


AttentionInterface.register(_ATTENTION, _attend)
