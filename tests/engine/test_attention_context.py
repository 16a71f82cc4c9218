"""Attention of packed rows and across context-parallel ranks, against the definition in one process."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from pool import RankPool
from references import reference_attention
from torch import Tensor

from megatune.config.settings import ParallelSettings
from megatune.engine import groups
from megatune.engine.layers.attention.core import CoreAttention
from megatune.engine.sequences import local_tokens

VARIANTS = ("all_gather", "a2a", "p2p")
# Heads n and g, channels of queries and keys, and of values.
SHAPES = {
    "multi-head": (4, 4, 8, 8),
    "grouped": (8, 2, 8, 8),
    "odd groups": (12, 3, 8, 8),
    "latent": (4, 4, 12, 8),
    "wide values": (4, 2, 6, 10),
}
# A document each, as many times the least that a context-parallel layout takes: uneven ones, and the least itself.
DOCUMENTS = {"one document": (5,), "packed": (3, 1, 6, 1, 2)}


def attention(
    cp_comm_type: str | None, cp_size: int, backend: str = "auto", scale: float | None = None
) -> CoreAttention:
    from megatron.core.transformer.enums import AttnBackend, AttnMaskType

    config = SimpleNamespace(
        context_parallel_size=cp_size,
        attention_backend=AttnBackend[backend],
        windows=[None],
        softmax_type="vanilla",
        bidirectional_images=False,
    )
    return CoreAttention(config, 1, AttnMaskType.causal, "self", softmax_scale=scale, cp_comm_type=cp_comm_type)


def inputs(shape: str, boundaries: tuple[int, ...], rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value and the output's gradient, whole."""
    n, g, d, e = SHAPES[shape]
    generator = torch.Generator().manual_seed(len(boundaries))
    sizes = (n, d), (g, d), (g, e), (n * e,)
    return [torch.randn(boundaries[-1], rows, *size, generator=generator).to(dtype) for size in sizes]


def results(attend, query: Tensor, key: Tensor, value: Tensor, weights: Tensor) -> list[Tensor]:
    """The output, and gradients of query, key and value."""
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    output = attend(*leaves)
    output.backward(weights)
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def bounds(lengths: tuple[int, ...], multiple: int) -> tuple[int, ...]:
    return tuple(sum(lengths[:count]) * multiple for count in range(len(lengths) + 1))


