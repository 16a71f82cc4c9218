"""Seconds of collectives, and of the communication of layers and the optimizer that does not overlap with compute.

Megatron-Core numbers ranks with tensor parallelism fastest, then context, data and pipeline parallelism (of experts:
expert tensor, expert, expert data, pipeline); ranks fill one machine after the other. So a group's size and stride
determine how many of its ranks share a machine.

A ring sends (n - 1) / n of the data through each rank. Across machines, k ranks of a group in one machine have k
network ports, and the library uses enough rings for all of them: the rate is that of k ports, at most that of the link.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from megatune.architecture import MixtureOfExperts
from megatune.plan.case import Case
from megatune.plan.machine import Link, Machine
from megatune.plan.memory.buffers import full_bucket
from megatune.plan.memory.parameters import StageParameters
from megatune.plan.operators.attention import keys_values_size
from megatune.plan.operators.shapes import Shapes
from megatune.plan.operators.vision import Images
from megatune.plan.time.efficiency import EFFICIENCIES, Seconds

# Relative to other links: over PCIe, collectives share switches, bridges and host memory. Eight RTX 5090 reach 28 of
# 63 GB/s, four 35 (NCCL issue 1639). A user's own links are not reduced.
_PCIE, _PCIE_SHARE = ("pcie3", "pcie4", "pcie5"), 0.6
# Share of a pass that hides overlapped communication: both share memory bandwidth and multiprocessors.
HIDING = 0.8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # a key of caches, compared by identity
class Group:
    """Ranks that communicate.

    Attributes:
        size: number of ranks.
        per_node: number of ranks in one machine.
        link, network: the interconnects inside and between machines.
        efficiency: share of a link's bandwidth that collectives reach.
    """

    size: int
    per_node: int
    link: Link
    network: Link
    efficiency: float

    @property
    def crosses(self) -> bool:
        """Whether the group spans several machines."""
        return self.per_node < self.size

    @property
    def bandwidth(self) -> float:
        """Bytes/s that each rank sends in a ring."""
        inside, ports = self.link.bandwidth, self.per_node * self.network.bandwidth
        if not self.crosses:
            return inside * self.efficiency
        return (ports if self.per_node == 1 else min(inside, ports)) * self.efficiency

    @property
    def latency(self) -> float:
        """Seconds of a ring of empty messages."""
        nodes = -(-self.size // self.per_node)
        return (self.per_node - 1) * self.link.latency + (nodes - 1) * self.network.latency


def group_of(machine: Machine, size: int, stride: int) -> Group:
    """Return a group of `size` ranks with a stride."""
    efficiency = EFFICIENCIES[machine.device.generation].link
    return _group(size, stride, machine.gpus_per_node, machine.link, machine.network, efficiency)


@lru_cache(maxsize=4096)
def _group(size: int, stride: int, gpus_per_node: int, link: Link, network: Link, efficiency: float) -> Group:
    per_node = min(size, max(1, gpus_per_node // stride))
    if link.name in _PCIE:
        link = replace(link, bandwidth=_PCIE_SHARE * link.bandwidth)
    return Group(size=size, per_node=per_node, link=link, network=network, efficiency=efficiency)


def all_gather(group: Group, size: float) -> float:
    """Return the seconds of an all-gather to `size` bytes per rank; a reduce-scatter takes the same."""
    n = group.size
    return 0.0 if n == 1 else (n - 1) / n * size / group.bandwidth + group.latency


def all_reduce(group: Group, size: float) -> float:
    """Return the seconds of an all-reduce of `size` bytes: a reduce-scatter and an all-gather."""
    return 2 * all_gather(group, size)


def all_to_all(group: Group, size: float) -> float:
    """Return the seconds of an all-to-all of `size` bytes per rank; both kinds of links work at the same time."""
    n = group.size
    if n == 1:
        return 0.0
    inside = (group.per_node - 1) / n * size / (group.link.bandwidth * group.efficiency)
    outside = (n - group.per_node) / n * size / (group.network.bandwidth * group.efficiency)
    return max(inside, outside) + (group.network.latency if group.crosses else group.link.latency)


def send(group: Group, size: float) -> float:
    """Return the seconds of a message to the next rank of the group; over the network if the group spans machines."""
    link = group.network if group.crosses else group.link
    return size / (link.bandwidth * group.efficiency) + link.latency


class Exchange(NamedTuple):
    """Seconds of communication that is not overlapped, for one layer and micro-batch, forward and backward by kind;
    `calls` are the numbers of all collectives and messages."""

    tensor: tuple[float, float] = (0.0, 0.0)
    context: tuple[float, float] = (0.0, 0.0)
    expert: tuple[float, float] = (0.0, 0.0)
    calls: tuple[int, int] = (0, 0)

    @property
    def forward(self) -> float:
        return self.tensor[0] + self.context[0] + self.expert[0]


# Seconds and numbers of calls, forward and backward; see `Exchange`.
_Exchanged = tuple[tuple[float, float], tuple[int, int]]
_NONE: _Exchanged = (0.0, 0.0), (0, 0)


class Groups(NamedTuple):
    """The groups of a case's layers, and the one over which images are distributed."""

    tensor: Group
    context: Group
    media: Group
    expert: Group
    expert_tensor: Group


