"""What the ranks of one layer exchange in a micro-batch, and how much of it computing does not hide."""

from __future__ import annotations

import math
from typing import NamedTuple

from megatune.plan.case import Case
from megatune.plan.time.communication import Group, all_gather, all_reduce, all_to_all, group_of, send
from megatune.plan.time.compute import Seconds
from megatune.plan.time.work import Work


class Exchange(NamedTuple):
    """Seconds of one layer and micro-batch that are not hidden: forward and backward, by kind of parallelism."""

    tensor: tuple[float, float] = (0.0, 0.0)
    context: tuple[float, float] = (0.0, 0.0)
    expert: tuple[float, float] = (0.0, 0.0)

    @property
    def forward(self) -> float:
        return self.tensor[0] + self.context[0] + self.expert[0]

    @property
    def backward(self) -> float:
        return self.tensor[1] + self.context[1] + self.expert[1]


class Groups(NamedTuple):
    """The groups of a case's layers."""

    tensor: Group
    context: Group
    expert: Group
    expert_tensor: Group


def groups_of(case: Case) -> Groups:
    """The groups that a layer's ranks talk in."""
    parallel = case.settings.parallel
    tp, etp = parallel.tensor_model_parallel_size, parallel.expert_tensor_size
    return Groups(
        group_of(case, tp, 1),
        group_of(case, parallel.context_parallel_size, tp),
        group_of(case, parallel.expert_model_parallel_size, etp),
        group_of(case, etp, 1),
    )


def layer_exchange(case: Case, work: Work, groups: Groups, seconds: Seconds, sparse: bool) -> Exchange:
    """Of one decoder layer."""
    return Exchange(
        _tensor(case, work, groups.tensor, seconds, 1 if sparse else 2),
        _context(case, work, groups.context, seconds),
        _expert(case, work, groups) if sparse else (0.0, 0.0),
    )


def _tensor(case: Case, work: Work, group: Group, seconds: Seconds, blocks: int) -> tuple[float, float]:
    """Megatron-LM's exchanges (arXiv:1909.08053, with sequence parallelism arXiv:2205.05198), `blocks` times a layer.

    Forward an all-reduce behind each block; split along the sequence an all-gather before and a reduce-scatter behind
    it, which move as much. Backward the same towards the inputs, started before the weight's gradient is computed,
    which hides it; with sequence parallelism the inputs are gathered once more, and the outputs' gradients first.
    """
    if group.size == 1:
        return 0.0, 0.0
    shape = work.architecture
    blocks += 1 if blocks == 1 and shape.moe is not None and shape.moe.shared_expert_intermediate_size else 0
    size = work.tokens * shape.hidden_size * work.itemsize
    hidden = seconds.weight_gradient
    if not case.settings.parallel.sequence_parallel:
        once = blocks * all_reduce(group, size)
        return once, max(0.0, once - hidden)
    once = blocks * all_gather(group, size)
    return 2 * once, once + max(0.0, 2 * once - hidden)


def _context(case: Case, work: Work, group: Group, seconds: Seconds) -> tuple[float, float]:
    """Of keys and values, or of all heads' channels (a2a).

    A ring passes them on n - 1 times while attention computes on those that are there. Backward their gradients go
    around as well, in fp32, and the last of n messages, which brings them home, has nothing to hide behind.
    """
    n = group.size
    if n == 1:
        return 0.0, 0.0
    shape, kind = work.architecture, case.settings.parallel.cp_comm_type
    keys_values = 2 * shape.key_value_size if shape.mla is None else shape.query_size + shape.attention_size
    size = work.tokens * keys_values / work.tp * work.itemsize
    if kind == "all_gather":
        once = all_gather(group, n * size)
        return once, once
    if kind == "a2a":
        # Ranks that outnumber the key/value heads get copies of them.
        heads = max(shape.num_query_groups // work.tp, 1) if shape.mla is None else n
        channels = keys_values * (math.lcm(heads, n) // heads) + shape.query_size + shape.attention_size
        once = all_to_all(group, work.tokens * channels / work.tp * work.itemsize)
        return once, once
    keys, gradients = send(group, size), send(group, size * 4 / work.itemsize)
    computing = seconds.attention / n
    forward, backward = max(0.0, keys - computing), max(0.0, keys + gradients - 2.5 * computing)
    return (n - 1) * forward, (n - 1) * backward + gradients


def _expert(case: Case, work: Work, groups: Groups) -> tuple[float, float]:
    """Tokens on their way to their experts and back; backward their gradients, by the same ways."""
    shape, experts = work.architecture, case.settings.experts
    assert shape.moe is not None
    size = work.outer_tokens * shape.hidden_size * work.itemsize
    if experts.moe_token_dispatcher_type == "allgather":
        ranks = work.ep * work.etp
        once = 2 * all_gather(groups.expert if work.ep > 1 else groups.expert_tensor, ranks * size)
        return (once, once) if ranks > 1 else (0.0, 0.0)
    rows = size * shape.moe.router_topk * work.imbalance
    once = 2 * all_to_all(groups.expert, rows) + 2 * all_gather(groups.expert_tensor, rows * work.etp)
    return once, once


def embedding_exchange(work: Work, group: Group, sequence_parallel: bool) -> tuple[float, float]:
    """Of the word embedding, whose ranks hold different words: sums forward, split along the sequence or not."""
    size = work.tokens * work.architecture.hidden_size * work.itemsize
    if sequence_parallel:
        return all_gather(group, size), all_gather(group, size)
    return all_reduce(group, size), 0.0


def loss_exchange(work: Work, group: Group) -> tuple[float, float]:
    """Of the output layer: its inputs forward, their gradients backward, and two numbers a token for the loss."""
    size = work.tokens * work.architecture.hidden_size * work.itemsize
    whole = all_gather(group, size)
    return whole + all_reduce(group, 8 * work.tokens), 2 * whole
