"""FusedAdam against torch.optim.AdamW."""

from __future__ import annotations

import copy

import torch

from megatune.engine.adam import FusedAdam

SHAPES = ((3, 5), (7,), (2, 2))
SETTINGS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6}


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def groups(params: list[torch.nn.Parameter]) -> list[dict]:
    return [{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:], "weight_decay": 0.0}]


def give_gradients(params: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step + 1)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


def test_five_steps_equal_adamw():
    ours, theirs = parameters(), parameters()
    fused, adamw = FusedAdam(groups(ours), **SETTINGS), torch.optim.AdamW(groups(theirs), **SETTINGS)
    for step in range(5):
        for params, optimizer in ((ours, fused), (theirs, adamw)):
            give_gradients(params, step)
            optimizer.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert [group["step"] for group in fused.param_groups] == [5, 5]
    for one, other in zip(ours, theirs, strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(fused.state[one][key], adamw.state[other][key], rtol=1e-6, atol=1e-7)


def test_state_dict_goes_on_bit_for_bit():
    params = parameters()
    optimizer = FusedAdam(groups(params), **SETTINGS)
    for step in range(2):
        give_gradients(params, step)
        optimizer.step()
    resumed_params = [torch.nn.Parameter(param.detach().clone()) for param in params]
    resumed = FusedAdam(groups(resumed_params), lr=1.0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(2, 5):
        for some, one in ((params, optimizer), (resumed_params, resumed)):
            give_gradients(some, step)
            one.step()
    assert all(torch.equal(one, other) for one, other in zip(params, resumed_params, strict=True))


def test_state_exists_before_the_first_step():
    params = parameters()
    optimizer = FusedAdam(groups(params), **SETTINGS)
    optimizer.init_state()
    assert all(optimizer.state[param]["exp_avg"].shape == param.shape for param in params)


def test_parameter_without_gradient_stays():
    params = parameters()
    before = params[2].detach().clone()
    optimizer = FusedAdam(groups(params), **SETTINGS)
    give_gradients(params[:2], 0)
    optimizer.step()
    assert torch.equal(params[2], before)
