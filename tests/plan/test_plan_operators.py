"""The operators of a model against the counts of its weights: what they compute, and what they move."""

from __future__ import annotations

from dataclasses import replace

import pytest
from activation_cases import DENSE, GEMMA3, LATENT, QWEN3, SHARED, SP, SPARSE, TP2
from layouts import Layout
from test_plan_activation_formulas import LENGTH, make_case

from megatune.architecture import LayerKind
from megatune.plan.flops import num_matmul_parameters, train_flops
from megatune.plan.operators.decoder import decoder_layer, head, mixer_branch
from megatune.plan.operators.operator import Attention, MemoryOp, Operator, Product
from megatune.plan.operators.shapes import Shapes, layer_shapes, shapes_of


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


@pytest.mark.parametrize("model", [DENSE, SHARED, LATENT], ids=lambda model: model.model_type)
def test_fp8_is_of_linear_layers_and_not_of_their_gradients(model):
    """Not of the output layer either, of routers and of experts."""
    half, eighth = (replace(shapes_of(make_case(model, Layout(1))), itemsize=2, fp8=fp8) for fp8 in (False, True))
    plain, ours = operators_of(half), operators_of(eighth)
    for attribute in ("forward", "backward", "weight_gradient"):
        assert flops(ours, attribute) == flops(plain, attribute)
    in_8_bits = [one for one in ours if any(kernel.itemsize == 1 for kernel in products(one.forward))]
    modules = {"mlp", "qkv", "proj", "shared_experts", "mla_up_proj"}
    assert in_8_bits
    assert {one.module for one in in_8_bits} <= modules
    assert {one.module for one in ours if one.module in modules and products(one.forward)} <= {
        one.module for one in in_8_bits
    }
    for one in in_8_bits:
        assert [kernel.itemsize for kernel in products(one.backward)] == [1]
        assert all(kernel.itemsize == 2 for kernel in products(one.weight_gradient))
    # Both factors are there in 8 bits while they are multiplied, and nothing of them is kept.
    assert [one.memory.kept for one in ours] == [one.memory.kept for one in plain]
    assert all(
        one.memory.forward > other.memory.forward for one, other in zip(ours, plain, strict=True) if one in in_8_bits
    )


def test_windows_cut_attention_and_are_gathered_for():
    """On GPUs, in layers that have one; a ring would pass on keys that no query sees."""
    windowed, whole = GEMMA3.layer_kind(0), GEMMA3.layer_kind(1)
    assert (windowed.window, whole.window) == (64, None)
    ring = Layout(2, {"context_parallel_size": 2})

    def attention(length: int, kind: LayerKind, generation: str = "hopper") -> Attention:
        case = make_case(GEMMA3, ring, length=length, generation=generation)
        shapes = layer_shapes(shapes_of(case), kind, True)
        assert shapes.cp_comm_type == ("p2p" if kind.window is None else "all_gather")
        return attention_of(shapes)

    long, short = attention(8192, windowed), attention(4096, windowed)
    # Tokens of a rank see 64 keys each but for the first 64, of all channels of queries and values.
    assert long.flops == pytest.approx(4096 * 2 * (64 - 64**2 / 2 / 8192) * long.channels)
    assert long.flops == pytest.approx(2 * short.flops, rel=0.01)
    assert attention(8192, whole).flops == 4096 * 8192 * long.channels
    assert attention(8192, windowed, "cpu").flops == attention(8192, whole).flops


def test_windows_and_sinks_attend_with_kernels_of_variable_lengths():
    for model, kernels in ((GEMMA3, ["packed", "rows"]), (replace(GEMMA3, attention_sinks=True), ["packed"] * 2)):
        shapes = [layer_shapes(shapes_of(make_case(model)), model.layer_kind(layer), True) for layer in (0, 1)]
        assert [attention_of(each).kernel for each in shapes] == kernels


def attention_of(shapes: Shapes) -> Attention:
    kernels = (kernel for operator in mixer_branch(shapes) for kernel in operator.forward)
    return next(kernel for kernel in kernels if isinstance(kernel, Attention))


def products(kernels: tuple[object, ...]) -> list[Product]:
    return [kernel for kernel in kernels if isinstance(kernel, Product)]


def test_weight_gradients_move_what_they_are_added_to():
    plain, fused = (
        shapes_of(make_case(SPARSE, Layout(1, performance={"gradient_accumulation_fusion": fusion})))
        for fusion in (False, True)
    )
    moved = [
        sum(kernel.moved for operator in operators_of(shapes) for kernel in operator.weight_gradient if
            isinstance(kernel, MemoryOp)) for shapes in (plain, fused)
    ]  # fmt: skip
    elements = num_matmul_parameters(replace(SPARSE, moe=replace(SPARSE.moe, router_topk=SPARSE.moe.num_experts)))
    # fp32 buffers are read and written; a bf16 gradient on the way, too, of experts as of dense layers.
    assert moved == [elements * (8 + 4), elements * 8]
