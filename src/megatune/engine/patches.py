"""Patches of Megatron-Core: the names in its modules that this engine replaces, each with its reason.

Some are needed for a model, others for the optimizer; no other file of the engine patches Megatron-Core. (On a machine
without a GPU, device.py replaces calls of torch, and half_precision.py its kernels; groups.py replaces how gloo groups
are created.)

A patch relies on functions of Megatron-Core: those that it replaces, and those that read the replaced names. A digest
of the source of each is recorded, by the version that introduced it; tests/engine/test_patches.py compares them with
the installed version.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import layers, random
from torch import Tensor

from megatune.config.settings import OptimizerSettings
from megatune.engine import device
from megatune.engine.adam import FusedAdam
from megatune.engine.layers.feed_forward import fused_swiglu
from megatune.engine.layers.gradients import add_weight_gradient, placeholder_gradient
from megatune.engine.layers.moe.dispatcher import caching_host_values
from megatune.engine.muon import Muon

# The versions whose sources were reviewed.
VERSIONS = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")


@dataclass(frozen=True, slots=True)
class Patch:
    """Names that are replaced in one module of Megatron-Core.

    Attributes:
        reason: why Megatron-Core's implementation cannot be used.
        relies_on: functions and classes as MODULE:NAME, each with the digests of its source, by the first version that
            has this source.
    """

    module: str
    names: tuple[str, ...]
    reason: str
    relies_on: Mapping[str, Mapping[str, str]]

    def set(self, **values: Any) -> None:
        """Replace all of the names."""
        assert set(values) == set(self.names), f"{self.module}: {set(values) ^ set(self.names)}"
        module = importlib.import_module(self.module)
        for name, value in values.items():
            setattr(module, name, value)

    def define(self, **values: Any) -> None:
        """Define those of the names that the module lacks."""
        module = importlib.import_module(self.module)
        self.set(**{name: getattr(module, name, value) for name, value in values.items()})


_RANDOM = "megatron.core.tensor_parallel.random"
_LAYERS = "megatron.core.tensor_parallel.layers"
_MOE = "megatron.core.transformer.moe"

RECOMPUTATION = Patch(
    "megatron.core.tensor_parallel",
    ("checkpoint",),
    "Recomputation runs inputs without gradient, such as those of frozen layers, as evaluation (engine/trained.py); it"
    " also repeats host synchronizations whose results are known (engine/layers/moe/dispatcher.py).",
    {
        f"{_RANDOM}:checkpoint": {"0.16": "7d8516d00a8f", "0.17": "67b338de8dcb", "0.18": "1d01f0636666"},
        f"{_RANDOM}:CheckpointFunction": {"0.16": "933a088081ce", "0.17": "1ff4e363bb98"},
    },
)
FP8 = Patch(
    _RANDOM,
    ("FP8GlobalStateManager", "activation_recompute_forward", "fp8_autocast"),
    "Recomputation of single modules refers to them even without fp8; without Transformer Engine they are missing.",
    {
        f"{_RANDOM}:CheckpointWithoutOutput": {"0.16": "59c4aa8a5a42", "0.17": "5209ac7cdee4"},
        f"{_RANDOM}:CheckpointWithoutOutputFunction": {"0.16": "4702b39ed537", "0.17": "65badb36f491"},
    },
)
STORAGE = Patch(
    _RANDOM,
    ("_get_share_storage",),
    "From 0.17 on, a C++ extension restores the memory of recomputed outputs; ours copies, as 0.16 does.",
    {f"{_RANDOM}:CheckpointWithoutOutput": FP8.relies_on[f"{_RANDOM}:CheckpointWithoutOutput"]},
)
ROUTER = Patch(
    f"{_MOE}.moe_utils",
    ("te_general_gemm",),
    "The router uses Transformer Engine's GEMM unless this name is None; without the package it is missing.",
    {f"{_MOE}.moe_utils:RouterGatingLinearFunction": {"0.16": "32a20173b5a1"}},
)
LINEAR = Patch(
    _LAYERS,
    (
        "LinearWithGradAccumulationAndAsyncCommunication",
        "fused_weight_gradient_mlp_cuda",
        "_grad_accum_fusion_available",
    ),
    "The fusion of gradient accumulation requires Apex, and returns placeholder gradients as large as the weights.",
    {
        f"{_LAYERS}:LinearWithGradAccumulationAndAsyncCommunication": {
            "0.16": "b670145d8e1e",
            "0.18": "e9f087cebfb6",
            "0.19": "6143fe8d2e29",
        },
        f"{_LAYERS}:linear_with_grad_accumulation_and_async_allreduce": {
            "0.16": "212ab88edb75",
            "0.17": "19ae30281128",
            "0.19": "89f27eb775d1",
        },
        f"{_LAYERS}:ColumnParallelLinear.__init__": {
            "0.16": "7c3a8e3b79e9",
            "0.18": "3eac12b2da87",
            "0.19": "978921ec421d",
        },
    },
)
SWIGLU = Patch(
    f"{_MOE}.shared_experts",
    ("bias_swiglu_impl",),
    "The fusion, used when shared experts overlap with token dispatch, rounds seven times unless it is compiled; ours"
    " rounds twice. See engine/layers/feed_forward.py.",
    {
        "megatron.core.fusions.fused_bias_swiglu:bias_swiglu_impl": {"0.16": "a1876cdd0071"},
        f"{_MOE}.shared_experts:SharedExpertMLP.linear_fc1_forward_and_act": {
            "0.16": "28477cef9761",
            "0.17": "b82b598943c7",
            "0.18": "6f2f50c9515f",
        },
    },
)

_OPTIMIZER = "megatron.core.optimizer"

CLIPPING = Patch(
    f"{_OPTIMIZER}.clip_grads",
    ("l2_norm_impl", "multi_tensor_scale_impl"),
    "The norm synchronizes with the GPU once per tensor, and scaling copies each tensor first.",
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
    "Without Apex it uses torch's AdamW, which the distributed optimizer cannot load; ours has Apex's interface.",
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
    "It checks the optimizer's class; SGD is as elementwise as Adam.",
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
PATCHES = (RECOMPUTATION, FP8, STORAGE, ROUTER, LINEAR, SWIGLU, CLIPPING, ADAM, DISTRIBUTED)


def define_missing_names() -> None:
    """Define names that come with Transformer Engine, and make the router work without it, and recomputation without a
    C++ compiler."""
    FP8.define(
        FP8GlobalStateManager=SimpleNamespace(is_fp8_enabled=lambda: False),
        activation_recompute_forward=lambda **unused: contextlib.nullcontext(),
        fp8_autocast=lambda **unused: contextlib.nullcontext(),
    )
    ROUTER.set(te_general_gemm=None)
    STORAGE.set(_get_share_storage=lambda: _fill_storage)


def patch_model(*, swiglu: bool, weight_gradients: bool) -> None:
    """Patch what the next model uses.

    Args:
        swiglu: bias_activation_fusion of shared experts.
        weight_gradients: gradient_accumulation_fusion.
    """
    RECOMPUTATION.set(checkpoint=_checkpoint)
    define_missing_names()
    if swiglu:
        SWIGLU.set(bias_swiglu_impl=_bias_swiglu)
    if weight_gradients:
        LINEAR.set(
            LinearWithGradAccumulationAndAsyncCommunication=_Linear,
            fused_weight_gradient_mlp_cuda=_APEX,
            _grad_accum_fusion_available=True,
        )


def _checkpoint(function: Any, distribute_saved_activations: bool, *args: Any) -> Any:
    if any(isinstance(each, Tensor) and each.requires_grad for each in args):
        return random.checkpoint(caching_host_values(function), distribute_saved_activations, *args)
    return function(*args)


def _fill_storage(output: Tensor, recomputed: Tensor) -> None:
    """Refill the freed storage of an output from its recomputation; views and version counters stay valid."""
    storage, source = output.untyped_storage(), recomputed.untyped_storage()
    storage.resize_(source.size())
    storage.copy_(source)


def _bias_swiglu(gate_up: Tensor, bias: Tensor | None, *unused: bool) -> Tensor:
    """Take the arguments of Megatron-Core's bias_swiglu_impl; the remaining ones concern fp8 and offloading."""
    return fused_swiglu(gate_up if bias is None else gate_up + bias)


