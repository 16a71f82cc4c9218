"""What the ranks of one layer exchange in a micro-batch, and how much of it computing does not hide."""

from __future__ import annotations

import math
from typing import NamedTuple

from megatune.plan.case import Case
from megatune.plan.operators.core_attention import keys_values_size
from megatune.plan.operators.shapes import Shapes
from megatune.plan.time.communication import Group, all_gather, all_reduce, all_to_all, group_of, send
from megatune.plan.time.compute import Seconds


class Exchange(NamedTuple):
    """Seconds of one layer and micro-batch that are not hidden: forward and backward, by kind of parallelism."""

    tensor: tuple[float, float] = (0.0, 0.0)
    context: tuple[float, float] = (0.0, 0.0)
    expert: tuple[float, float] = (0.0, 0.0)

    @property
    def forward(self) -> float:
        return self.tensor[0] + self.context[0] + self.expert[0]


class Groups(NamedTuple):
    """The groups of a case's layers."""

    tensor: Group
    context: Group
    expert: Group
    expert_tensor: Group


def groups_of(case: Case) -> Groups:
    """Return the groups that a layer's ranks exchange in."""
    parallel = case.settings.parallel
    tp, etp = parallel.tensor_model_parallel_size, parallel.expert_tensor_size
    return Groups(
        group_of(case, tp, 1),
        group_of(case, parallel.context_parallel_size, tp),
        group_of(case, parallel.expert_model_parallel_size, etp),
        group_of(case, etp, 1),
    )


def layer_exchange(shapes: Shapes, groups: Groups, seconds: Seconds, sparse: bool) -> Exchange:
    """Of one decoder layer."""
    return Exchange(
        _tensor(shapes, groups.tensor, seconds, sparse),
        _context(shapes, groups.context, seconds),
        _expert(shapes, groups) if sparse else (0.0, 0.0),
    )


def _tensor(shapes: Shapes, group: Group, seconds: Seconds, sparse: bool) -> tuple[float, float]:
    """Megatron-LM's exchanges (arXiv:1909.08053, with sequence parallelism arXiv:2205.05198), of each dense block.

    Forward an all-reduce behind each block; with sequence parallelism an all-gather before and a reduce-scatter behind
    it, which move as much. Backward the same towards the inputs, started before the weight's gradient is computed,
    which hides it; with sequence parallelism the inputs are gathered once more, and the outputs' gradients first.
    """
    if group.size == 1:
        return 0.0, 0.0
    moe = shapes.architecture.moe
    dense = not sparse or (moe is not None and moe.shared_expert_intermediate_size)
    blocks = 2 if dense else 1
    hidden = seconds.weight_gradient
    if not shapes.sequence_parallel:
        once = blocks * all_reduce(group, shapes.whole_hidden)
        return once, max(0.0, once - hidden)
    once = blocks * all_gather(group, shapes.whole_hidden)
    return 2 * once, once + max(0.0, 2 * once - hidden)


def _context(shapes: Shapes, group: Group, seconds: Seconds) -> tuple[float, float]:
    """Of keys and values, or of all heads' channels (a2a).

    A ring passes them on n - 1 times while attention computes on those that are there. Backward their gradients are
    passed on as well, in fp32, and nothing hides the last of n messages, which returns them.
    """
    n = group.size
    if n == 1:
        return 0.0, 0.0
    architecture, per_rank = shapes.architecture, shapes.tokens / shapes.tp * shapes.size
    keys_values = keys_values_size(architecture)
    size = per_rank * keys_values
    if shapes.cp_comm_type == "all_gather":
        once = all_gather(group, n * size)
        return once, once
    if shapes.cp_comm_type == "a2a":
        # Ranks that outnumber the key/value heads get copies of them.
        heads = max(architecture.num_query_groups // shapes.tp, 1) if architecture.mla is None else n
        channels = keys_values * (math.lcm(heads, n) // heads) + architecture.query_size + architecture.attention_size
        once = all_to_all(group, per_rank * channels)
        return once, once
    keys, gradients = send(group, size), send(group, size * 4 / shapes.size)
    computing = seconds.attention / n
    forward, backward = max(0.0, keys - computing), max(0.0, keys + gradients - 2.5 * computing)
    return (n - 1) * forward, (n - 1) * backward + gradients


def _expert(shapes: Shapes, groups: Groups) -> tuple[float, float]:
    """Dispatch of tokens to their experts, and combination; backward their gradients, in the same way."""
    moe = shapes.architecture.moe
    assert moe is not None
    if shapes.gathers_tokens:
        ranks = shapes.ep * shapes.etp
        once = 2 * all_gather(groups.expert if shapes.ep > 1 else groups.expert_tensor, ranks * shapes.hidden)
        return (once, once) if ranks > 1 else (0.0, 0.0)
    rows = shapes.hidden * moe.router_topk * shapes.imbalance
    once = 2 * all_to_all(groups.expert, rows) + 2 * all_gather(groups.expert_tensor, rows * shapes.etp)
    return once, once


def embedding_exchange(shapes: Shapes, group: Group) -> tuple[float, float]:
    """Of the word embedding, whose ranks hold different words: sums forward, scattered along the sequence or not."""
    if shapes.sequence_parallel:
        return all_gather(group, shapes.whole_hidden), all_gather(group, shapes.whole_hidden)
    return all_reduce(group, shapes.whole_hidden), 0.0


def loss_exchange(shapes: Shapes, group: Group) -> tuple[float, float]:
    """Of the output layer: its inputs forward, their gradients backward, and two numbers a token for the loss."""
    whole = all_gather(group, shapes.whole_hidden)
    return whole + all_reduce(group, 8 * shapes.tokens), 2 * whole
