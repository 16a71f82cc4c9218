"""Seconds that one rank computes for one layer, its embedding or its loss, operator by operator, by roofline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from megatune.architecture import MixtureOfExperts
from megatune.plan.time.efficiency import grouped_seconds, grouped_weight_seconds, matmul_seconds, memory_seconds
from megatune.plan.time.work import Work


class Operator(NamedTuple):
    """Device seconds of one operator and what the host does for it.

    Attributes:
        module: what recompute_modules calls it, or what it is.
        weight_gradient: the part of `backward` that no other operator waits for.
        launches: kernels of the forward pass; the backward pass has twice as many.
    """

    module: str
    forward: float
    backward: float
    weight_gradient: float
    launches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Of one layer and micro-batch, on one rank.

    Attributes:
        recompute: what the backward pass computes again, by module; "" is the whole layer.
        weight_gradient: seconds of weight gradients behind each exchange of the backward pass, in which it hides.
        attention: forward, of attention alone: exchanges of a ring hide in it.
    """

    forward: float
    backward: float
    recompute: dict[str, float]
    weight_gradient: float
    attention: float


@lru_cache(maxsize=4096)
def layer_seconds(work: Work, sparse: bool) -> Seconds:
    """Of one decoder layer, dense or sparse."""
    operators = [*_attention_block(work), *(_experts(work) if sparse else _feed_forward(work))]
    return add_up(work, operators)


@lru_cache(maxsize=4096)
def embedding_seconds(work: Work) -> Seconds:
    """Of the word embedding: a look-up, and the scattered sum of its gradient."""
    shape = work.architecture
    row, table = shape.hidden_size * work.itemsize, shape.vocab_size * shape.hidden_size / work.tp
    forward = memory_seconds(work.rates, 2 * work.tokens * row)
    written = table * (2 * work.itemsize + 2 * work.gradient_itemsize) if work.trained else 0.0
    backward = memory_seconds(work.rates, (2 * work.tokens * row if work.trained else 0.0) + written)
    return add_up(work, [Operator("embedding", forward, backward, 0.0, 4)])


@lru_cache(maxsize=4096)
def loss_seconds(work: Work) -> Seconds:
    """Of the last norm, the output layer and cross-entropy.

    Computed together in chunks, logits are made twice: the third product of four. Passes over logits: fp32 sums of
    exponentials forward, probabilities and their rounding backward.
    """
    shape = work.architecture
    columns = shape.vocab_size / work.tp
    output = linear_operator(work, "output", work.tokens, columns, shape.hidden_size)
    logits = work.tokens * columns
    if work.fused_loss:
        output = output._replace(backward=output.backward + output.forward)
        passes = 6 * work.itemsize, 8 * work.itemsize
    else:
        passes = 2 * work.itemsize + 5 * 4, 2 * work.itemsize + 4 * 4
    forward, backward = (memory_seconds(work.rates, logits * data) for data in passes)
    softmax = Operator("loss", forward, backward, 0.0, 20)
    return add_up(work, [_norm(work), output, softmax])


def add_up(work: Work, operators: list[Operator], both_ways: bool = True) -> Seconds:
    """All operators of a layer: as long as the device computes, or the host launches.

    Args:
        both_ways: the backward pass launches, too.
    """
    launch = work.rates.efficiency.launch
    launches = sum(operator.launches for operator in operators)
    forward = max(sum(operator.forward for operator in operators), launches * launch)
    backward = max(sum(operator.backward for operator in operators), 2 * launches * launch if both_ways else 0.0)
    recompute: dict[str, float] = {"": forward}
    for operator in operators:
        again = max(operator.forward, operator.launches * launch)
        recompute[operator.module] = recompute.get(operator.module, 0.0) + again
    return Seconds(
        forward=forward,
        backward=backward,
        recompute=recompute,
        weight_gradient=sum(operator.weight_gradient for operator in operators),
        attention=sum(operator.forward for operator in operators if operator.module == "core_attn"),
    )


def linear_operator(work: Work, module: str, rows: float, columns: float, depth: float, target: str = "") -> Operator:
    """rows · weightᵀ; backward the inputs' gradient and the weight's, which is added to its buffer."""
    rates, itemsize = work.rates, work.itemsize
    forward = matmul_seconds(rates, rows, columns, depth, itemsize)
    inputs = matmul_seconds(rates, rows, depth, columns, itemsize)
    weights = 0.0
    if work.trained:
        weights = matmul_seconds(rates, columns, depth, rows, itemsize) + _accumulation(work, columns * depth)
    return _adapted(work, Operator(module, forward, inputs + weights, weights, 2), rows, columns, depth, target)


