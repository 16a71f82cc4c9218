"""Products in 8-bit floats, against fp32 products of the same values, on the device that is there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatune.config.settings import PrecisionSettings, Settings
from megatune.engine import device
from megatune.engine.layers import fp8
from megatune.errors import ExitCode, MegatuneError

pytestmark = pytest.mark.skipif(
    device.HAS_GPU and device.compute_capability() < (8, 9), reason="this GPU has no products of 8-bit floats"
)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# torch's kernels for scales of rows write bf16 on a GPU.
DTYPES = [torch.bfloat16] if device.HAS_GPU else [torch.float32, torch.bfloat16]


def normal(*shape: int, dtype: torch.dtype = DTYPES[0]) -> Tensor:
    return torch.randn(shape).to(dtype).to(device.current())


def rounded(values: Tensor, dtype: torch.dtype, dim: int | None) -> Tensor:
    """What 8 bits keep of the values, in fp32."""
    wide = values.float()
    largest = wide.abs().max() if dim is None else wide.abs().amax(dim, keepdim=True)
    scale = largest / torch.finfo(dtype).max
    return (wide / scale).to(dtype).float() * scale


@pytest.mark.parametrize("rowwise", [False, True], ids=["tensorwise", "rowwise"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_the_rounded_factors(dtype, rowwise):
    """Values and both gradients; the weight's is of the inputs as they were."""
    torch.manual_seed(0)
    sizes = torch.logspace(-2, 2, 7, device=device.current())[:, None]
    inputs = (normal(3, 7, 64) * sizes).to(dtype).requires_grad_()
    weight, grad = normal(48, 64, dtype=dtype).requires_grad_(), normal(3, 7, 48, dtype=dtype)
    output = fp8._Linear.apply(inputs, weight, rowwise, False, False, False, None)
    of_inputs, of_weight = torch.autograd.grad(output, (inputs, weight), grad)
    flat, flat_grad = inputs.detach().flatten(0, 1), grad.flatten(0, 1)
    row = 1 if rowwise else None
    expected = rounded(flat, E4M3, row) @ rounded(weight.detach(), E4M3, row).t()
    back = rounded(flat_grad, E4M3 if rowwise else E5M2, row) @ rounded(weight.detach(), E4M3, 0 if rowwise else None)
    for found, truth in ((output, expected), (of_inputs, back), (of_weight, flat_grad.t() @ flat)):
        assert found.dtype == dtype
        largest = truth.abs().amax(1, keepdim=True)  # of what a row adds up, and so of what its sums are rounded by
        errors = (found.reshape(truth.shape) - truth.to(dtype)).abs() / largest
        assert errors.max() <= max(1e-6, torch.finfo(dtype).eps)


def test_a_large_token_costs_others_no_bits_under_scales_of_rows():
    torch.manual_seed(0)
    inputs, weight = normal(8, 64), normal(48, 64)
    inputs[0] *= 1e6
    truth = inputs @ weight.t()

    def error(rowwise: bool) -> float:
        found = fp8.multiply(inputs, weight, rowwise=rowwise)
        return ((found - truth)[1:].norm() / truth[1:].norm()).item()

    assert error(rowwise=True) < 0.05 < 0.9 < error(rowwise=False)


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_zeros_and_values_that_are_not_finite(scaling):
    weight = normal(16, 32)
    assert not fp8.multiply(torch.zeros_like(weight), weight, rowwise=scaling == "rowwise").any()
    broken = normal(4, 32)
    broken[1, 2] = torch.inf  # steps that are not finite are found by their gradients
    assert not fp8.multiply(broken, weight, rowwise=scaling == "rowwise")[1].isfinite().any()


def test_a_gpu_without_products_of_8_bits_is_refused(monkeypatch):
    monkeypatch.setattr(fp8.device, "HAS_GPU", True)
    monkeypatch.setattr(fp8.device, "compute_capability", lambda: (8, 0))
    monkeypatch.setattr(fp8.device, "name", lambda: "NVIDIA A100")
    fp8.require(Settings())
    with pytest.raises(MegatuneError, match="fp8 rowwise is not available on NVIDIA A100") as refused:
        fp8.require(Settings(precision=PrecisionSettings(bf16=True, fp8="rowwise")))
    assert refused.value.exit_code is ExitCode.SETTINGS
    monkeypatch.setattr(fp8.device, "compute_capability", lambda: (8, 9))
    fp8.require(Settings(precision=PrecisionSettings(bf16=True, fp8="rowwise")))
