"""Muon's orthogonalization against torch.optim.Muon; its steps in every layout are in tests/parity/test_one_step.py."""

from __future__ import annotations

import pytest
import torch

from megatune.engine.muon import orthogonalize


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_an_update_is_that_of_torch(shape):
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    parameter = torch.nn.Parameter(torch.zeros(shape))
    parameter.grad = gradient.clone()
    theirs = torch.optim.Muon([parameter], lr=1.0, weight_decay=0.0, momentum=0.0, adjust_lr_fn="match_rms_adamw")
    theirs.step()
    scale = 0.2 * max(shape) ** 0.5
    # torch computes in bf16, whose products it rounds in another order than products of one matrix of several.
    for dtype in (torch.bfloat16, torch.float32):
        ours = -scale * orthogonalize(gradient.to(dtype)[None])[0].float()
        assert (ours - parameter.data).norm() <= 0.02 * parameter.data.norm()


def test_matrices_are_orthogonalized_each_by_itself():
    matrices = torch.randn(3, 12, 30, generator=torch.Generator().manual_seed(1)) * torch.tensor([1e-3, 1, 1e3]).view(
        3, 1, 1
    )
    together = orthogonalize(matrices)
    values = torch.linalg.svdvals(together)
    assert ((values > 0.6) & (values < 1.3)).all()
    torch.testing.assert_close(together, torch.cat([orthogonalize(one[None]) for one in matrices]))


def test_a_matrix_without_gradient_gets_no_update():
    assert not orthogonalize(torch.zeros(1, 4, 6)).any()