_StockLinear: Any = layers.LinearWithGradAccumulationAndAsyncCommunication


class _Linear(_StockLinear):  # type: ignore[misc]
    """Megatron-Core's linear layer without its placeholder gradients, which are as large as the weights."""

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.gradient_accumulation_fusion:
            return _StockLinear.backward(ctx, grad_output)  # type: ignore[no-any-return]
        _, weight = ctx.saved_tensors
        # Without this attribute Megatron-Core allocates no placeholder gradient.
        del weight.grad_added_to_main_grad
        grad_input, _, *others = _StockLinear.backward(ctx, grad_output)
        return grad_input, placeholder_gradient(weight), *others


def _accumulate(input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Adapt Apex's argument order to `add_weight_gradient`."""
    add_weight_gradient(main_grad, grad_output, input)


# Apex has one function for fp32 gradients and one for 16-bit ones; ours handles both.
_APEX = SimpleNamespace(wgrad_gemm_accum_fp32=_accumulate, wgrad_gemm_accum_fp16=_accumulate)


def patch_optimizer(settings: OptimizerSettings) -> None:
    """Patch what the next optimizer uses."""
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
    """A distributed optimizer for an inner optimizer that holds the master weights: gradients are checked, clipped and
    used in fp32, regardless of the dtype in which they were summed."""

    def _copy_model_grads_to_main_grads(self) -> None:
        super()._copy_model_grads_to_main_grads()
        for group in () if self.is_stub_optimizer else self.optimizer.param_groups:
            for param in group["params"]:
                param.decoupled_grad = param.decoupled_grad.float()


def _norm(chunk_size: int, flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool) -> tuple[Tensor, None]:
    """Compute the norm of all tensors together, fp32 [1]; Megatron-Core's synchronizes with the GPU once per tensor."""
    return device.norm(tensor_lists[0]).reshape(1), None


def _scale(chunk_size: int, flag: Tensor, tensor_lists: list[list[Tensor]], factor: float) -> None:
    """Scale in place; Megatron-Core's implementation creates a scaled copy of each tensor first."""
    sources, targets = tensor_lists
    if sources is not targets:
        torch._foreach_copy_(targets, sources)
    torch._foreach_mul_(targets, factor)
