"""The chunked gated delta rule against its definition, token by token, and against Transformers' functions."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from megatune.engine.layers.delta_net import convolve
from megatune.engine.layers.delta_rule import CHUNK, chunked, recurrent, sequence_layout

# Shorter than a chunk, whole chunks, ends inside of chunks, more chunks than are in memory at once; documents of one
# token, that end where a chunk ends, and that are longer than it.
ROWS = [(1,), (5,), (CHUNK,), (300,), (1, CHUNK - 1, 6, CHUNK, 1, 1, 170), (1100, 33)]


def arguments(s: int, dtype: torch.dtype, decay: float = 16.0) -> tuple[list[Tensor], Tensor]:
    """Two rows with 2 key heads and 4 value heads; some keys repeat, some tokens overwrite what was there."""
    generator = torch.Generator().manual_seed(s)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, key, value = draw(s, 2, 2, 12), draw(s, 2, 2, 12), draw(s, 2, 2, 2, 8)
    key[1::3] = key[:-1:3] if s > 1 and len(key[1::3]) == len(key[:-1:3]) else key[1::3]
    scale = torch.rand(2, 2, generator=generator, dtype=torch.float64) * decay
    beta = (draw(s, 2, 2, 2) * 4).sigmoid()
    tensors = query, key, value, -scale * torch.nn.functional.softplus(draw(s, 2, 2, 2)), beta
    return [each.to(dtype).requires_grad_() for each in tensors], draw(s, 2, 2, 2, 8).to(dtype)


def computed(rule, inputs: list[Tensor], weights: Tensor) -> list[Tensor]:
    output = rule(*inputs)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), inputs)]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= tolerance * other.norm().clamp(min=1e-12)


@pytest.mark.parametrize("lengths", ROWS, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=str)
def test_chunked_equals_recurrent(lengths, dtype, tolerance):
    boundaries = (0, *accumulate(lengths))
    inputs, weights = arguments(boundaries[-1], dtype)
    found = computed(lambda *each: chunked(*each, sequence_layout(boundaries, 4)), inputs, weights)
    expected = computed(lambda *each: recurrent(*each, boundaries), inputs, weights)
    assert_close(found, expected, tolerance)


@pytest.mark.parametrize("decay", [0.1, 2.0, 16.0, 64.0])
def test_fp32_is_exact_however_fast_the_state_decays(decay):
    """With differences of sums from the start of a chunk, the gradient of decays is 8e-6 off at 16, and 2e-5 at 64."""
    boundaries = (0, 150, 300)
    inputs, weights = arguments(300, torch.float32, decay)
    found = computed(lambda *each: chunked(*each, sequence_layout(boundaries, 4)), inputs, weights)
    exact = [each.detach().double().requires_grad_() for each in inputs]
    expected = computed(lambda *each: recurrent(*each, boundaries), exact, weights.double())
    assert_close(found, expected, 1e-6)


@pytest.mark.parametrize("length", [1, 5, 63, 64, 65, 130, 300])
def test_chunked_equals_transformers(length):
    from transformers.models.qwen3_next.modeling_qwen3_next import (
        torch_chunk_gated_delta_rule,
        torch_recurrent_gated_delta_rule,
    )

    inputs, weights = arguments(length, torch.float32, decay=2.0)
    found = computed(lambda *each: chunked(*each, sequence_layout((0, length), 4)), inputs, weights)
    for rule in (torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule):

        def theirs(query, key, value, decay, beta, rule=rule):
            rows = [each.repeat_interleave(2, 2) for each in (query, key)]
            rows += [each.flatten(2, 3) for each in (value, decay, beta)]
            rows = [each.transpose(0, 1) for each in rows]
            options = {"initial_state": None, "output_final_state": False, "use_qk_l2norm_in_kernel": True}
            return rule(*rows[:3], g=rows[3], beta=rows[4], **options)[0].transpose(0, 1).unflatten(2, (2, 2))

        assert_close(found, computed(theirs, inputs, weights), 1e-5)


def test_documents_of_a_row_are_computed_as_rows_of_their_own():
    lengths = (1, 40, 100, 3, 90)
    boundaries = (0, *accumulate(lengths))
    inputs, weights = arguments(boundaries[-1], torch.float64)
    found = computed(lambda *each: chunked(*each, sequence_layout(boundaries, 4)), inputs, weights)

    def apart(*rows: Tensor) -> Tensor:
        parts = zip(*(row.split(lengths) for row in rows), strict=True)
        return torch.cat([chunked(*part, sequence_layout((0, len(part[0])), 4)) for part in parts])

    assert_close(found, computed(apart, inputs, weights), 1e-12)


@pytest.mark.parametrize("lengths", [(1,), (2,), (9,), (3, 1, 8, 2)], ids=str)
def test_convolution_equals_torch_inside_each_document(lengths):
    generator, boundaries = torch.Generator().manual_seed(1), (0, *accumulate(lengths))
    rows = torch.randn(boundaries[-1], 2, 3, 5, generator=generator, dtype=torch.float64)
    weight = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64)
    inputs = [rows.requires_grad_(), weight.requires_grad_()]
    factors = torch.randn(rows.shape, generator=generator, dtype=torch.float64)

    def apart(rows: Tensor, weight: Tensor) -> Tensor:
        outputs = []
        for document in rows.split(lengths):
            padded = torch.nn.functional.pad(document.flatten(2).permute(1, 2, 0), (3, 0))
            mixed = torch.nn.functional.conv1d(padded, weight.flatten(0, 1)[:, None], groups=15)
            outputs.append(torch.nn.functional.silu(mixed).permute(2, 0, 1).unflatten(2, (3, 5)))
        return torch.cat(outputs)

    found = computed(lambda *each: convolve(*each, sequence_layout(boundaries, 4)), inputs, factors)
    assert_close(found, computed(apart, inputs, factors), 1e-12)


def test_backward_keeps_the_arguments_and_little_else():
    """Of 9B's proportions autograd would keep ten times the arguments."""
    inputs, _ = arguments(2048, torch.float32)
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        chunked(*inputs, sequence_layout((0, 2048), 4))
    assert sum(kept) <= 1.1 * sum(each.untyped_storage().nbytes() for each in inputs)
