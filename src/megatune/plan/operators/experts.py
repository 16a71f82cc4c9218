"""A layer of experts: router, dispatch, grouped products, combination, shared experts.

Legend: n = P tokens of a rank, k choices of each, E experts, R rows of the rank's experts, f channels of an expert on a
rank, h hidden size, e bytes of a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatune.architecture import MixtureOfExperts
from megatune.plan.case import LOOPED
from megatune.plan.operators.linear import (
    adapter_memory,
    dequantize,
    elementwise,
    feed_forward,
    grouped_work,
    linear_work,
    swiglu_work,
)
from megatune.plan.operators.operator import HostSync, Memory, MemoryOp, Operator, Product
from megatune.plan.operators.shapes import Shapes

# Kernels that the host launches after it has read the numbers of rows, while the device has no work.
_AFTER_COUNTS = 20
_FC1, _FC2 = "mlp.experts.weight1", "mlp.experts.weight2"
_LEAST_SUMMED = 1024  # tokens whose choices the allgather dispatcher sums at a time


def before_experts(shapes: Shapes) -> Iterator[Operator]:
    """Yield the operators that do not depend on the sharding of experts: shared experts and router."""
    moe = shapes.architecture.moe
    assert moe is not None
    yield from _shared(shapes, moe)
    yield _router(shapes, moe)
    # Softmax, top-k and counts over all experts' scores in fp32: about ten passes.
    yield Operator("moe", Memory(0), *elementwise(shapes, shapes.sp_tokens * moe.num_experts, 20, 20, 25))


def expert_rows(shapes: Shapes) -> int:
    """Return R on the fullest rank: an even share times the assumed imbalance, limited by the experts' capacity, or by
    all rows of the ranks that share the experts."""
    moe = shapes.architecture.moe
    assert moe is not None
    even, factor = shapes.sp_tokens * moe.router_topk * shapes.etp, shapes.experts.moe_expert_capacity_factor
    if factor is not None:
        capacity = min(shapes.sp_tokens, math.ceil(shapes.sp_tokens * moe.router_topk / moe.num_experts * factor))
        most = capacity * shapes.etp * moe.num_experts
        if shapes.experts.moe_pad_expert_input_to_capacity:
            return most
    else:
        most = even * shapes.ep
    return min(round(even * shapes.imbalance), most) if shapes.ep > 1 else min(even, most)


def saves_input_twice(shapes: Shapes) -> bool:
    """Return whether shared experts save another input than the router: the gathered one."""
    return shapes.experts.moe_shared_expert_overlap and shapes.sequence_parallel


def _shared(shapes: Shapes, moe: MixtureOfExperts) -> Iterator[Operator]:
    """Yield shared experts, whose output is held until that of the routed experts is added."""
    if not moe.shared_expert_intermediate_size:
        return
    channels = moe.shared_expert_intermediate_size // shapes.tp
    overlaps = shapes.experts.moe_shared_expert_overlap
    operators = [*feed_forward(shapes, "shared_experts", channels, overlapped=overlaps)]
    gated, numbers = moe.shared_expert_gate, shapes.sp_tokens * shapes.architecture.hidden_size
    # The sum with the routed experts' output, and backward that of the input's gradients; a gate scales the output.
    gate = (
        Memory(shapes.hidden + 2 * shapes.sp_tokens * shapes.itemsize, shapes.hidden, shapes.hidden)
        if gated
        else Memory(0)
    )
    operators.append(
        Operator("shared_experts", gate, *elementwise(shapes, numbers, *(6, 12, 4) if gated else (3, 3, 1)))
    )
    for operator in operators:
        kept, forward, backward = operator.memory
        yield operator._replace(memory=Memory(kept, forward + shapes.hidden, backward + shapes.hidden))


def _router(shapes: Shapes, moe: MixtureOfExperts) -> Operator:
    """Return the router. It saves its input, unless shared experts save the same, fp32 scores, and int64 choices."""
    scores, choices = 4 * shapes.sp_tokens * moe.num_experts, 8 * shapes.sp_tokens * moe.router_topk
    input_copy = shapes.sp_tokens * shapes.architecture.hidden_size * (shapes.router_itemsize - shapes.itemsize)
    shares = (
        moe.shared_expert_intermediate_size
        and "mlp.shared_experts.linear_fc1" in shapes.keeps
        and not saves_input_twice(shapes)
    )
    kept, added = (0 if shares else shapes.hidden) + scores + 5 * choices, 2 * scores + input_copy + shapes.hidden
    memory = Memory(kept, added, added + shapes.hidden)
    # Transformer Engine multiplies 16-bit numbers and accumulates in fp32; otherwise both are in fp32.
    is_wide = shapes.router_itemsize > shapes.itemsize and shapes.engine.products != "streams"
    of_router, copied = (shapes.replace(itemsize=shapes.router_itemsize), 3 * shapes.hidden) if is_wide else (shapes, 0)
    hidden_size = shapes.architecture.hidden_size
    ahead, back, launches, weight = linear_work(of_router, shapes.sp_tokens, moe.num_experts, hidden_size)
    # The gradient of its input is added to that of the experts' input.
    ahead, back = (*ahead, MemoryOp(copied)), (*back, MemoryOp(2 * copied + 3 * shapes.hidden))
    return Operator("moe", memory, ahead, back, launches, weight)


def routed_experts(shapes: Shapes) -> Iterator[Operator]:
    """Yield dispatch, both grouped products, and combination."""
    moe = shapes.architecture.moe
    assert moe is not None
    size, hidden, rows = shapes.itemsize, shapes.architecture.hidden_size, expert_rows(shapes)
    channels, local = moe.moe_ffn_hidden_size // shapes.etp, moe.num_experts // shapes.ep
    tokens_in_rows, numbers = rows * hidden * size, rows * channels
    mean_rows = shapes.sp_tokens * moe.router_topk * shapes.etp * shapes.imbalance
    # With fused accumulation, weight gradients are added to their buffer for each expert and need no tensor.
    makes_gradients = shapes.weights_trained and not shapes.performance.gradient_accumulation_fusion
    weight = local * channels * hidden * size if makes_gradients else 0
    sent, combined = _exchanged(shapes, moe, rows)
    places = 8 * (4 * rows + 2 * shapes.sp_tokens * moe.router_topk + (6 * rows if shapes.ep * shapes.etp > 1 else 0))
    # Rows are copied into the order of experts and back; with expert parallelism once more on both sides.
    copies = 2 if shapes.ep == 1 or shapes.engine.dispatch != "ranks" else 4
    looped = LOOPED * local if shapes.engine.products == "loop" else 0
    # A token's rows are read again and summed.
    passes = 2 * copies + (1 + 1 / moe.router_topk if shapes.engine.dispatch == "ranks" else 0)
    yield Operator(
        "moe", Memory(places, tokens_in_rows + sent, 2 * tokens_in_rows + combined),
        *elementwise(shapes, mean_rows * hidden, passes, passes, 10 * copies + looped),
    )  # fmt: skip
    if shapes.ep > 1:
        yield Operator("moe", Memory(0), (HostSync(_AFTER_COUNTS),))
    gate_up = 2 * numbers * size
    fc1 = Memory(_kept_input(shapes, _FC1, tokens_in_rows), gate_up, gate_up + tokens_in_rows + 2 * weight)
    fc1 = _with_adapters(shapes, _FC1, fc1, rows, hidden, 2 * channels, local)
    up = Operator("moe", fc1, *grouped_work(shapes, mean_rows, 2 * channels, hidden, local, _FC1))
    yield dequantize(shapes, _biased(shapes, up, mean_rows, 2 * channels, local), 2 * local * channels * hidden)
    work = swiglu_work(shapes, mean_rows * channels)
    if moe.swiglu_limit is not None and not shapes.performance.bias_activation_fusion:
        work = elementwise(shapes, mean_rows * channels, 22, 62, 9)
    yield Operator("moe_act", _activation(shapes, numbers), *work)
    kept = _kept_input(shapes, _FC2, numbers * size)
    fc2 = Memory(kept, tokens_in_rows, tokens_in_rows + numbers * size + weight)
    fc2 = _with_adapters(shapes, _FC2, fc2, rows, channels, hidden, local)
    down = Operator("moe", fc2, *grouped_work(shapes, mean_rows, hidden, channels, local, _FC2))
    yield dequantize(shapes, _biased(shapes, down, mean_rows, hidden, local, weighed=True), local * channels * hidden)
    around = tokens_in_rows + combined + shapes.hidden
    yield Operator("moe", Memory(0, around, around))


def _biased(
    shapes: Shapes, operator: Operator, rows: float, columns: float, experts: int, *, weighed: bool = False
) -> Operator:
    """Add biases to a product's R rows by a product with a [R, experts] matrix that selects each row's expert; if
    `weighed`, with the rows' probabilities, which have a gradient."""
    if not shapes.architecture.add_bias_linear or shapes.engine.products == "streams":  # which fuse it
        return operator
    ahead, back = Product(rows, columns, experts, shapes.itemsize), Product(rows, experts, columns, shapes.itemsize)
    weight = (Product(experts, columns, rows, shapes.itemsize),) if shapes.weights_trained else ()
    return operator._replace(
        forward=(*operator.forward, ahead, MemoryOp(3 * rows * columns * shapes.itemsize)),
        backward=(*operator.backward, *([back] if weighed else [])),
        weight_gradient=(*operator.weight_gradient, *weight),
        launches=operator.launches + 6,
    )


