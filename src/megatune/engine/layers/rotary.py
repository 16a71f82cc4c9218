"""Rotary position embeddings: their frequencies, and the rotation in one pass."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from megatune.architecture import Architecture, Llama3RopeScaling
from megatune.engine import device


def inverse_frequencies(architecture: Architecture) -> Tensor:
    """Rotation per position of each pair of channels (arXiv:2104.09864), scaled as the checkpoint asks.

    Megatron-Core builds in one set of Llama 3 constants; checkpoints state their own.

    Returns:
        fp32 [kv_channels / 2], in radians per token.
    """
    dim = architecture.kv_channels
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    frequencies = 1.0 / (architecture.rotary_base**exponents)
    if isinstance(architecture.rope_scaling, Llama3RopeScaling):
        return _llama3(frequencies, architecture.rope_scaling)
    return frequencies


def angles(position_ids: Tensor, frequencies: Tensor) -> Tensor:
    """The angle by which each pair of channels is turned, for Megatron-Core's layers.

    Args:
        position_ids: int64 [s].
        frequencies: fp32 [d / 2].

    Returns:
        fp32 [s, 1, 1, d], each angle at both channels of its pair, half the dimension apart.
    """
    turned = torch.outer(position_ids.float(), frequencies)
    return torch.cat((turned, turned), -1)[:, None, None, :]


def _llama3(frequencies: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Llama 3.1's rule: long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    wavelengths = 2 * math.pi / frequencies
    longest = scaling.original_max_position_embeddings / scaling.low_freq_factor
    shortest = scaling.original_max_position_embeddings / scaling.high_freq_factor
    share_kept = (scaling.original_max_position_embeddings / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - share_kept) * frequencies / scaling.factor + share_kept * frequencies
    stretched = torch.where(wavelengths > longest, frequencies / scaling.factor, between)
    return torch.where(wavelengths < shortest, frequencies, stretched)


def fused_rotary(hidden_states: Tensor, angles: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate in one pass, keeping only cosine and sine for the backward pass.

    It answers where Megatron-Core asks Transformer Engine for a fused kernel (`apply_rope_fusion`). A rotation's
    gradient is the opposite rotation, so the input need not be kept.

    Args:
        hidden_states: [s, b, n, d], queries or keys.
        angles: fp32 [s, 1, 1, d], position × frequency, both halves alike.
    """
    assert not interleaved, "the supported families rotate halves"
    return _Rotate.apply(hidden_states, *_cos_sin(angles, hidden_states.dtype))


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(cos, sin)
        return _rotate(hidden_states, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate_eagerly(hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = hidden_states.chunk(2, -1)
    return hidden_states * cos + torch.cat((-second, first), -1) * sin


_rotate = torch.compile(_rotate_eagerly, dynamic=True) if device.HAS_GPU else _rotate_eagerly


@functools.lru_cache(maxsize=4)
def _cos_sin(angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine, made once for all layers: Megatron-Core hands every layer the same `angles` object."""
    return angles.cos().to(dtype), angles.sin().to(dtype)
