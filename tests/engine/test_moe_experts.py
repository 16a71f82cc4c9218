"""Grouped experts against the loop, and rows that are moved and moved back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import on_device
from torch.utils._python_dispatch import TorchDispatchMode

from megatune.engine import device
from megatune.engine.layers.moe.dispatcher import count_by_expert, group_by_expert
from megatune.engine.layers.moe.layer import GroupedExperts, grouped_linear, looped_linear

pytestmark = pytest.mark.usefixtures("computing_device")

HIDDEN, FFN, NUM_EXPERTS = 16, 8, 4
# Some experts without tokens, all tokens on one expert, and no token at all.
COUNTS = [(3, 5, 2, 6), (0, 7, 0, 4), (0, 0, 9, 0), (0, 0, 0, 0)]


def experts(*, grouped: bool, dtype: torch.dtype = torch.float32, ffn: int = FFN, **more: object) -> GroupedExperts:
    config = SimpleNamespace(
        moe_ffn_hidden_size=ffn, hidden_size=HIDDEN, expert_tensor_parallel_size=1, params_dtype=dtype,
        moe_grouped_gemm=grouped, bias_activation_fusion=False, recompute_granularity=None, recompute_modules=[],
        quantized_form=None, add_bias_linear=False, moe_swiglu_limit=None, gradient_accumulation_fusion=False,
        activation_func=torch.nn.functional.silu,
    )  # fmt: skip
    vars(config).update(more)
    module = GroupedExperts(NUM_EXPERTS, config)
    generator = torch.Generator(device.current()).manual_seed(1)
    with torch.no_grad():
        for weight in (module.weight1, module.weight2):
            weight.copy_(torch.randn(weight.shape, generator=generator))
    return module


def forward_backward(module: GroupedExperts, counts: tuple[int, ...]) -> list[torch.Tensor]:
    """The output, and the gradients of rows, probabilities and both weights."""
    generator = torch.Generator(device.current()).manual_seed(2)
    rows = torch.randn(sum(counts), HIDDEN, generator=generator).to(module.weight1.dtype).requires_grad_()
    probs = torch.rand(sum(counts), generator=generator).requires_grad_()
    output, bias = module(rows, torch.tensor(counts), probs)
    assert bias is None
    output.backward(torch.randn(output.shape, generator=generator).to(output.dtype))
    return [output, rows.grad, probs.grad, module.weight1.grad, module.weight2.grad]


def by_definition(module: GroupedExperts, counts: tuple[int, ...]) -> torch.Tensor:
    """Every row through its expert's three matrices, then weighted."""
    generator = torch.Generator(device.current()).manual_seed(2)
    rows = torch.randn(sum(counts), HIDDEN, generator=generator)
    probs = torch.rand(sum(counts), generator=generator)
    numbers = torch.arange(NUM_EXPERTS).repeat_interleave(torch.tensor(counts)).tolist()
    outputs = [torch.zeros(0, HIDDEN)]
    for row, prob, number in zip(rows, probs, numbers, strict=True):
        gate, up = module.weight1[number].chunk(2)
        outputs.append((prob * (module.weight2[number] @ (F.silu(gate @ row) * (up @ row))))[None])
    return torch.cat(outputs)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_grouped_experts_equal_the_loop_and_the_definition(counts):
    grouped, looped = experts(grouped=True), experts(grouped=False)
    assert grouped.is_grouped
    assert not looped.is_grouped
    ours, plain = forward_backward(grouped, counts), forward_backward(looped, counts)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(plain[0], by_definition(looped, counts), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_experts_without_tokens_have_no_gradient(counts):
    *_, grad1, grad2 = forward_backward(experts(grouped=True), counts)
    idle = torch.tensor(counts) == 0
    assert not grad1[idle].count_nonzero()
    assert not grad2[idle].count_nonzero()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_grouped_products_round_as_the_loop_does(dtype):
    ours, plain = (forward_backward(experts(grouped=grouped, dtype=dtype), COUNTS[0]) for grouped in (True, False))
    torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_fused_activation_equals_the_plain_one(counts, grouped):
    plain = forward_backward(experts(grouped=grouped), counts)
    fused = forward_backward(experts(grouped=grouped, bias_activation_fusion=True), counts)
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("grouped", [True, False])
def test_weight_gradients_are_added_to_main_grad_and_never_made_whole(grouped):
    """Two micro-batches, of which the second leaves experts without rows."""
    plain, fused = experts(grouped=grouped), experts(grouped=grouped, gradient_accumulation_fusion=True)
    weights = (fused.weight1, fused.weight2)
    for weight in weights:
        weight.main_grad = torch.zeros(weight.shape)
        weight.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))  # as DDP does
    for counts in COUNTS[:2]:
        expected = forward_backward(plain, counts)  # which adds up in .grad
        with AsLargeAs(weights) as made:
            found = forward_backward(fused, counts)
        assert not made.shapes
        torch.testing.assert_close(found[:3], expected[:3])  # output, rows, probabilities
    assert all(weight.grad_added_to_main_grad for weight in weights)
    torch.testing.assert_close([weight.main_grad for weight in weights], expected[3:], rtol=1e-5, atol=1e-5)