def _exchanged(shapes: Shapes, moe: MixtureOfExperts, rows: int) -> tuple[int, int]:
    """Return the bytes of the tensors that the dispatch exchanges, and those that the combination of R rows holds."""
    row = shapes.architecture.hidden_size * shapes.itemsize
    if shapes.ep * shapes.etp == 1:
        return 0, rows * row
    if shapes.experts.moe_token_dispatcher_type == "allgather":
        # The allgather dispatcher holds the tokens of all its ranks, and as many sums. It sums for some tokens at a
        # time, with at most as many choices as there are rows (engine.layers.moe.dispatcher).
        gathered = shapes.sp_tokens * shapes.ep * shapes.etp
        summed = min(gathered, max(rows // moe.router_topk, _LEAST_SUMMED)) * moe.router_topk
        return gathered * row, (rows + gathered + summed) * row
    return 2 * shapes.sp_tokens * moe.router_topk * row, rows * row


def _kept_input(shapes: Shapes, name: str, size: int) -> int:
    """Return the bytes of a product's input, if it is kept."""
    return size if name in shapes.keeps else 0


def _with_adapters(
    shapes: Shapes, name: str, memory: Memory, rows: int, inputs: int, outputs: int, experts: int
) -> Memory:
    """Add the memory of the adapters of a rank's experts, if they have any."""
    if (adapter := shapes.adapter_of(name)) is None:
        return memory
    more = adapter_memory(shapes, adapter, rows * inputs * shapes.itemsize, rows, inputs, outputs, matrices=experts)
    return Memory(*(own + of_adapter for own, of_adapter in zip(memory, more, strict=True)))


def _activation(shapes: Shapes, numbers: int) -> Memory:
    """Return the memory of silu(gate) · up · probability over R · f numbers; fused, it keeps gate and up only."""
    size = shapes.itemsize
    if shapes.performance.bias_activation_fusion:
        return Memory(2 * numbers * size, numbers * size, (5 if shapes.on_cpu else 3) * numbers * size)
    # The product of 16-bit numbers and fp32 probabilities is fp32.
    backward = numbers * (3 * shapes.fp32_itemsize if shapes.fp32_itemsize else 4 * size)
    return Memory(4 * numbers * size, numbers * (size + shapes.fp32_itemsize), backward)
