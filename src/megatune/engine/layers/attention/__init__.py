"""Core attention: packed rows, context parallelism, and the choice of kernels."""

from megatune.engine.layers.attention.core import CoreAttention
from megatune.engine.layers.attention.reference import reference_attention

__all__ = ["CoreAttention", "reference_attention"]