def test_unrounded_gradients_of_16_bits():
    """Against the same products in fp64, where a gradient that is rounded on its way is off by 2**-9."""
    rows, weight = torch.randn(16, HIDDEN).bfloat16(), torch.randn(NUM_EXPERTS, FFN, HIDDEN).bfloat16()
    counts, grad = torch.tensor(COUNTS[0]), torch.randn(16, FFN).bfloat16()
    weight.requires_grad_().main_grad = torch.zeros(weight.shape)
    module = experts(grouped=True, dtype=torch.bfloat16, gradient_accumulation_fusion=True)
    module._linear(rows, weight, counts).backward(grad)
    parts = zip(grad.double().split(COUNTS[0]), rows.double().split(COUNTS[0]), strict=True)
    expected = torch.stack([of_outputs.t() @ of_inputs for of_outputs, of_inputs in parts])
    torch.testing.assert_close(weight.main_grad.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_recomputed_activation_changes_no_bit(pool, counts, fused):
    assert pool.run(1, on_device, recompute_activation, counts, fused) == [True]


def recompute_activation(counts: tuple[int, ...], fused: bool) -> bool:
    from megatune.config.settings import ParallelSettings
    from megatune.engine import groups

    groups.build(ParallelSettings(), seed=0, timeout=30)  # recomputing restores its generators
    kept = forward_backward(experts(grouped=True, bias_activation_fusion=fused), counts)
    again = experts(
        grouped=True, bias_activation_fusion=fused, recompute_granularity="selective", recompute_modules=["moe_act"]
    )
    assert again.recomputes_activation
    return all(map(torch.equal, kept, forward_backward(again, counts)))


def test_a_frozen_weight_keeps_no_rows():
    counts = torch.tensor(COUNTS[1])
    rows = torch.randn(int(counts.sum()), HIDDEN, requires_grad=True)
    weight = torch.randn(NUM_EXPERTS, FFN, HIDDEN)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
        grouped_linear(rows, weight, counts).sum().backward()
        assert not any(each.shape == rows.shape for each in kept)
        frozen, rows.grad = rows.grad, None
        grouped_linear(rows, weight.requires_grad_(), counts).sum().backward()
    assert any(each.shape == rows.shape for each in kept)
    assert torch.equal(rows.grad, frozen)


def test_sizes_that_grouped_kernels_refuse_take_the_loop():
    module = experts(grouped=True, ffn=5)
    torch.testing.assert_close(
        forward_backward(module, COUNTS[1])[0], by_definition(module, COUNTS[1]), rtol=1e-5, atol=1e-5
    )


def test_one_product_of_all_groups_equals_one_product_each():
    rows, weight = torch.randn(11, HIDDEN), torch.randn(NUM_EXPERTS, FFN, HIDDEN)
    counts = torch.tensor(COUNTS[1])
    torch.testing.assert_close(grouped_linear(rows, weight, counts), looped_linear(rows, weight, counts))


@settings(deadline=None, max_examples=50)
@given(data=st.data(), n=st.integers(0, 12), k=st.integers(1, 3), pads=st.booleans())
def test_permuted_rows_come_back(data, n, k, pads):
    """Rows lie by expert, then by token; dropped choices are nowhere; gradients are those of plain indexing."""
    chosen = data.draw(
        st.lists(st.permutations(range(NUM_EXPERTS)).map(lambda order: order[:k]), min_size=n, max_size=n)
    )
    dropped = data.draw(st.lists(st.booleans(), min_size=n * k, max_size=n * k))
    ids = torch.tensor(chosen, dtype=torch.int64).view(n, k)
    ids[torch.tensor(dropped, dtype=torch.bool).view(n, k)] = NUM_EXPERTS
    counts = count_by_expert(ids, NUM_EXPERTS)
    assert counts.tolist() == [int((ids == expert).sum()) for expert in range(NUM_EXPERTS)]
    capacity = int(counts.max()) + 1 if pads else None
    permutation = group_by_expert(ids, NUM_EXPERTS, num_rows=int(counts.sum()), capacity=capacity)

    tokens = torch.randn(n, 5, dtype=torch.float64, requires_grad=True)
    values = torch.randn(n, k, dtype=torch.float64, requires_grad=True)
    rows, of_rows, expected, expected_values = permutation.permute(tokens), permutation.permute_choices(values), [], []
    for expert in range(NUM_EXPERTS):
        pairs = [(token, choice) for token in range(n) for choice in range(k) if ids[token, choice] == expert]
        fillers = capacity - len(pairs) if capacity is not None else 0
        expected += [tokens[token] for token, _ in pairs] + [torch.zeros(5, dtype=torch.float64)] * fillers
        expected_values += [values[pair] for pair in pairs] + [torch.zeros((), dtype=torch.float64)] * fillers
    assert len(rows) == len(expected)
    if expected:
        assert torch.equal(rows, torch.stack(expected))
        assert torch.equal(of_rows, torch.stack(expected_values))
    back = permutation.unpermute(rows * of_rows[:, None])
    plain = tokens * (values * (ids < NUM_EXPERTS)).sum(1, keepdim=True)
    torch.testing.assert_close(back, plain)
    weights = torch.randn(back.shape, dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad(back, (tokens, values), weights), torch.autograd.grad(plain, (tokens, values), weights)
    )


class AsLargeAs(TorchDispatchMode):
    """Shapes of new tensors that operators make as large as one of these weights."""

    def __init__(self, weights: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.known = {each.untyped_storage().data_ptr() for weight in weights for each in (weight, weight.main_grad)}
        self.sizes, self.shapes = {weight.numel() for weight in weights}, list[torch.Size]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        is_new = isinstance(output, torch.Tensor) and output.untyped_storage().data_ptr() not in self.known
        if is_new and output.numel() in self.sizes:
            self.shapes.append(output.shape)
        return output


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that an operator makes."""

    numel = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor):
            self.numel = max(self.numel, output.numel())
        return output


def test_a_sum_of_few_choices_among_many_takes_the_memory_of_its_rows():
    """Where every rank has all tokens, most choices fall on the experts of others."""
    n, k, channels = 16384, 8, 32
    ids = torch.full((n, k), NUM_EXPERTS)
    ids[:, 0] = torch.arange(n) % NUM_EXPERTS
    permutation = group_by_expert(ids, NUM_EXPERTS, num_rows=n)
    output = torch.randn(n, channels)
    with LargestTensor() as largest:
        back = permutation.unpermute(output)
    assert largest.numel <= (n + 1) * channels  # and not n · k · channels
    assert torch.equal(back, output[permutation.rows[:, 0]])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("counts", COUNTS[:-1], ids=str)
def test_clamped_experts_with_biases_equal_transformers(pool, counts, fused):
    assert pool.run(1, on_device, clamped_experts, counts, fused) == [[]]


def clamped_experts(counts: tuple[int, ...], fused: bool) -> list[str]:
    """What differs from GptOssExperts: the output, or a gradient."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    from megatune.config.settings import ParallelSettings
    from megatune.engine import groups

    groups.build(ParallelSettings(), seed=0, timeout=30)
    ours = experts(grouped=True, bias_activation_fusion=fused, add_bias_linear=True, moe_swiglu_limit=7.0)
    theirs = GptOssExperts(GptOssConfig(num_local_experts=NUM_EXPERTS, hidden_size=HIDDEN, intermediate_size=FFN))
    generator = torch.Generator(device.current()).manual_seed(3)
    pairs = {
        "weight1": (ours.weight1, theirs.gate_up_proj), "bias1": (ours.linear_fc1["bias"], theirs.gate_up_proj_bias),
        "weight2": (ours.weight2, theirs.down_proj), "bias2": (ours.linear_fc2["bias"], theirs.down_proj_bias),
    }  # fmt: skip
    with torch.no_grad():
        for name, (mine, other) in pairs.items():
            mine.copy_(torch.randn(mine.shape, generator=generator) * (3 if name.endswith("1") else 1))
            other.copy_(mine if mine.dim() == 2 else mine.transpose(1, 2))
    rows, probs = torch.randn(sum(counts), HIDDEN), torch.rand(sum(counts))
    inputs = [[each.clone().requires_grad_() for each in (rows, probs)] for _ in range(2)]
    numbers = torch.arange(NUM_EXPERTS).repeat_interleave(torch.tensor(counts))
    found, _ = ours(inputs[0][0], torch.tensor(counts), inputs[0][1])
    expected = theirs(inputs[1][0], numbers[:, None], inputs[1][1][:, None])
    weights = torch.randn(found.shape)
    found.backward(weights)
    expected.backward(weights)
    compared = {"output": (found, expected), "rows": (inputs[0][0].grad, inputs[1][0].grad)}
    compared |= {"probabilities": (inputs[0][1].grad, inputs[1][1].grad)}
    for name, (mine, other) in pairs.items():
        grad = torch.zeros_like(other) if other.grad is None else other.grad
        compared[name] = mine.grad, grad if grad.dim() == 2 else grad.transpose(1, 2)
    return [name for name, (a, b) in compared.items() if not torch.allclose(a, b, rtol=1e-5, atol=1e-4)]
