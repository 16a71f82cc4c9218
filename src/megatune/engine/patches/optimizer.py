"""Patches of Megatron-Core's optimizer: our Adam, norm and scaling in place of Apex's, whose interfaces they have."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatune.config.settings import OptimizerSettings
from megatune.engine.adam import FusedAdam
from megatune.engine.muon import Muon
from megatune.engine.patches import Patch

_OPTIMIZER = "megatron.core.optimizer"

CLIPPING = Patch(
    f"{_OPTIMIZER}.clip_grads",
    ("l2_norm_impl", "multi_tensor_scale_impl"),
    "The norm waits for the GPU once a tensor, and scaling copies each tensor first.",
    {
        f"{_OPTIMIZER}.clip_grads:get_grad_norm_fp32": {
            "0.16": "3ab7a7bbb25c",
            "0.17": "e345de6ff5a0",
            "0.18": "2cf1d3d13aa7",
            "0.19": "c086cd323174",
        },
        f"{_OPTIMIZER}.clip_grads:clip_grad_by_total_norm_fp32": {
            "0.16": "d2d28092dcb2",
            "0.17": "76544578aa2f",
            "0.18": "19d15a603c4a",
        },
    },
)
ADAM = Patch(
    _OPTIMIZER,
    ("Adam", "DistributedOptimizer", "USING_PYTORCH_OPTIMIZER"),
    "Without Apex it takes torch's AdamW, which the distributed optimizer cannot load; ours has Apex's shape.",
    {
        f"{_OPTIMIZER}:_get_megatron_optimizer_based_on_param_groups": {
            "0.16": "176a5068cd92",
            "0.17": "42fd5230b5ed",
            "0.18": "9ca8d83fc49e",
            "0.19": "f4f1d380077e",
        }
    },
)
DISTRIBUTED = Patch(
    f"{_OPTIMIZER}.distrib_optimizer",
    ("Adam", "HAVE_APEX_OR_TE", "USING_APEX_OPTIMIZER"),
    "It checks the class that it is given; SGD is as elementwise as Adam.",
    {
        f"{_OPTIMIZER}.distrib_optimizer:DistributedOptimizer.__init__": {
            "0.16": "1ae3e73c6c3a",
            "0.18": "c93fc09b478d",
            "0.19": "5771a1b549f9",
        },
        f"{_OPTIMIZER}.distrib_optimizer:DistributedOptimizer.state_dict": {"0.16": "8881ca2f5638"},
        f"{_OPTIMIZER}.distrib_optimizer:DistributedOptimizer.load_state_dict": {
            "0.16": "393f78388da7",
            "0.18": "99be8b29719b",
            "0.19": "5c2af1e56e0b",
        },
    },
)
PATCHES = (CLIPPING, ADAM, DISTRIBUTED)


def install(settings: OptimizerSettings) -> None:
    """Patch what the next optimizer is built of."""
    CLIPPING.set(l2_norm_impl=_norm, multi_tensor_scale_impl=_scale)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    adam: Any = partial(
        FusedAdam,
        exp_avg_dtype=dtypes[settings.exp_avg_dtype],
        exp_avg_sq_dtype=dtypes[settings.exp_avg_sq_dtype],
        holds_masters=settings.optimizer_cpu_offload,
        host_fraction=settings.optimizer_offload_fraction if settings.optimizer_cpu_offload else 0.0,
    )
    if settings.optimizer == "muon":
        momentum, nesterov, scale = settings.muon_momentum, settings.muon_nesterov, settings.muon_scale
        adam = partial(Muon, momentum=momentum, nesterov=nesterov, scale=scale)
    distributed = _WideGradients if settings.optimizer_cpu_offload else DistributedOptimizer
    ADAM.set(Adam=adam, DistributedOptimizer=distributed, USING_PYTORCH_OPTIMIZER=False)
    DISTRIBUTED.set(Adam=(FusedAdam, torch.optim.SGD), HAVE_APEX_OR_TE=True, USING_APEX_OPTIMIZER=True)


class _WideGradients(DistributedOptimizer):
    """The distributed optimizer over one that holds the master weights: gradients are checked, clipped and used in
    fp32, as with master weights of its own, whatever they were summed in."""

    def _copy_model_grads_to_main_grads(self) -> None:
        super()._copy_model_grads_to_main_grads()
        for group in () if self.is_stub_optimizer else self.optimizer.param_groups:
            for param in group["params"]:
                param.decoupled_grad = param.decoupled_grad.float()


def _norm(chunk_size: int, flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool) -> tuple[Tensor, None]:
    """Compute the norm of all tensors together, fp32 [1]; Megatron-Core's own waits for the GPU once a tensor."""
    return torch.stack(torch._foreach_norm(tensor_lists[0])).norm().reshape(1), None


def _scale(chunk_size: int, flag: Tensor, tensor_lists: list[list[Tensor]], factor: float) -> None:
    """Multiply in place; Megatron-Core's own makes a scaled copy of each tensor first."""
    sources, targets = tensor_lists
    if sources is not targets:
        torch._foreach_copy_(targets, sources)
    torch._foreach_mul_(targets, factor)
