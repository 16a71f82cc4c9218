"""Patches Megatron-Core where it uses functions of Transformer Engine or Apex although neither is installed."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import random
from torch import Tensor


class _NoFp8:
    """Transformer Engine's FP8GlobalStateManager where nothing computes in fp8."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def _norm(chunk_size: int, flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool) -> tuple[Tensor, None]:
    """Compute the norm of all tensors together, fp32 [1]; Megatron-Core's own waits for the GPU once a tensor."""
    return torch.stack(torch._foreach_norm(tensor_lists[0])).norm().reshape(1), None


def _scale(chunk_size: int, flag: Tensor, tensor_lists: list[list[Tensor]], factor: float) -> None:
    """Multiply in place; Megatron-Core's own makes a scaled copy of each tensor first."""
    sources, targets = tensor_lists
    if sources is not targets:
        torch._foreach_copy_(targets, sources)
    torch._foreach_mul_(targets, factor)


def patch_megatron() -> None:
    """Give Megatron-Core our functions in place of Apex's, and the names of Transformer Engine's that it expects."""
    module: Any = clip_grads
    module.l2_norm_impl, module.multi_tensor_scale_impl = _norm, _scale
    if hasattr(random, "FP8GlobalStateManager"):
        return
    # The recomputation of single modules asks for these whether or not anything is in fp8.
    module = random
    module.FP8GlobalStateManager = _NoFp8
    module.activation_recompute_forward = module.fp8_autocast = lambda **unused: contextlib.nullcontext()
