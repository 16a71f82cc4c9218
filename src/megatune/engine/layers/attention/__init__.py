"""Core attention: packed rows, context parallelism, and the choice of kernels."""

from megatune.engine.layers.attention.core import CoreAttention

__all__ = ["CoreAttention"]
