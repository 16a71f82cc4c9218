"""Core attention: packed rows, context parallelism, and the choice of kernels."""

from megatune.engine.layers.attention.core import CoreAttention, reference_attention

__all__ = ["CoreAttention", "reference_attention"]
