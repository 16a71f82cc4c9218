"""Native layers against their plain references, in fp64 where rounding would hide a difference."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatune.engine.layers.norm import RMSNorm, reference_rms_norm


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_norm_equals_its_definition(dtype):
    config = SimpleNamespace(params_dtype=dtype, sequence_parallel=True)
    norm = RMSNorm(config, 16, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    hidden_states = torch.randn(5, 3, 16).to(dtype) * 1e-2  # small enough that eps counts
    torch.testing.assert_close(norm(hidden_states), reference_rms_norm(hidden_states, norm.weight, 1e-5))
    assert norm.weight.sequence_parallel
