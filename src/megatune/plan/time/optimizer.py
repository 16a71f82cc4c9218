"""What happens once a step: gradients are summed over ranks, the optimizer updates, new weights are collected."""

from __future__ import annotations

from typing import NamedTuple

from megatune.config.groups.optimizer import OptimizerSettings
from megatune.plan.case import Case
from megatune.plan.memory.parameters import stage_parameters
from megatune.plan.time.communication import Group, all_gather, all_reduce, group_of
from megatune.plan.time.efficiency import memory_seconds
from megatune.plan.time.work import Work, gradient_itemsize

# Megatron-Core's buckets of overlapped reduction: at least so many elements, and a million for each rank.
_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000
# Of a pass that an exchange runs beside, what hides it: both share memory bandwidth and multiprocessors.
HIDING = 0.8
# The host's memory and processor, of one rank, and the way there.
_HOST_BANDWIDTH = 12e9


class Reduction(NamedTuple):
    """Seconds, whether or not something hides them.

    Attributes:
        reduce: of gradients. gather: of updated weights.
        last: of the last bucket, which nothing is left to hide behind.
    """

    reduce: float
    gather: float
    last: float


def data_groups(case: Case) -> tuple[Group, Group]:
    """The ranks that hold the same weights: outside of experts, and of experts."""
    parallel = case.settings.parallel
    experts = parallel.expert_tensor_size * parallel.expert_model_parallel_size
    return (
        group_of(case, case.shard_size, parallel.tensor_model_parallel_size),
        group_of(case, case.expert_shard_size, experts),
    )


def reduction(case: Case, stage: int) -> Reduction:
    """Of a stage's trained parameters, over both kinds of groups.

    Under the distributed optimizer gradients are reduce-scattered, and weights gathered, in the dtypes of their
    buffers; otherwise gradients are all-reduced.
    """
    settings, elements = case.settings, stage_parameters(case, stage)
    parallel = settings.parallel
    itemsize, gradient = 4 if settings.precision.params_dtype == "float32" else 2, gradient_itemsize(settings)
    reduce = gather = last = 0.0
    for group, count in zip(data_groups(case), (elements.trained_dense, elements.trained_expert), strict=True):
        if not count or group.size == 1:
            continue
        exchange = all_gather if parallel.use_distributed_optimizer else all_reduce
        reduce += exchange(group, count * gradient)
        bucket = min(count, max(_BUCKET, _BUCKET_PER_RANK * group.size))
        last += exchange(group, bucket * gradient)
        if parallel.use_distributed_optimizer:
            gather += all_gather(group, count * itemsize)
    return Reduction(reduce, gather, last)


def exposed_seconds(case: Case, exchange: Reduction, forward: float, backward: float) -> float:
    """What of it is not hidden.

    Args:
        forward, backward: seconds of a stage's last micro-batch backward and first one forward, beside which gradients
            go out and weights come in where settings say so.
    """
    parallel = case.settings.parallel
    reduce, gather = exchange.reduce, exchange.gather
    if parallel.overlap_grad_reduce:
        reduce = max(min(exchange.last, reduce), reduce - HIDING * backward)
    if parallel.overlap_param_gather:
        gather = max(0.0, gather - HIDING * forward)
    return reduce + gather


def optimizer_seconds(case: Case, work: Work, stage: int) -> float:
    """Scaling and clipping of gradients, the update, and zeroing: passes over memory.

    Of each trained element gradients are zeroed, scaled by the number of tokens (read and written); of those that this
    rank updates the norm reads them, clipping reads and writes them, Adam reads them, reads and writes the master
    weight and both averages, and writes the weight.
    """
    settings, elements = case.settings, stage_parameters(case, stage)
    gradient, trained = gradient_itemsize(settings), elements.trained_dense + elements.trained_expert
    averages = _average_bytes(settings.optimizer)
    touched = 3 * gradient * trained
    update = (4 * gradient + 2 * averages + (8 + work.itemsize if work.itemsize < 4 else 8)) * elements.updated
    offloaded = settings.optimizer.optimizer_offload_fraction if settings.optimizer.optimizer_cpu_offload else 0.0
    on_host = offloaded * elements.updated * (4 + work.itemsize + 2 * averages + 8) / _HOST_BANDWIDTH
    return memory_seconds(work.rates, touched + (1 - offloaded) * update) + on_host


def _average_bytes(optimizer: OptimizerSettings) -> int:
    """Of an element's averages: Adam's two in their dtypes, or SGD's momentum."""
    if optimizer.optimizer == "sgd":
        return 4
    return sum(4 if dtype == "fp32" else 2 for dtype in (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype))