def _grouped(work: Work, module: str, rows: float, columns: float, depth: float, groups: int, target: str) -> Operator:
    """The same for `groups` experts, which share the rows: in one kernel, or one after the other."""
    rates, itemsize = work.rates, work.itemsize
    if not work.grouped_experts:
        one = linear_operator(work, module, rows / groups, columns, depth, target)
        return Operator(
            module, groups * one.forward, groups * one.backward, groups * one.weight_gradient, groups * one.launches
        )
    forward = grouped_seconds(rates, rows, columns, depth, itemsize, groups)
    inputs = grouped_seconds(rates, rows, depth, columns, itemsize, groups)
    weights = 0.0
    if work.trained:
        size = groups * columns * depth
        # Grouped kernels write gradients of their own; none adds to a buffer.
        weights = grouped_weight_seconds(rates, rows, columns, depth, itemsize, groups) + _accumulation(
            work, size, fused=False
        )
    return _adapted(work, Operator(module, forward, inputs + weights, weights, 3), rows, columns, depth, target)


def _accumulation(work: Work, size: float, fused: bool | None = None) -> float:
    """Adding a weight's gradient to its buffer; unless fused, written and read once more on the way."""
    fused = work.fused_accumulation if fused is None else fused
    return memory_seconds(work.rates, size * (2 * work.gradient_itemsize + (0 if fused else 2 * work.itemsize)))


def _adapted(work: Work, of: Operator, rows: float, columns: float, depth: float, target: str) -> Operator:
    """With the adapter beside it, where it has one: two narrow products and a sum."""
    if not target or target not in work.lora_target:
        return of
    rank = work.lora_rank
    adapter = (
        matmul_seconds(work.rates, rows, rank, depth, work.itemsize)
        + matmul_seconds(work.rates, rows, columns, rank, work.itemsize)
        + memory_seconds(work.rates, 3 * rows * columns * work.itemsize)
    )
    return of._replace(forward=of.forward + adapter, backward=of.backward + 2 * adapter, launches=of.launches + 5)


def pass_operator(work: Work, module: str, numbers: float, reads: float, more: float, launches: int) -> Operator:
    """An operator that moves `numbers` activations `reads` times forward and `more` times backward."""
    data = numbers * work.itemsize
    return Operator(
        module, memory_seconds(work.rates, data * reads), memory_seconds(work.rates, data * more), 0.0, launches
    )


def _norm(work: Work) -> Operator:
    numbers = work.outer_tokens * work.architecture.hidden_size
    return pass_operator(work, "layernorm", numbers, *((2, 4, 1) if work.fused_norm else (10, 16, 7)))


def _attention_block(work: Work) -> Iterator[Operator]:
    """Norm, projections, rotary embedding, attention, output projection, residual sum."""
    shape, tp = work.architecture, work.tp
    yield _norm(work)
    if shape.mla is None:
        channels = (shape.query_size + 2 * shape.key_value_size) / tp
        yield linear_operator(work, "qkv", work.tokens, channels, shape.hidden_size, "linear_qkv")
        turned = work.tokens * (shape.query_size + shape.key_value_size) / tp
        if shape.qk_layernorm:
            yield pass_operator(work, "qk_norm", turned, *((2, 4, 2) if work.fused_norm else (10, 16, 14)))
        yield pass_operator(work, "rope", turned, *((2, 2, 2) if work.fused_rope else (7, 7, 14)))
        yield pass_operator(work, "split", work.tokens * channels, 2, 2, 3)
    else:
        yield from _latent(work)
    yield _core_attention(work)
    if work.ring > 1:
        yield _merging(work)
    yield linear_operator(work, "proj", work.tokens, shape.hidden_size, shape.attention_size / tp, "linear_proj")
    yield _residual(work)


def _latent(work: Work) -> Iterator[Operator]:
    """Projections of multi-head latent attention (arXiv:2405.04434)."""
    shape, tp = work.architecture, work.tp
    assert shape.mla is not None
    if shape.mla.q_lora_rank is None:
        yield linear_operator(work, "qkv", work.tokens, shape.query_size / tp, shape.hidden_size, "linear_qkv")
    else:
        rank = shape.mla.q_lora_rank
        yield linear_operator(work, "qkv", work.outer_tokens, rank, shape.hidden_size)
        yield linear_operator(work, "mla_up_proj", work.tokens, shape.query_size / tp, rank, "linear_qkv")
    yield linear_operator(work, "qkv", work.outer_tokens, shape.latent_size, shape.hidden_size)
    channels = shape.latent_key_value_size / tp
    yield linear_operator(work, "mla_up_proj", work.tokens, channels, shape.mla.kv_lora_rank, "linear_qkv")
    # Rotary embedding of a part of the channels, and queries and keys put together from their parts.
    yield pass_operator(work, "mla_up_proj", work.tokens * (2 * shape.query_size / tp), 6, 6, 30)


