"""Megatron-Core's optimizer with our Adam, and a view of its state by model parameter."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from torch import Tensor

from megatune.architecture import Architecture
from megatune.config.settings import OptimizerSettings, ParallelSettings, PrecisionSettings
from megatune.engine import groups
from megatune.engine.adam import MASTER, FusedAdam
from megatune.engine.muon import Muon, ParamRange
from megatune.engine.patches import patch_optimizer
from megatune.families.weights import Role, Stack, Weight

# The optimizer as the rest of the project sees it.
Optimizer: TypeAlias = ChainedOptimizer


@dataclass(frozen=True, slots=True)
class MainShard:
    """This rank's optimizer shard of one model parameter: elements start..stop of it, flattened.

    Attributes:
        main: the values that the optimizer updates, fp32 [stop - start]; for an fp32 parameter its own memory; on the
            host with optimizer_cpu_offload.
        grad: the gradient of those elements after the backward pass, fp32 [stop - start].
        state: the optimizer's running averages, each like `main`; empty before `init_state`.
    """

    start: int
    stop: int
    main: Tensor
    grad: Tensor
    state: dict[str, Tensor]


class SharedLossScale(DynamicGradScaler):
    """The loss scale of fp16, shared by all parts of the optimizer.

    Experts' parameters are in a part of their own. Megatron-Core gives each part a scaler that reacts to the overflows
    of that part only, while the loss is multiplied by the first part's scale. Here all parts share one scaler, which
    changes once a step, after all parts have unscaled their gradients.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        # The growth and backoff factors are Megatron-Core's.
        super().__init__(
            config.initial_loss_scale, config.min_loss_scale, 2.0, 0.5, config.loss_scale_window, config.hysteresis
        )
        self._overflowed = False

    def update(self, found_inf: bool) -> None:
        """Record whether one part overflowed."""
        self._overflowed |= found_inf

    @property
    def is_smallest(self) -> bool:
        """Whether the scale has reached its minimum; synchronizes with the device."""
        return bool(self.scale <= self.min_scale)

    def finish_step(self) -> None:
        """Update the scale once all parts have reported."""
        super().update(self._overflowed)
        self._overflowed = False


def build_optimizer(
    model: list[DistributedDataParallel],
    architecture: Architecture,
    settings: OptimizerSettings,
    parallel: ParallelSettings,
    precision: PrecisionSettings,
    adapter_ratio: float | None = None,
) -> ChainedOptimizer:
    """Build Megatron-Core's optimizer for these model chunks, with its state allocated.

    Args:
        adapter_ratio: loraplus_lr_ratio.
    """
    patch_optimizer(settings)
    config = OptimizerConfig(
        # Muon is our Adam with other updates for matrices; Megatron-Core's needs a package that requires Python 3.12.
        optimizer="sgd" if settings.optimizer == "sgd" else "adam",
        lr=settings.learning_rate,
        min_lr=0.0,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_epsilon,
        sgd_momentum=settings.sgd_momentum,
        clip_grad=settings.max_grad_norm,
        fp16=precision.fp16,
        bf16=precision.bf16,
        params_dtype=getattr(torch, precision.params_dtype),
        initial_loss_scale=2.0**32,  # as Megatron-LM's defaults
        loss_scale_window=1000,
        use_distributed_optimizer=shards_optimizer(parallel, settings),
        overlap_param_gather=parallel.overlap_param_gather,
    )
    # Megatron-Core's flag for an optimizer that holds the master weights: none are allocated on the device.
    config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = settings.optimizer_cpu_offload
    overrides = get_standard_config_overrides(config) | dict(_own_learning_rates(settings, adapter_ratio or 1.0))
    optimizer = get_megatron_optimizer(config, model, overrides, use_gloo_process_groups=False)
    if precision.fp16:
        scale = SharedLossScale(config)
        for part in optimizer.chained_optimizers:
            part.grad_scaler = scale
    for group in optimizer.param_groups:
        # As Megatron-LM's scheduler does; otherwise norms and biases would be decayed, too.
        group["weight_decay"] = settings.weight_decay * group.get("wd_mult", 1.0)
    # Megatron-Core's schedules scale the loss before the backward pass. The model must not hold the optimizer:
    # the optimizer holds the model through autograd nodes, a reference cycle that the garbage collector cannot see.
    scale_loss = weakref.WeakMethod(optimizer.scale_loss)
    model[0].config.grad_scale_func = lambda loss: scale_loss()(loss)  # type: ignore[misc]
    _init_state(optimizer, architecture, settings)
    return optimizer


