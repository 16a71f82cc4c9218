"""RMSNorm with support for sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatune.engine import device


class RMSNorm(torch.nn.Module):
    """Root mean square normalization (arXiv:1910.07467), with statistics in fp32.

    Megatron-Core's local norm does not support sequence parallelism. With it each rank normalizes its own part of the
    sequence with a full copy of the weight, so the gradients of the copies must be summed over tensor-parallel ranks;
    Megatron-Core does so for weights with the attribute `sequence_parallel`.

    With Megatron-Core's `layernorm_zero_centered_gamma` it multiplies by 1 + its weight.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        weight = torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight = torch.nn.Parameter(weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.is_fused, self.is_zero_centered = config.rms_norm_fusion, config.layernorm_zero_centered_gamma

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize the last dimension, in the same dtype."""
        # 1 + weight needs more bits than a 16-bit weight has.
        weight = 1 + upcast(self.weight) if self.is_zero_centered else self.weight
        if not self.is_fused:
            wide = upcast(hidden_states)
            scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
            return (wide * scale * weight).to(hidden_states.dtype)
        if device.HAS_GPU and not self.is_zero_centered:  # one kernel forward and one backward
            return torch.nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.eps)
        return _Normalize.apply(hidden_states, weight, self.eps)


class UnweightedNorm(torch.nn.Module):
    """RMSNorm without a weight."""

    def __init__(self, config: Any, eps: float) -> None:
        super().__init__()
        self.eps, self.is_fused = eps, config.rms_norm_fusion

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize the last dimension, in the same dtype."""
        if not self.is_fused:
            wide = upcast(hidden_states)
            return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(hidden_states.dtype)
        if device.HAS_GPU:
            return torch.nn.functional.rms_norm(hidden_states, hidden_states.shape[-1:], None, self.eps)
        return _Normalize.apply(hidden_states, torch.ones((), device=hidden_states.device), self.eps)


class _Normalize(torch.autograd.Function):
    """RMSNorm as one autograd node. On a CPU torch uses many, which store fp32 intermediates and, when recomputed,
    add up the gradient of the input in another order."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        output, scale = _normalize(hidden_states, weight, eps)
        ctx.save_for_backward(hidden_states, weight, scale)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        return *_gradients(*ctx.saved_tensors, grad, *ctx.needs_input_grad[:2]), None


@device.compiled
def _normalize(hidden_states: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normalized last dimension, and the scale it was multiplied by, fp32 [..., 1]."""
    wide = upcast(hidden_states)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).mul_(weight).to(hidden_states.dtype), scale


@device.compiled
def _gradients(
    hidden_states: Tensor, weight: Tensor, scale: Tensor, grad: Tensor, of_hidden: bool, of_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    normalized, wide_grad = upcast(hidden_states) * scale, upcast(grad)
    grad_hidden = grad_weight = None
    if of_weight:
        grad_weight = (wide_grad * normalized).flatten(0, -2).sum(0).to(weight.dtype)
    if of_hidden:
        inner = wide_grad * weight
        grad_hidden = (inner - normalized * (inner * normalized).mean(-1, keepdim=True)).mul_(scale).to(grad.dtype)
    return grad_hidden, grad_weight


def upcast(values: Tensor) -> Tensor:
    """Convert values to fp32 unless they are wider."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