def errors(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Relative L2 errors."""
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]


def compare(module: CoreAttention, whole: list[Tensor], boundaries: tuple[int, ...], mine: Tensor) -> list[float]:
    """Errors of this rank's part of the output and of the gradients."""

    def ours(*tensors: Tensor) -> Tensor:
        return module(*tensors, packed_seq_params=SimpleNamespace(boundaries=boundaries))

    def definition(*tensors: Tensor) -> Tensor:
        return reference_attention(*tensors, boundaries, module.softmax_scale)

    expected = results(definition, *(tensor.double() for tensor in whole))
    return errors(results(ours, *(tensor[mine] for tensor in whole)), [tensor[mine] for tensor in expected])


def errors_of_all(
    variant: str, size: int, backend: str, dtype: torch.dtype, scale: float | None = None
) -> dict[tuple[str, str, int], list[float]]:
    """On every rank: errors of every case, by shape, documents and rows."""
    groups.build(ParallelSettings(context_parallel_size=size, cp_comm_type=variant), seed=1, timeout=30)
    module, rank = attention(variant, size, backend, scale), groups.coordinates().cp_rank
    found = {}
    for shape, documents in product(SHAPES, DOCUMENTS):
        boundaries = bounds(DOCUMENTS[documents], 2 * size)
        for rows in (1, 2) if documents == "one document" else (1,):
            whole = inputs(shape, boundaries, rows, dtype)
            found[shape, documents, rows] = compare(module, whole, boundaries, local_tokens(boundaries, rank, size))
    return found


def check(answers: list[dict[tuple[str, str, int], list[float]]], tolerance: float) -> None:
    too_large = [(rank, case, of_case) for rank, found in enumerate(answers) for case, of_case in found.items()
                 if not max(of_case) < tolerance]  # fmt: skip
    assert not too_large


# fp32 rounds to 6e-8; what is left is how many roundings add up.
ROUNDING = 5e-7


@pytest.mark.extended(4)  # eight ranks are below
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_across_ranks_is_its_definition(pool: RankPool, variant, size):
    check(pool.run(size, errors_of_all, variant, size, "auto", torch.float32), ROUNDING)


@pytest.mark.parametrize("variant", VARIANTS)
def test_plain_products_across_ranks_are_their_definition(pool: RankPool, variant):
    check(pool.run(2, errors_of_all, variant, 2, "unfused", torch.float32), ROUNDING)


@pytest.mark.parametrize("variant", VARIANTS)
def test_large_scores_are_merged_without_overflow(pool: RankPool, variant):
    """Scores of hundreds: their exponentials are not numbers. A score's error grows with the score."""
    check(pool.run(2, errors_of_all, variant, 2, "auto", torch.float64, 40.0), 1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_sixteen_bits_round_like_sixteen_bits(pool: RankPool, variant):
    """8 bits: a rounding is 2e-3. Weights, outputs and gradients are rounded a few times each."""
    check(pool.run(4, errors_of_all, variant, 4, "auto", torch.bfloat16), 1e-2)


def far_around(variant: str) -> list[float]:
    """On each of eight ranks."""
    groups.build(ParallelSettings(context_parallel_size=8, cp_comm_type=variant), seed=1, timeout=30)
    boundaries = bounds((2, 1), 16)
    whole = [torch.randn(48, 1, *sizes, generator=torch.Generator().manual_seed(2)) for sizes in
             ((8, 8), (2, 8), (2, 8), (64,))]  # fmt: skip
    return compare(attention(variant, 8), whole, boundaries, local_tokens(boundaries, groups.coordinates().cp_rank, 8))


@pytest.mark.parametrize("variant", VARIANTS)
def test_eight_ranks(pool: RankPool, variant):
    for rank, found in enumerate(pool.run(8, far_around, variant)):
        assert max(found) < ROUNDING, rank


def recomputed(variant: str) -> bool:
    """Whether attention computed again in the backward pass, as for recompute_modules core_attn, is bit-equal."""
    from megatron.core import tensor_parallel

    groups.build(ParallelSettings(context_parallel_size=2, cp_comm_type=variant), seed=1, timeout=30)
    boundaries = bounds(DOCUMENTS["packed"], 4)
    mine = local_tokens(boundaries, groups.coordinates().cp_rank, 2)
    module = attention(variant, 2)
    tensors = [tensor[mine] for tensor in inputs("grouped", boundaries, 1, torch.float32)]

    def once(*tensors: Tensor) -> Tensor:
        return module(*tensors, packed_seq_params=SimpleNamespace(boundaries=boundaries))

    def twice(*tensors: Tensor) -> Tensor:
        return tensor_parallel.checkpoint(once, False, *tensors)

    return all(map(torch.equal, results(once, *tensors), results(twice, *tensors)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_recomputed_attention_is_bit_equal(pool: RankPool, variant):
    assert all(pool.run(2, recomputed, variant))


def sinks_across_ranks(variant: str, size: int) -> list[float]:
    """On every rank: errors of the output, of gradients of query, key and value, and of the sinks' over all ranks."""
    groups.build(ParallelSettings(context_parallel_size=size, cp_comm_type=variant), seed=1, timeout=30)
    boundaries, rows = bounds(DOCUMENTS["packed"], 2 * size), 2
    mine, whole = (
        local_tokens(boundaries, groups.coordinates().cp_rank, size),
        inputs("grouped", boundaries, rows, torch.float32),
    )
    module, sinks = attention(variant, size), torch.linspace(-2, 3, SHAPES["grouped"][0])
    module.softmax_offset = torch.nn.Parameter(sinks)
    definition = sinks.double().requires_grad_()
    expected = results(
        lambda *tensors: reference_attention(*tensors, boundaries, sinks=definition), *(each.double() for each in whole)
    )
    found = results(
        lambda *tensors: module(*tensors, packed_seq_params=SimpleNamespace(boundaries=boundaries)),
        *(each[mine] for each in whole),
    )
    total = module.softmax_offset.grad.clone()
    torch.distributed.all_reduce(total)
    return errors([*found, total], [*(each[mine] for each in expected), definition.grad])


@pytest.mark.extended(4)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_sinks_across_ranks_are_their_definition(pool: RankPool, variant, size):
    for rank, found in enumerate(pool.run(size, sinks_across_ranks, variant, size)):
        assert max(found) < ROUNDING, rank