def _own_learning_rates(settings: OptimizerSettings, ratio: float) -> Iterator[tuple[ParamKey, Any]]:
    """Yield the parameters that have their own learning rate, and the factor by which it differs.

    A parameter is in at most one of these groups.

    Args:
        ratio: of the parameters that are applied after A: B and magnitudes (LoRA+, arXiv:2402.12354).
    """
    for name, rate, stacks in (
        ("", None, {Stack.DECODER}),
        ("vision_lr", settings.vision_lr, {Stack.VISION}),
        ("merger_lr", settings.merger_lr, {Stack.PROJECTOR, Stack.DEEPSTACK}),
    ):
        own = 1.0 if rate is None else rate / settings.learning_rate
        for after_a, factor in ((False, own), (True, own * ratio)):
            if factor != 1.0:
                which = f"{name} after lora_A" if after_a else name
                yield ParamKey(predicate=ParamPredicate(which, partial(_matches, stacks, after_a))), {"lr_mult": factor}


def _matches(stacks: set[Stack], after_a: bool, parameter: Any) -> bool:
    entry: Weight = parameter.entry
    is_after_a = entry.role is Role.ADAPTER and not entry.engine.endswith(".lora_A")
    return entry.stack in stacks and is_after_a == after_a


def shards_optimizer(parallel: ParallelSettings, optimizer: OptimizerSettings) -> bool:
    """Return whether optimizer state is sharded. Without replicas to shard it over, the distributed optimizer would
    only copy gradients and parameters back and forth, but only it supports master weights on the host."""
    coords = groups.coordinates()
    has_replicas = max(coords.replica_size, coords.expert_replica_size) > 1
    shards = parallel.use_distributed_optimizer and (has_replicas or parallel.overlap_param_gather)
    return shards or optimizer.optimizer_cpu_offload


def _init_state(optimizer: ChainedOptimizer, architecture: Architecture, settings: OptimizerSettings) -> None:
    for part in _parts(optimizer):
        inner = part.optimizer
        if isinstance(inner, Muon):
            is_distributed = isinstance(part, DistributedOptimizer)
            buckets = [bucket for buffer in part.buffers for bucket in buffer.buckets] if is_distributed else []
            inner.attach(
                dict(_param_ranges(part)), architecture, buckets, part.data_parallel_group if is_distributed else None
            )
        if isinstance(inner, FusedAdam):
            inner.init_state()
        elif settings.sgd_momentum:
            for group in inner.param_groups:
                for param in group["params"]:
                    inner.state[param]["momentum_buffer"] = torch.zeros_like(param.data)


def main_shards(optimizer: ChainedOptimizer) -> dict[Tensor, MainShard]:
    """Return this rank's shard of the optimizer by model parameter. With the distributed optimizer a data-parallel rank
    holds parts of some parameters and nothing of others."""
    shards: dict[Tensor, MainShard] = {}
    for part in _parts(optimizer):
        for param, (main, start, stop) in _param_ranges(part):
            state = {key: value.view(-1) for key, value in part.optimizer.state.get(main, {}).items()}
            values = state.pop(MASTER, main.data.view(-1))
            shards[param] = MainShard(start, stop, values, param.main_grad.view(-1)[start:stop], state)
    return shards


