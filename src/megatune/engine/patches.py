"""Patches of Megatron-Core: which names of its modules this engine sets, why, and what each was checked with.

A patch relies on functions of Megatron-Core: those that it replaces, and those that read what it sets. Their sources
were read; a digest of each, by version, says of which text. tests/engine/test_patches.py compares them with what is
installed, and refuses names that are set without an entry here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Digests = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Patch:
    """Names that are set in one module of Megatron-Core.

    Attributes:
        reason: why Megatron-Core's own do not serve.
        relies_on: functions and classes as MODULE:NAME, each with the digests of its source by version.
    """

    module: str
    names: tuple[str, ...]
    reason: str
    relies_on: Mapping[str, Digests]


_RANDOM = "megatron.core.tensor_parallel.random"
_LAYERS = "megatron.core.tensor_parallel.layers"
_OPTIMIZER = "megatron.core.optimizer"
_MOE = "megatron.core.transformer.moe"

PATCHES = (
    Patch(
        "megatron.core.tensor_parallel",
        ("checkpoint",),
        "Recomputation runs what has no gradient as an evaluation, and frozen layers have none; see engine/frozen.py.",
        {
            f"{_RANDOM}:checkpoint": {"0.16.1": "7d8516d00a8f"},
            f"{_RANDOM}:CheckpointFunction": {"0.16.1": "933a088081ce"},
        },
    ),
    Patch(
        _RANDOM,
        ("FP8GlobalStateManager", "activation_recompute_forward", "fp8_autocast"),
        "The recomputation of single modules uses them in fp8 or not; without Transformer Engine they are missing.",
        {
            f"{_RANDOM}:CheckpointWithoutOutput": {"0.16.1": "59c4aa8a5a42"},
            f"{_RANDOM}:CheckpointWithoutOutputFunction": {"0.16.1": "4702b39ed537"},
        },
    ),
    Patch(
        _LAYERS,
        (
            "LinearWithGradAccumulationAndAsyncCommunication",
            "fused_weight_gradient_mlp_cuda",
            "_grad_accum_fusion_available",
        ),
        "The fusion of gradient accumulation asks for Apex, and announces gradients by tensors as large as weights.",
        {
            f"{_LAYERS}:LinearWithGradAccumulationAndAsyncCommunication": {"0.16.1": "b670145d8e1e"},
            f"{_LAYERS}:linear_with_grad_accumulation_and_async_allreduce": {"0.16.1": "212ab88edb75"},
            f"{_LAYERS}:ColumnParallelLinear.__init__": {"0.16.1": "7c3a8e3b79e9"},
        },
    ),
    Patch(
        f"{_MOE}.shared_experts",
        ("bias_swiglu_impl",),
        "The fusion rounds seven times where it is not compiled; ours twice. See engine/layers/feed_forward.py.",
        {
            "megatron.core.fusions.fused_bias_swiglu:bias_swiglu_impl": {"0.16.1": "a1876cdd0071"},
            f"{_MOE}.shared_experts:SharedExpertMLP.linear_fc1_forward_and_act": {"0.16.1": "28477cef9761"},
        },
    ),
    Patch(
        f"{_OPTIMIZER}.clip_grads",
        ("l2_norm_impl", "multi_tensor_scale_impl"),
        "The norm waits for the GPU once a tensor, and scaling copies each tensor first.",
        {
            f"{_OPTIMIZER}.clip_grads:get_grad_norm_fp32": {"0.16.1": "3ab7a7bbb25c"},
            f"{_OPTIMIZER}.clip_grads:clip_grad_by_total_norm_fp32": {"0.16.1": "d2d28092dcb2"},
        },
    ),
    Patch(
        _OPTIMIZER,
        ("Adam", "DistributedOptimizer", "USING_PYTORCH_OPTIMIZER"),
        "Without Apex it takes torch's AdamW, which the distributed optimizer cannot load; ours has Apex's shape.",
        {f"{_OPTIMIZER}:_get_megatron_optimizer_based_on_param_groups": {"0.16.1": "176a5068cd92"}},
    ),
    Patch(
        f"{_OPTIMIZER}.distrib_optimizer",
        ("Adam", "HAVE_APEX_OR_TE", "USING_APEX_OPTIMIZER"),
        "It checks the class that it is given; SGD is as elementwise as Adam.",
        {
            f"{_OPTIMIZER}.distrib_optimizer:DistributedOptimizer.__init__": {"0.16.1": "1ae3e73c6c3a"},
            f"{_OPTIMIZER}.distrib_optimizer:DistributedOptimizer.state_dict": {"0.16.1": "8881ca2f5638"},
            f"{_OPTIMIZER}.distrib_optimizer:DistributedOptimizer.load_state_dict": {"0.16.1": "393f78388da7"},
        },
    ),
    Patch(
        f"{_MOE}.moe_utils",
        ("te_general_gemm",),
        "The router's product asks whether it is None; without Transformer Engine the name is missing.",
        {f"{_MOE}.moe_utils:RouterGatingLinearFunction": {"0.16.1": "32a20173b5a1"}},
    ),
)
_DECLARED = frozenset((patch.module, name) for patch in PATCHES for name in patch.names)


def replace(module: str, **values: Any) -> None:
    """Set names of a module of Megatron-Core, which an entry of `PATCHES` declares."""
    for name, value in values.items():
        assert (module, name) in _DECLARED, f"{module}.{name} is not in PATCHES"
        setattr(importlib.import_module(module), name, value)


def define(module: str, **values: Any) -> None:
    """Set those names that the module does not have: they come with Transformer Engine."""
    found = importlib.import_module(module)
    replace(module, **{name: value for name, value in values.items() if not hasattr(found, name)})
