"""Kernels that stand where Megatron-Core asks Apex or a compiler, against what they replace."""

from __future__ import annotations

import pytest
import torch
from layouts import EXPERT_LAYOUTS, LAYOUTS, MORE_LAYOUTS
from settings_gradients import run_with, worst_error

from megatune.engine.layers.feed_forward import (
    clamped_swiglu,
    fused_clamped_swiglu,
    fused_swiglu,
    reference_swiglu,
)
from megatune.engine.layers.gradients import add_weight_gradient

LAYOUTS_OF_SWITCH = {**LAYOUTS, "dp2, grad overlap": MORE_LAYOUTS["dp2, grad overlap"]}


@pytest.mark.parametrize(
    ("dtype", "main_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
def test_weight_gradient_is_added_in_the_dtype_of_main_grad(dtype, main_dtype):
    grad_output, inputs = torch.randn(50, 7).to(dtype), torch.randn(50, 5).to(dtype)
    main_grad = torch.randn(7, 5).to(main_dtype)
    expected = main_grad.double() + grad_output.t().double() @ inputs.double()
    add_weight_gradient(main_grad, grad_output, inputs)
    # The default tolerance of main_grad's dtype: a product rounded to bf16 would not be within fp32's.
    torch.testing.assert_close(main_grad, expected.to(main_dtype))


@pytest.mark.covering
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", ["1", "tp2 sp", "pp2", "dp2, grad overlap"])
def test_gradients_added_straight_to_main_grad_are_the_same(pool, model_dir, layout, tied):
    model, chosen = model_dir("qwen2", tied=tied), LAYOUTS_OF_SWITCH[layout]
    straight = run_with(pool, model, chosen, {"gradient_accumulation_fusion": True})
    copied = run_with(pool, model, chosen, {"gradient_accumulation_fusion": False})
    assert worst_error(straight, copied) < 1e-6
    for (_, gradients, direct), (_, _, without) in zip(straight, copied, strict=True):
        # Every matrix of every layer, and as without the fusion the output layer where this rank has it.
        assert direct == without + sum(name.endswith("weight") and "linear" in name for name in gradients)


@pytest.mark.covering
@pytest.mark.parametrize("layout", ["1", "ep2", "ep2 allgather"])
def test_gradients_of_experts_added_straight_to_main_grad_are_the_same(pool, model_dir, layout):
    model, chosen = model_dir("qwen3_moe"), EXPERT_LAYOUTS[layout]
    straight = run_with(pool, model, chosen, {"gradient_accumulation_fusion": True})
    copied = run_with(pool, model, chosen, {"gradient_accumulation_fusion": False})
    assert worst_error(straight, copied) < 1e-6
    for (_, gradients, direct), (_, _, without) in zip(straight, copied, strict=True):
        named = [name for name in gradients if name.endswith(("weight1", "weight2"))]
        dense = sum(name.endswith("weight") and "linear" in name for name in gradients)
        assert named
        assert direct == without + dense + len(named)


def test_gradients_of_16_bits_added_straight_are_not_rounded_on_the_way(pool, model_dir):
    model, layout = model_dir("qwen3"), LAYOUTS["1"]
    straight, copied = (
        run_with(pool, model, layout, {"gradient_accumulation_fusion": fused}, precision={"bf16": True})[0][1]
        for fused in (True, False)
    )
    for name in ("0.decoder.layers.0.mlp.linear_fc2.weight", "0.decoder.layers.3.self_attention.linear_qkv.weight"):
        # The last layer's inputs are the same bit for bit, so that the difference is one rounding to 8 bits.
        assert 0 < (straight[name] - copied[name]).norm() < 2**-8 * copied[name].norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_swiglu_equals_the_plain_one(dtype):
    gate_up = torch.randn(5, 3, 16).to(dtype).requires_grad_()
    grad = torch.randn(5, 3, 8).to(dtype)
    ours, plain = fused_swiglu(gate_up), reference_swiglu(gate_up)
    assert torch.equal(ours, plain)
    (of_ours,), (of_plain,) = (torch.autograd.grad(output, gate_up, grad) for output in (ours, plain))
    assert torch.equal(of_ours, of_plain)


def test_fused_swiglu_keeps_only_its_input():
    gate_up = torch.randn(5, 3, 16, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        fused_swiglu(gate_up)
    assert [tensor.data_ptr() for tensor in kept] == [gate_up.data_ptr()]


def test_fused_clamped_swiglu_equals_the_plain_one_and_keeps_its_arguments():
    gate_up, probs = (5 * torch.randn(64, 48, dtype=torch.float64)).requires_grad_(), torch.rand(64).double()
    inputs, grad = (gate_up, probs.requires_grad_()), torch.randn(64, 24, dtype=torch.float64)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        ours = fused_clamped_swiglu(*inputs, 7.0)
    plain = clamped_swiglu(*inputs, 7.0)
    assert torch.equal(ours, plain)
    pairs = zip(*(torch.autograd.grad(output, inputs, grad) for output in (ours, plain)), strict=True)
    assert all(torch.allclose(mine, other, rtol=1e-12) for mine, other in pairs)
    assert (gate_up.abs() > 7).sum() > 100  # what is beyond a limit has no gradient
    assert [tensor.data_ptr() for tensor in kept] == [each.data_ptr() for each in inputs]


@pytest.mark.parametrize("layout", ["1", "tp2 sp"])
def test_model_learns_the_same_with_and_without_fused_activation(pool, model_dir, layout):
    model = model_dir("llama")
    fused = run_with(pool, model, LAYOUTS[layout], {"bias_activation_fusion": True})
    plain = run_with(pool, model, LAYOUTS[layout], {"bias_activation_fusion": False})
    assert worst_error(fused, plain) < 1e-6


def test_model_uses_the_fused_activation(pool, model_dir):
    """In bf16 Megatron-Core's own fusion rounds otherwise, so that equal bits can only come from ours."""
    model = model_dir("llama")
    fused, plain = (
        run_with(pool, model, LAYOUTS["1"], {"bias_activation_fusion": fused}, precision={"bf16": True})
        for fused in (True, False)
    )
    assert worst_error(fused, plain) == 0