def _core_attention(work: Work) -> Operator:
    """Scores and their product with the values: s · (query + value channels) multiply-adds a token where half is
    masked; backward 2.5 times as many, for scores are computed again (arXiv:2205.14135)."""
    shape, efficiency = work.architecture, work.rates.efficiency
    channels = (shape.query_size + shape.attention_size) / work.tp
    heads = shape.num_attention_heads / work.tp
    if work.plain_attention:
        scores = work.tokens * work.document * heads
        forward = 2 * scores * channels / heads / (work.rates.peak * efficiency.matmul)
        moved = memory_seconds(work.rates, scores * (4 * work.itemsize + 6 * 4))
        return Operator("core_attn", forward + moved, 2 * (forward + moved), 0.0, 12)
    # Blocks of the diagonal are computed whole, and blocks of queries are dealt to the multiprocessors in rounds.
    block = efficiency.tile[0]
    flops = work.tokens * (work.document + block) * channels
    rounds = work.tokens / block * heads / efficiency.units
    flops *= 1 + 0.5 / max(rounds, 0.5)
    forward, backward = efficiency.packed_attention if work.packed else efficiency.attention
    seconds = flops / work.rates.peak
    return Operator("core_attn", seconds / forward, 2.5 * seconds / backward, 0.0, 3)


def _merging(work: Work) -> Operator:
    """What the turns of a ring add up in fp32: three of four queries take part in a turn after the first.

    Forward their outputs are widened and interpolated with what is there (26 bytes a channel), before and after all
    turns once more (12); backward gradients of queries (10), and of keys and values with their copies (16), are added.
    """
    shape, later = work.architecture, 0.75 * (work.ring - 1)
    tokens = work.tokens / work.tp
    keys_values = 2 * shape.key_value_size if shape.mla is None else shape.query_size + shape.attention_size
    forward = (26 * later + 12) * shape.attention_size
    backward = (10 * later + 14) * shape.query_size + 16 * (later + 1) * keys_values
    seconds = [memory_seconds(work.rates, tokens * data) for data in (forward, backward)]
    return Operator("core_attn", seconds[0], seconds[1], 0.0, 20 * (work.ring - 1))


def _residual(work: Work) -> Operator:
    return pass_operator(work, "residual", work.outer_tokens * work.architecture.hidden_size, 3, 2, 2)


def _feed_forward(work: Work) -> Iterator[Operator]:
    """Norm, gate and up in one product, SwiGLU, down, residual sum."""
    yield _norm(work)
    yield from _gated(work, "mlp", work.tokens, work.architecture.ffn_hidden_size / work.tp)
    yield _residual(work)


def _gated(work: Work, module: str, rows: float, size: float) -> Iterator[Operator]:
    hidden = work.architecture.hidden_size
    yield linear_operator(work, module, rows, 2 * size, hidden, "linear_fc1")
    yield _activation(work, module, rows * size)
    yield linear_operator(work, module, rows, hidden, size, "linear_fc2")


def _activation(work: Work, module: str, numbers: float) -> Operator:
    return pass_operator(work, module, numbers, *((3, 5, 1) if work.fused_activation else (6, 13, 4)))


def _experts(work: Work) -> Iterator[Operator]:
    """Norm, router, permutation, experts, permutation back, shared experts, residual sum."""
    moe = work.architecture.moe
    assert moe is not None
    yield _norm(work)
    yield from _routed(work, moe)
    if moe.shared_expert_intermediate_size:
        yield from _gated(work, "shared_experts", work.tokens, moe.shared_expert_intermediate_size / work.tp)
    yield _residual(work)


# Operators that the host has yet to launch when it has read how many rows go where: until then the device has no work.
_AFTER_COUNTS = 20


def _routed(work: Work, moe: MixtureOfExperts) -> Iterator[Operator]:
    hidden, tokens = work.architecture.hidden_size, work.outer_tokens
    yield linear_operator(work, "moe", tokens, moe.num_experts, hidden)
    # Softmax, choice and counts over all experts' scores, in fp32: some ten passes.
    yield pass_operator(work, "moe", tokens * moe.num_experts, 20, 20, 25)
    rows = tokens * moe.router_topk * work.etp * work.imbalance
    # Rows are copied into the experts' order and back; between ranks once more on either side.
    copies = 2 if work.ep == 1 else 4
    yield pass_operator(work, "moe", rows * hidden, 2 * copies, 2 * copies, 10 * copies)
    if work.ep > 1:
        yield Operator("moe", _AFTER_COUNTS * work.rates.efficiency.launch, 0.0, 0.0, 0)
    local, size = moe.num_experts // work.ep, moe.moe_ffn_hidden_size / work.etp
    yield _grouped(work, "moe", rows, 2 * size, hidden, local, "linear_fc1")
    yield _activation(work, "moe_act", rows * size)
    yield _grouped(work, "moe", rows, hidden, size, local, "linear_fc2")
