"""Products in bf16 and fp16 where a CPU has no instructions for them, as if none had."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatune import half_precision
from megatune.bridge.assemble import assemble
from megatune.config.settings import Settings, with_settings

HALF = (torch.bfloat16, torch.float16)
# Long sums: in another order than fp32's they are rounded to other numbers of 16 bits.
LENGTH = 1024
ENDS = torch.tensor([5, 5, 30, 40], dtype=torch.int32)  # the second run has no rows


@pytest.fixture
def without_instructions(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(half_precision, "_has_instructions", lambda dtype: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    before = len(half_precision._REGISTERED)
    half_precision.multiply_in_fp32.__wrapped__(torch.bfloat16)
    yield
    for library in half_precision._REGISTERED[before:]:
        library._destroy()
    del half_precision._REGISTERED[before:]


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "mm": (torch.mm, ((40, LENGTH), (LENGTH, 24))),
    "a transposed one": (lambda a, b: a.T @ b, ((LENGTH, 40), (LENGTH, 24))),
    "linear": (F.linear, ((2, 20, LENGTH), (24, LENGTH), (24,))),
    "bmm": (torch.bmm, ((3, 40, LENGTH), (3, LENGTH, 24))),
    "baddbmm": (
        lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2),
        ((3, 40, 24), (3, 40, LENGTH), (3, LENGTH, 24)),
    ),
    "grouped": (lambda a, b: F.grouped_mm(a, b, offs=ENDS), ((40, LENGTH), (4, LENGTH, 24))),
    "grouped by columns": (lambda a, b: F.grouped_mm(a.T, b, offs=ENDS), ((40, 24), (40, LENGTH))),
}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", PRODUCTS)
def test_they_are_those_of_fp32_rounded(without_instructions, name, dtype):
    product, shapes = PRODUCTS[name]
    tensors = [random(*shape, dtype=dtype).requires_grad_() for shape in shapes]
    wide = [tensor.detach().float().requires_grad_() for tensor in tensors]
    found, expected = product(*tensors), product(*wide)
    grad = random(*found.shape, dtype=dtype)
    found.backward(grad)
    expected.backward(grad.float())
    assert torch.equal(found, expected.to(dtype))
    for tensor, each in zip(tensors, wide, strict=True):
        # A bias' gradient is a sum, which is none of these products.
        assert tensor.dim() == 1 or torch.equal(tensor.grad, each.grad.to(dtype))


@pytest.mark.parametrize("name", PRODUCTS)
def test_those_of_fp32_stay_as_they_are(name, request):
    product, shapes = PRODUCTS[name]
    tensors = [random(*shape, dtype=torch.float32) for shape in shapes]
    before = product(*tensors)
    request.getfixturevalue("without_instructions")
    assert torch.equal(product(*tensors), before)
    with pytest.raises(RuntimeError, match="dtype"):
        product(tensors[0].bfloat16(), *tensors[1:])


@pytest.mark.parametrize(("number", "is_wide"), [(1, False), (40, True)])
def test_a_few_rows_are_multiplied_by_torch(without_instructions, number, is_wide):
    rows, weight = random(number, LENGTH, dtype=torch.bfloat16), random(LENGTH, 24, dtype=torch.bfloat16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        rows @ weight
    assert ("aten::_to_copy" in {event.key for event in profiler.key_averages()}) == is_wide


def _model_in_bf16(folder: Path) -> None:
    half_precision.multiply_in_fp32.cache_clear()
    assemble(folder, with_settings(Settings(), {"precision.bf16": True}))
    rows, weight = random(40, LENGTH, dtype=torch.bfloat16), random(LENGTH, 24, dtype=torch.bfloat16)
    is_rounded = torch.equal(rows @ weight, (rows.float() @ weight.float()).bfloat16())
    assert half_precision.multiply_in_fp32.cache_info().misses == 1
    assert is_rounded or half_precision._has_instructions(torch.bfloat16) or torch.accelerator.is_available()


def test_a_model_in_bf16_asks_for_it(pool, model_dir):
    pool.run(1, _model_in_bf16, model_dir("qwen3"))
