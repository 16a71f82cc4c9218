"""Weight gradients added straight into `main_grad`, DDP's buffer, instead of into a tensor of their own first.

Megatron-Core asks Apex's CUDA extension for this (`gradient_accumulation_fusion`); torch's matrix product does it, too.

Legend: n tokens, i input features, o output features of this rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatune.engine import device


def add_weight_gradient(main_grad: Tensor, grad_output: Tensor, input: Tensor) -> None:
    """Add grad_outputᵀ · input, of [n, o] and [n, i] of one dtype, to `main_grad`, [o, i], contiguous; unrounded where
    that is wider than the inputs."""
    if main_grad.dtype == input.dtype:
        main_grad.addmm_(grad_output.t(), input)
    elif device.HAS_GPU and main_grad.dtype == torch.float32:
        torch.addmm(main_grad, grad_output.t(), input, out_dtype=torch.float32, out=main_grad)
    else:
        main_grad.addmm_(grad_output.t().to(main_grad.dtype), input.to(main_grad.dtype))


def announced_gradient(weight: Tensor) -> Tensor | None:
    """Return what a backward pass hands to autograd for a weight whose gradient it has added to `main_grad` itself.

    DDP's hook wants a gradient, so that it runs on the thread that starts its communication, and discards it unread
    where `grad_added_to_main_grad` is set. The weight's own memory has the right shape and costs none. A weight that
    the embedding shares gets a real gradient from there, to which nothing must be added.
    """
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return None if getattr(weight, "zero_out_wgrad", False) else weight.detach()