def groups_of(machine: Machine, shapes: Shapes) -> Groups:
    """Return the groups in which a layer's ranks communicate."""
    tp, cp, ep, etp = shapes.tp, shapes.cp, shapes.ep, shapes.etp
    sizes = ((tp, 1), (cp, tp), (tp * cp, 1), (ep, etp), (etp, 1))
    return Groups(*(group_of(machine, size, stride) for size, stride in sizes))


def layer_exchange(shapes: Shapes, groups: Groups, seconds: Seconds, sparse: bool) -> Exchange:
    """Return the communication of one decoder layer."""
    tensor, of_tensor = _tensor(shapes, groups.tensor, seconds, sparse)
    context, of_context = _context(shapes, groups.context, seconds)
    expert, of_expert = _expert(shapes, groups, seconds) if sparse else _NONE
    forward, backward = (sum(calls) for calls in zip(of_tensor, of_context, of_expert, strict=True))
    return Exchange(tensor, context, expert, (forward, backward))


def _tensor(shapes: Shapes, group: Group, seconds: Seconds, sparse: bool) -> _Exchanged:
    """Return Megatron-LM's communication of dense blocks (arXiv:1909.08053; sequence parallelism: arXiv:2205.05198).

    Forward an all-reduce after each block; with sequence parallelism an all-gather before and a reduce-scatter after
    it, with the same volume. Backward the same for the gradients of inputs, overlapped with the computation of the
    weight's gradient; with sequence parallelism also an all-gather of the inputs, and of the outputs' gradients.
    """
    if group.size == 1:
        return _NONE
    hidden, moe = seconds.weight_gradient, shapes.architecture.moe
    blocks = 1 if sparse and not (moe and moe.shared_expert_intermediate_size) else 2  # attention, and another one
    if not shapes.sequence_parallel:
        once = blocks * all_reduce(group, shapes.whole_hidden)
        return (once, max(0.0, once - hidden)), (blocks, blocks)
    once = blocks * all_gather(group, shapes.whole_hidden)
    return (2 * once, once + max(0.0, 2 * once - hidden)), (2 * blocks, 3 * blocks)


