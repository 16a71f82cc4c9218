"""The operators of a model against the counts of its weights: what they compute, and what they move."""

from __future__ import annotations

from dataclasses import replace

import pytest
from activation_cases import DENSE, LATENT, QWEN3, SHARED, SP, SPARSE, TP2
from layouts import Layout
from test_plan_activation_formulas import LENGTH, make_case

from megatune.plan.flops import num_matmul_parameters, train_flops
from megatune.plan.operators.decoder import decoder_layer, head
from megatune.plan.operators.operator import Attention, Moved, Operator, Product
from megatune.plan.operators.shapes import Shapes, shapes_of


def operators_of(shapes: Shapes) -> list[Operator]:
    """All of a model but its embedding."""
    found: list[Operator] = []
    for layer in range(shapes.architecture.num_layers):
        for branch in decoder_layer(shapes, shapes.architecture.is_moe_layer(layer)):
            found += branch
    return [*found, *head(shapes)]


def flops(operators: list[Operator], attribute: str) -> float:
    kernels = [kernel for operator in operators for kernel in getattr(operator, attribute)]
    return sum(kernel.flops for kernel in kernels if isinstance(kernel, Product | Attention))


@pytest.mark.parametrize("parallel", [{}, TP2 | SP], ids=["1", "tp2 sp"])
@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "one by one"])
@pytest.mark.parametrize("model", [DENSE, QWEN3, SPARSE, SHARED, LATENT], ids=lambda model: model.model_type)
def test_products_are_those_of_the_weights(model, grouped, parallel):
    layout = Layout(
        2 if parallel else 1, parallel, {"moe_grouped_gemm": grouped}, {}, {"cross_entropy_loss_fusion": False}
    )
    # Without the loss's chunks, which make their logits twice.
    shapes = shapes_of(make_case(model, layout))
    operators = operators_of(shapes)
    gates = 2 * LENGTH * model.hidden_size * (4 if model is SHARED else 0)  # of shared experts: too narrow to count
    forward, matmuls = train_flops(model, [LENGTH]) / 3, 2 * num_matmul_parameters(model) * LENGTH
    assert flops(operators, "forward") == pytest.approx((forward - gates) / shapes.tp)
    assert flops(operators, "weight_gradient") == pytest.approx((matmuls - gates) / shapes.tp)


def test_weight_gradients_move_what_they_are_added_to():
    plain, fused = (
        shapes_of(make_case(SPARSE, Layout(1, performance={"gradient_accumulation_fusion": fusion})))
        for fusion in (False, True)
    )
    moved = [
        sum(kernel.moved for operator in operators_of(shapes) for kernel in operator.weight_gradient if
            isinstance(kernel, Moved)) for shapes in (plain, fused)
    ]  # fmt: skip
    elements = num_matmul_parameters(replace(SPARSE, moe=replace(SPARSE.moe, router_topk=SPARSE.moe.num_experts)))
    # fp32 buffers are read and written; a bf16 gradient on the way, too, of experts as of dense layers.
    assert moved == [elements * (8 + 4), elements * 8]