def _param_ranges(part: Any) -> Iterator[tuple[Any, ParamRange]]:
    if isinstance(part, DistributedOptimizer):
        buckets = [bucket for by_dtype in part.gbuf_ranges for held in by_dtype.values() for bucket in held]
        for param, ranges in (pair for bucket in buckets for pair in bucket["param_map"].items()):
            group, order = part.model_param_group_index_map[param]
            main = part.optimizer.param_groups[group]["params"][order]
            yield param, ParamRange(main, ranges["param"].start, ranges["param"].end)
        return
    if isinstance(part, Float16OptimizerWithFloat16Params):
        models = [*part.float16_groups, *part.fp32_from_fp32_groups]
        mains = [*part.fp32_from_float16_groups, *part.fp32_from_fp32_groups]
    else:
        models = mains = [group["params"] for group in part.optimizer.param_groups]
    for param, main in zip(chain(*models), chain(*mains), strict=True):
        yield param, ParamRange(main, 0, param.numel())


def state_tensors(optimizer: ChainedOptimizer) -> Iterator[Tensor]:
    """Yield the tensors that the optimizer holds on this rank: main values and running averages."""
    for part in _parts(optimizer):
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def scalars(optimizer: ChainedOptimizer) -> dict[str, float]:
    """Return the optimizer's state besides tensors: its step count and, in fp16, the loss scale."""
    counts = [group.get("step", 0) for part in _parts(optimizer) for group in part.optimizer.param_groups]
    values: dict[str, float] = {"step": max(counts)} if counts else {}
    scale = loss_scale(optimizer)
    if scale is not None:
        state = scale.state_dict()
        values["loss_scale"] = float(state.pop("scale"))
        values |= state
    return values


def load_scalars(optimizer: ChainedOptimizer, values: dict[str, float]) -> None:
    """Restore the state that `scalars` returned."""
    for part in _parts(optimizer):
        for group in part.optimizer.param_groups:
            if "step" in group:
                group["step"] = int(values["step"])
    scale = loss_scale(optimizer)
    if scale is not None and "loss_scale" in values:
        trackers = {name: int(values[name]) for name in ("growth_tracker", "hysteresis_tracker")}
        scale.load_state_dict({"scale": torch.tensor([values["loss_scale"]], dtype=torch.float), **trackers})


def _parts(optimizer: ChainedOptimizer) -> Iterator[Any]:
    """Return the parts of the optimizer that have parameters on this rank."""
    return (part for part in optimizer.chained_optimizers if part.optimizer is not None)


def loss_scale(optimizer: ChainedOptimizer) -> SharedLossScale | None:
    """Return the loss scale of fp16; None for other dtypes."""
    return getattr(optimizer.chained_optimizers[0], "grad_scaler", None)


@torch.no_grad()
def step(
    optimizer: ChainedOptimizer, learning_rate: float, accepts: Callable[[float], bool] = math.isfinite
) -> tuple[bool, float]:
    """Unscale, check and clip gradients, and update parameters.

    Args:
        accepts: called with the norm of all gradients; if it returns False, the update is skipped. Ranks must agree.

    Returns:
        Whether the parameters were updated, and the norm of all gradients before clipping: infinite if fp16
        overflowed (`accepts` is then not called), and NaN if it overflowed at the smallest loss scale.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["lr_mult"]
    try:
        overflowed = optimizer.prepare_grads()
        scale = loss_scale(optimizer)
        is_smallest = overflowed and scale is not None and scale.is_smallest
        if scale is not None:
            scale.finish_step()
        if overflowed and not is_smallest:
            return False, math.inf
        grad_norm = math.nan if overflowed else float(optimizer.get_grad_norm())
        if not accepts(grad_norm):
            return False, grad_norm
        for part in optimizer.chained_optimizers:
            parameters = [] if part.is_stub_optimizer else part.get_parameters()
            if parameters and part.config.clip_grad > 0:
                decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, grad_norm, decoupled)
        optimizer.step_with_ready_grads()
        return True, grad_norm
    finally:
        # In fp32 gradients alias main_grad: if they stayed set, the next backward pass would add them to themselves.
        optimizer.zero_grad()