def _context(shapes: Shapes, group: Group, seconds: Seconds) -> _Exchanged:
    """Return the communication of keys and values, or of all heads' channels (a2a).

    A ring sends them n - 1 times, overlapped with attention on those that have arrived. Backward their fp32 gradients
    are also sent, and the last of n messages, which returns them, does not overlap.
    """
    n = group.size
    if n == 1:
        return _NONE
    if shapes.kind.delta and (delta := shapes.architecture.delta) is not None:
        # All-to-all of all projections, and back of the values.
        channels = (delta.qkvz_size + delta.ba_size + delta.value_size) / shapes.tp
        once = all_to_all(group, shapes.tokens * shapes.itemsize * channels)
        return (once, once), (2, 2)
    architecture, per_rank = shapes.architecture, shapes.tokens / shapes.tp * shapes.itemsize
    keys_values = keys_values_size(architecture)
    size = per_rank * keys_values
    if shapes.cp_comm_type == "all_gather":
        once = all_gather(group, n * size)
        return (once, once), (2, 2)
    if shapes.cp_comm_type == "a2a":
        # With more ranks than key/value heads, ranks get copies of these.
        heads = max(architecture.num_query_groups // shapes.tp, 1) if architecture.mla is None else n
        channels = keys_values * (math.lcm(heads, n) // heads) + architecture.query_size + architecture.attention_size
        once = all_to_all(group, per_rank * channels)
        return (once, once), (4, 4)
    keys, gradients = send(group, size), send(group, size * 4 / shapes.itemsize)
    computing = seconds.attention / n
    forward, backward = max(0.0, keys - computing), max(0.0, keys + gradients - 2.5 * computing)
    return ((n - 1) * forward, (n - 1) * backward + gradients), (2 * (n - 1), 4 * (n - 1))


def _expert(shapes: Shapes, groups: Groups, seconds: Seconds) -> _Exchanged:
    """Return the communication of dispatch and combination, and backward that of their gradients. Before the dispatch,
    ranks exchange the numbers of tokens."""
    kinds = (shapes.ep > 1) + (shapes.etp > 1)
    if not kinds:
        return _NONE
    once = _dispatch(shapes, groups)
    if shapes.engine.overlaps:  # with the backward pass of another micro-batch
        once = max(0.0, once - HIDING * (seconds.forward + seconds.backward) / 2)
    return (once, once), (2 * kinds + 1, 2 * kinds)


def _dispatch(shapes: Shapes, groups: Groups) -> float:
    """Return the seconds of dispatch and combination, forward or backward."""
    moe = shapes.architecture.moe
    assert moe is not None
    if shapes.experts.moe_token_dispatcher_type == "allgather":
        ranks = shapes.ep * shapes.etp
        group = groups.expert if shapes.ep > 1 else groups.expert_tensor
        return 2 * all_gather(group, ranks * shapes.hidden)
    if shapes.engine.dispatch != "ranks":
        return 2 * _to_machines(shapes, moe, groups.expert)
    rows = shapes.hidden * moe.router_topk * shapes.imbalance
    return 2 * all_to_all(groups.expert, rows) + 2 * all_gather(groups.expert_tensor, rows * shapes.etp)


def _to_machines(shapes: Shapes, moe: MixtureOfExperts, group: Group) -> float:
    """Return the seconds to send tokens once to each machine, and each rank, with one of their experts."""
    ranks, machines, size = group.size, group.size // group.per_node, shapes.hidden * shapes.imbalance
    if ranks == 1:
        return 0.0

    def others(parts: int) -> float:
        """Return the mean number of other parts of the group, of `parts`, that a token is sent to."""
        if shapes.engine.dispatch == "neighbours":
            met = max(1.0, moe.router_topk * parts / moe.num_experts)
        else:
            met = parts * (1 - (1 - 1 / parts) ** moe.router_topk)
        return met * (parts - 1) / parts

    inside = size * others(ranks) * (group.per_node - 1) / (ranks - 1) * machines
    outside = size * others(machines)
    link, network = (each.bandwidth * group.efficiency for each in (group.link, group.network))
    return max(inside / link, outside / network) + (group.network.latency if group.crosses else group.link.latency)


def end_exchange(shapes: Shapes, group: Group, loss: bool) -> tuple[float, float]:
    """Return the communication of the word embedding, or of the output layer and the loss.

    The embedding is sharded by vocabulary: its outputs are reduced, or reduce-scattered along the sequence. The output
    layer gathers its inputs, reduces their gradients, and exchanges two numbers per token for the loss; a reward model
    gathers the scores.
    """
    whole = all_gather(group, shapes.whole_hidden)
    if loss and shapes.architecture.num_labels:
        scores = 4 * shapes.tokens * shapes.architecture.num_labels
        return (all_gather(group, scores) if shapes.sequence_parallel else 0.0), 0.0
    if loss:
        return whole + all_reduce(group, 8 * shapes.tokens), 2 * whole
    return (whole, whole) if shapes.sequence_parallel else (2 * whole, 0.0)


def vision_exchange(shapes: Shapes, groups: Groups, images: Images) -> tuple[float, float]:
    """Return the communication of the word embedding, which is reduced whole, and of the features of images, each of
    which one rank has computed; backward their gradients are reduced over context-parallel ranks."""
    features = images.features(shapes)
    forward = all_reduce(groups.tensor, shapes.whole_hidden) + all_gather(groups.media, features)
    backward = all_gather(groups.tensor, shapes.whole_hidden) if shapes.sequence_parallel else 0.0
    if images.num_trained:
        backward *= images.tower.num_mergers
        backward += all_reduce(groups.context, features)
    return forward, backward


def encoder_gradients(case: Case, groups: Groups, images: Images | None) -> float:
    """Return the seconds to reduce the encoder's gradients over tensor-parallel ranks, once per step."""
    if images is None or not images.num_trained:
        return 0.0
    return all_reduce(groups.tensor, images.num_trained * case.gradient_itemsize)


class Reduction(NamedTuple):
    """Seconds of data-parallel communication, overlapped or not.

    Attributes:
        reduce: of gradients.
        gather: of updated weights.
        last: of the last bucket of gradients, which never overlaps.
        updates: of Muon's gradients, before and after orthogonalization.
    """

    reduce: float
    gather: float
    last: float
    updates: float


@lru_cache(maxsize=4096)
def data_groups(case: Case) -> tuple[Group, Group]:
    """Return the groups of ranks with the same dense weights, and with the same experts."""
    parallel = case.settings.parallel
    tp, experts = parallel.tensor_model_parallel_size, parallel.expert_tensor_size * parallel.expert_model_parallel_size
    machine = case.machine
    return group_of(machine, case.shard_size, tp), group_of(machine, case.expert_shard_size, experts)


def reduction(case: Case, elements: StageParameters) -> Reduction:
    """Return the data-parallel communication of a stage's trained parameters.

    With the distributed optimizer gradients are reduce-scattered and weights gathered, in the dtypes of their buffers;
    otherwise gradients are all-reduced. Muon gathers and scatters gradients again, without overlap.
    """
    sharded = case.settings.parallel.use_distributed_optimizer
    reduce = gather = last = updates = 0.0
    for group, count in zip(data_groups(case), (elements.trained_dense, elements.trained_expert), strict=True):
        if not count or group.size == 1:
            continue
        exchange = all_gather if sharded else all_reduce
        reduce += exchange(group, count * case.gradient_itemsize)
        last += exchange(group, min(count, full_bucket(case.dp_size)) * case.gradient_itemsize)
        if sharded:
            gather += all_gather(group, count * case.itemsize)
        if sharded and case.settings.optimizer.optimizer == "muon":
            updates += 2 * all_gather(group, count * case.gradient_itemsize)
    return Reduction(reduce, gather, last, updates)


def exposed_seconds(case: Case, exchange: Reduction, forward: float, backward: float) -> float:
    """Return the seconds of data-parallel communication that does not overlap.

    Args:
        forward, backward: seconds of the first micro-batch forward, with which gathering weights may overlap, and of
            the last one backward, with which reducing gradients may.
    """
    parallel = case.settings.parallel
    reduce, gather = exchange.reduce, exchange.gather
    if parallel.overlap_grad_reduce:
        reduce = max(min(exchange.last, reduce), reduce - HIDING * backward)
    if parallel.overlap_param_gather:
        gather = max(0.0, gather - HIDING * forward)
    return reduce + gather + exchange.updates
