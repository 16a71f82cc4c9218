"""Native layers against their plain references, in fp64 where rounding would hide a difference."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from references import reference_rms_norm

from megatune.engine.layers.norm import RMSNorm


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_norm_equals_its_definition(dtype, fused):
    config = SimpleNamespace(
        params_dtype=dtype, sequence_parallel=True, rms_norm_fusion=fused, layernorm_zero_centered_gamma=False
    )
    norm = RMSNorm(config, 16, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    hidden_states = torch.randn(5, 3, 16).to(dtype) * 1e-2  # small enough that eps counts
    torch.testing.assert_close(norm(hidden_states), reference_rms_norm(hidden_states, norm.weight, 1e-5))
    assert norm.weight.sequence_parallel


def norm_gradients(hidden_states: torch.Tensor, grad: torch.Tensor, *, fused: bool) -> tuple[torch.Tensor, ...]:
    """Gradients of input and weight, and how many tensors are kept between the passes."""
    config = SimpleNamespace(
        params_dtype=torch.float64, sequence_parallel=False, rms_norm_fusion=fused, layernorm_zero_centered_gamma=False
    )
    norm = RMSNorm(config, 16, eps=1e-5)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-1, 2, 16))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(1) or tensor, lambda tensor: tensor):
        output = norm(hidden_states)
    return *torch.autograd.grad(output, (hidden_states, norm.weight), grad), len(kept)


def test_gradients_of_the_fused_norm_are_those_of_the_plain_one():
    hidden_states = (torch.randn(5, 3, 16, dtype=torch.float64) * 1e-2).requires_grad_()
    grad = torch.randn_like(hidden_states)
    hidden, weight, few = norm_gradients(hidden_states, grad, fused=True)
    plain_hidden, plain_weight, many = norm_gradients(hidden_states, grad, fused=False)
    torch.testing.assert_close(hidden, plain_hidden, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weight, plain_weight, rtol=1e-12, atol=1e-12)
    # What is kept shows which of the two computed.
    assert few == 3 < many
