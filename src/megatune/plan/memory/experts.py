"""A layer of experts: router, dispatch, grouped products, shared experts.

Legend: n = P tokens of a rank, k choices of each, E experts, R rows of the rank's experts, f channels of an expert on a
rank, h hidden size, e bytes of a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatune.plan.memory.feed_forward import feed_forward
from megatune.plan.memory.linear import ADAPTERS
from megatune.plan.memory.operators import Operator, chain, recomputed
from megatune.plan.memory.shapes import Shapes


def expert_layer(shapes: Shapes) -> Operator:
    """From the normalized hidden states to what is added to the residual stream."""
    moe = shapes.architecture.moe
    assert moe is not None
    channels = moe.shared_expert_intermediate_size // shapes.tp
    shared = [_shared(shapes, channels, moe.shared_expert_gate)] if channels else []
    # Shared experts save the same input, unless theirs is another tensor, gathered, or they need none.
    gathered = shapes.overlaps and shapes.sequence_parallel
    is_saved = channels and not gathered and ("linear_fc1" in shapes.keeps or "shared_experts" in shapes.modules)
    return chain((*shared, _router(shapes, saves_input=not is_saved), *_routed(shapes)))


def expert_rows(shapes: Shapes) -> int:
    """R on the fullest rank: an even share times the assumed imbalance, bounded by the experts' capacity, and by all
    rows of the ranks that share out the experts."""
    moe = shapes.architecture.moe
    assert moe is not None
    topk = moe.router_topk
    even = shapes.part * topk * shapes.etp
    if shapes.capacity_factor is not None:
        capacity = min(shapes.part, math.ceil(shapes.part * topk / moe.num_experts * shapes.capacity_factor))
        most = capacity * shapes.etp * moe.num_experts
        if shapes.pads:
            return most
    else:
        most = even * shapes.ep
    return min(round(even * shapes.imbalance), most) if shapes.ep > 1 else min(even, most)


def _shared(shapes: Shapes, channels: int, gated: bool) -> Operator:
    inner = feed_forward(shapes, channels, overlapped=shapes.overlaps)
    if gated:  # its output and the gate's are multiplied
        inner = chain((inner, Operator(shapes.hidden + 2 * shapes.part * shapes.size, shapes.hidden, shapes.hidden)))
    if "shared_experts" in shapes.modules:
        inner = recomputed(inner, shapes.hidden, shapes.hidden)
    return inner._replace(forward=inner.forward + shapes.hidden, backward=inner.backward + shapes.hidden)


def _router(shapes: Shapes, saves_input: bool) -> Operator:
    """It saves its input, scores in fp32, and choices in int64."""
    moe = shapes.architecture.moe
    assert moe is not None
    scores, choices = 4 * shapes.part * moe.num_experts, 8 * shapes.part * moe.router_topk
    input_copy = shapes.part * shapes.architecture.hidden_size * (shapes.router_size - shapes.size)
    kept = (shapes.hidden if saves_input else 0) + scores + 5 * choices
    return Operator(kept, 2 * scores + input_copy + shapes.hidden, 2 * scores + input_copy + 2 * shapes.hidden)


def _routed(shapes: Shapes) -> Iterator[Operator]:
    """Dispatch, both products, and the way back."""
    architecture, size = shapes.architecture, shapes.size
    moe = architecture.moe
    assert moe is not None
    rows, hidden = expert_rows(shapes), architecture.hidden_size
    channels = moe.moe_ffn_hidden_size // shapes.etp
    local = moe.num_experts // shapes.ep
    tokens_in_rows, numbers = rows * hidden * size, rows * channels
    sent = shapes.part * moe.router_topk * hidden * size
    travels = shapes.ep * shapes.etp > 1
    passing = 2 * sent if travels else 0
    returning = tokens_in_rows
    if travels and shapes.gathers_tokens:
        # Tokens of all ranks; and where they are summed up, a row for each of their choices, wherever it went.
        passing = shapes.hidden * shapes.ep * shapes.etp
        returning = tokens_in_rows + (1 + moe.router_topk) * passing
    places = 8 * (4 * rows + 2 * shapes.part * moe.router_topk)
    if travels:
        places += 8 * 6 * rows
    weight = local * channels * hidden * size if shapes.weights_trained else 0
    yield Operator(places, tokens_in_rows + passing, 2 * tokens_in_rows + returning)
    yield Operator(
        _kept_input(shapes, "linear_fc1", rows, hidden),
        2 * numbers * size,
        2 * numbers * size + tokens_in_rows + 2 * weight,
    )
    second = Operator(
        _kept_input(shapes, "linear_fc2", rows, channels), tokens_in_rows, tokens_in_rows + numbers * size + weight
    )
    activation = _activation(shapes, numbers)
    if "moe_act" in shapes.modules:
        # Gate and up are kept. The rest is made again, and the result copied to where it was.
        gate_up = 2 * numbers * size
        extra = activation.kept - gate_up + 2 * second.kept
        yield Operator(gate_up, activation.forward + activation.kept - gate_up, activation.backward + extra)
        second = Operator(0, second.forward + second.kept, second.backward + extra)
    else:
        yield activation
    yield second
    around = tokens_in_rows + returning + shapes.hidden
    yield Operator(0, around, around)


def _kept_input(shapes: Shapes, name: str, rows: int, channels: int) -> int:
    """Bytes of the input of a grouped product, and of its adapters' narrow ones, where its backward pass needs them."""
    if name not in shapes.keeps:
        return 0
    return rows * (channels + shapes.adapter * ADAPTERS.get(name, 1)) * shapes.size


def _activation(shapes: Shapes, numbers: int) -> Operator:
    """silu(gate) · up · probability of so many numbers R · f; fused it keeps gate and up only."""
    size = shapes.size
    if shapes.activation_fusion:
        return Operator(2 * numbers * size, numbers * size, (5 if shapes.on_cpu else 3) * numbers * size)
    # 16-bit numbers times fp32 probabilities are fp32.
    backward = numbers * (3 * shapes.wide if shapes.wide else 4 * size)
    return Operator(4 * numbers * size, numbers * (size + shapes.wide), backward)
