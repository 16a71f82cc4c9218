"""FusedAdam against torch.optim.AdamW."""

from __future__ import annotations

import copy

import pytest
import torch

from megatune.engine import device
from megatune.engine.adam import FusedAdam

pytestmark = pytest.mark.usefixtures("computing_device")

SHAPES = ((3, 5), (7,), (2, 2))
SETTINGS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6}


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator(device.current()).manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def groups(params: list[torch.nn.Parameter]) -> list[dict]:
    return [{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:], "weight_decay": 0.0}]


def give_gradients(params: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator(device.current()).manual_seed(step + 1)
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


def test_averages_in_bf16_are_rounded_after_an_update_in_fp32():
    ours, exact = parameters(), parameters()
    rounded = FusedAdam(groups(ours), **SETTINGS, exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16)
    wide = FusedAdam(groups(exact), **SETTINGS)
    for params, optimizer in ((ours, rounded), (exact, wide)):
        give_gradients(params, 0)
        optimizer.step()
    # Averages begin at 0, so the first update has nothing rounded in it.
    assert all(torch.equal(one, other) for one, other in zip(ours, exact, strict=True))
    for one, other in zip(ours, exact, strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert rounded.state[one][key].dtype == torch.bfloat16
            assert torch.equal(rounded.state[one][key], wide.state[other][key].bfloat16())
    for step in range(1, 4):
        for params, optimizer in ((ours, rounded), (exact, wide)):
            give_gradients(params, step)
            optimizer.step()
    assert not torch.equal(ours[0], exact[0])
    # An average with 8 bits moves an update by some 2^-9 of the learning rate.
    torch.testing.assert_close(ours, exact, rtol=0, atol=3 * SETTINGS["lr"] * 2**-8)


def test_one_average_in_bf16_leaves_the_other_exact():
    ours, exact = parameters(), parameters()
    mixed, wide = (
        FusedAdam(groups(ours), **SETTINGS, exp_avg_dtype=torch.bfloat16),
        FusedAdam(groups(exact), **SETTINGS),
    )
    for step in range(3):
        for params, optimizer in ((ours, mixed), (exact, wide)):
            give_gradients(params, step)
            optimizer.step()
    for one, other in zip(ours, exact, strict=True):
        assert torch.equal(mixed.state[one]["exp_avg_sq"], wide.state[other]["exp_avg_sq"])
        assert mixed.state[one]["exp_avg"].dtype == torch.bfloat16
