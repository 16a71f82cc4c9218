"""Helpers for backward passes: accumulating weight gradients directly into `main_grad`, DDP's buffer, and recomputing
operations instead of storing their intermediates.

For the former Megatron-Core requires Apex's CUDA extension (`gradient_accumulation_fusion`); torch's matrix product can
do it, too.

Legend: n tokens, i input features, o output features of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatune.engine import device


def add_weight_gradient(main_grad: Tensor, grad_output: Tensor, input: Tensor) -> None:
    """Add grad_outputᵀ · input, of [n, o] and [n, i] of one dtype, to `main_grad`, [o, i], contiguous; without rounding
    to the inputs' dtype if `main_grad` is wider."""
    if main_grad.dtype == input.dtype:
        main_grad.addmm_(grad_output.t(), input)
    elif device.HAS_GPU and main_grad.dtype == torch.float32:
        torch.addmm(main_grad, grad_output.t(), input, out_dtype=torch.float32, out=main_grad)
    else:
        main_grad.addmm_(grad_output.t().to(main_grad.dtype), input.to(main_grad.dtype))


def placeholder_gradient(weight: Tensor) -> Tensor | None:
    """Return what a backward pass returns to autograd for a weight whose gradient it has already added to `main_grad`.

    DDP's hook needs some gradient to be called and to start its communication, and ignores the values if
    `grad_added_to_main_grad` is set. The weight's own memory has the right shape and costs nothing. A weight that is
    tied to the embedding gets a real gradient from there, to which nothing may be added.
    """
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return None if getattr(weight, "zero_out_wgrad", False) else weight.detach()


def recompute_in_backward(compute: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Run pointwise operations that store only their arguments, and are recomputed in the backward pass."""
    output: Tensor = _RecomputeInBackward.apply(compute, *arguments)
    return output


class _RecomputeInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], *arguments: Any) -> Tensor:  # type: ignore[override]
        ctx.compute = compute
        ctx.is_tensor = [isinstance(each, Tensor) for each in arguments]
        ctx.others = [each for each in arguments if not isinstance(each, Tensor)]
        ctx.save_for_backward(*(each for each in arguments if isinstance(each, Tensor)))
        return compute(*arguments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        tensors, others = iter(ctx.saved_tensors), iter(ctx.others)
        arguments = [next(tensors).detach() if is_tensor else next(others) for is_tensor in ctx.is_tensor]
        needed = [
            each.requires_grad_() for each, needs in zip(arguments, ctx.needs_input_grad[1:], strict=True) if needs
        ]
        with torch.enable_grad():
            output = ctx.compute(*arguments)
        found = iter(torch.autograd.grad(output, needed, grad))
        return None, *(next(found) if needs else None for needs in ctx.needs_input_grad[1:])
