"""What happens once a step: gradients are summed over ranks, the optimizer updates, new weights are collected."""

from __future__ import annotations

from typing import NamedTuple

from megatune.plan.case import Case
from megatune.plan.memory.buffers import full_bucket
from megatune.plan.memory.parameters import StageParameters, optimizer_rules
from megatune.plan.time.communication import Group, all_gather, all_reduce, group_of
from megatune.plan.time.efficiency import Rates, memory_seconds

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
    """Return the ranks that hold the same weights: outside of experts, and of experts."""
    parallel = case.settings.parallel
    experts = parallel.expert_tensor_size * parallel.expert_model_parallel_size
    return (
        group_of(case, case.shard_size, parallel.tensor_model_parallel_size),
        group_of(case, case.expert_shard_size, experts),
    )


def reduction(case: Case, elements: StageParameters) -> Reduction:
    """Of a stage's trained parameters, over both kinds of groups.

    Under the distributed optimizer gradients are reduce-scattered, and weights gathered, in the dtypes of their
    buffers; otherwise gradients are all-reduced.
    """
    settings = case.settings
    parallel = settings.parallel
    reduce = gather = last = 0.0
    for group, count in zip(data_groups(case), (elements.trained_dense, elements.trained_expert), strict=True):
        if not count or group.size == 1:
            continue
        exchange = all_gather if parallel.use_distributed_optimizer else all_reduce
        reduce += exchange(group, count * case.gradient_itemsize)
        last += exchange(group, min(count, full_bucket(case.dp_size)) * case.gradient_itemsize)
        if parallel.use_distributed_optimizer:
            gather += all_gather(group, count * case.itemsize)
    return Reduction(reduce, gather, last)


def exposed_seconds(case: Case, exchange: Reduction, forward: float, backward: float) -> float:
    """Return what of it is not hidden.

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


def optimizer_seconds(case: Case, rates: Rates, elements: StageParameters) -> float:
    """Scaling and clipping of gradients, the update, and zeroing: passes over memory.

    Of each trained element gradients are zeroed, scaled by the number of tokens (read and written); of those that this
    rank updates the norm reads them, clipping reads and writes them, Adam reads them, reads and writes the master
    weight and both averages, and writes the weight.
    """
    gradient, size, rules = case.gradient_itemsize, case.itemsize, optimizer_rules(case.settings)
    trained = elements.trained_dense + elements.trained_expert
    touched = 3 * gradient * trained
    update = (4 * gradient + 2 * rules.element_bytes + (8 + size if size < 4 else 8)) * elements.updated
    on_host = elements.updated * (4 + size + 2 * rules.element_bytes + 8) / _HOST_BANDWIDTH
    share = rules.host_fraction
    return memory_seconds(rates, touched + (1 - share) * update) + share * on_host
