"""The output layer fused with the cross-entropy against the plain one: losses, gradients, and what is in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import LAYOUTS, MORE_LAYOUTS
from pool import on_device
from references import reference_token_losses
from settings_gradients import LENGTHS, run_with, worst_error
from torch.utils._python_dispatch import TorchDispatchMode

from megatune.bridge.assemble import assemble
from megatune.config.settings import ParallelSettings, Settings
from megatune.engine import device, groups
from megatune.engine.layers import cross_entropy
from megatune.engine.layers.cross_entropy import Head, VocabularyShard, greedy_tokens, token_losses
from megatune.verify.measure import measure_loss, shard_samples
from megatune.verify.samples import random_samples

pytestmark = pytest.mark.usefixtures("computing_device")

LAYOUTS_OF_SWITCH = {**LAYOUTS, "dp2, grad overlap": MORE_LAYOUTS["dp2, grad overlap"]}


class Problem:
    """Random inputs, and what the plain computation makes of them with a gradient of its own for every token."""

    def __init__(self, s: int, b: int, vocabulary: int, *, trained: float = 0.6, dtype: Any = torch.float32) -> None:
        generator = torch.Generator(device.current()).manual_seed(s * 100 + b)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.hidden_states = random(s, b, 24).to(dtype)
        self.weight = random(vocabulary, 24).to(dtype)
        self.labels = torch.randint(vocabulary, (b, s), generator=generator)
        self.labels[torch.rand(b, s, generator=generator) >= trained] = -100
        self.grad_losses = random(b, s)

    @property
    def trained(self) -> torch.Tensor:
        return (self.labels.reshape(-1) >= 0).nonzero()[:, 0]

    def solve(self, dtype: Any = torch.float32) -> tuple[torch.Tensor, ...]:
        """Losses, and gradients of hidden states and weight, by the reference in `dtype`."""
        inputs = [tensor.to(dtype, copy=True).requires_grad_() for tensor in (self.hidden_states, self.weight)]
        losses = reference_token_losses(*inputs, self.labels)
        losses.backward(self.grad_losses)
        return losses.detach(), *(tensor.grad for tensor in inputs)

    def fused(self, part: VocabularyShard, hidden_states: torch.Tensor, weight: torch.Tensor) -> tuple[Any, ...]:
        """The same, fused, with slices of hidden states and weight."""
        inputs = [tensor.clone().requires_grad_() for tensor in (hidden_states, weight)]
        losses = token_losses(*inputs, self.labels, self.trained, part)
        losses.backward(self.grad_losses)
        return losses.detach(), *(tensor.grad for tensor in inputs)


def with_padding(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """The weight and rows that only pad it, with numbers that would show wherever they were used."""
    return torch.cat((weight, torch.full((rows, weight.shape[1]), torch.nan, dtype=weight.dtype)))


@settings(deadline=None, max_examples=25)
@given(s=st.integers(1, 9), b=st.integers(1, 3), rows=st.integers(1, 40), trained=st.sampled_from([0.0, 0.5, 1.0]))
def test_it_equals_the_plain_one_in_chunks_of_any_size(s, b, rows, trained):
    problem = Problem(s, b, 37, trained=trained)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "CHUNK_BYTES", rows * 37 * 4)
        part = VocabularyShard(0, 37)
        losses, of_hidden, of_weight = problem.fused(part, problem.hidden_states, with_padding(problem.weight, 5))
    assert losses.dtype == torch.float32
    torch.testing.assert_close((losses, of_hidden, of_weight[:37]), problem.solve())
    assert not of_weight[37:].any()


@pytest.mark.parametrize("kind", ["entropy", "uniform"])
@pytest.mark.parametrize(("temperature", "rows"), [(1.0, 40), (0.6, 3)])
def test_second_numbers_are_those_at_the_temperature(monkeypatch, temperature, rows, kind):
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", rows * 37 * 4)
    problem = Problem(7, 2, 37)
    hidden_states, weight = (each.clone().requires_grad_() for each in (problem.hidden_states, problem.weight))
    head = Head(temperature, **{kind: True})
    found = token_losses(hidden_states, weight, problem.labels, problem.trained, VocabularyShard(0, 37), head)
    gradient = torch.randn(found.shape, generator=torch.Generator(device.current()).manual_seed(1))
    found.backward(gradient)
    inputs = [each.double().requires_grad_() for each in (problem.hidden_states, problem.weight)]
    log_probs = (inputs[0].transpose(0, 1) @ inputs[1].t() / temperature).log_softmax(-1)
    losses = -log_probs.gather(-1, problem.labels.clamp(min=0)[..., None])[..., 0]
    second = SECONDS[Head(**{kind: True})](log_probs)
    expected = torch.stack((losses, second), -1) * (problem.labels >= 0)[..., None]
    expected.backward(gradient.double())
    wide = (found, hidden_states.grad, weight.grad)
    expected_values = (expected, *(each.grad for each in inputs))
    for mine, other in zip(wide, expected_values, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("rows", [40, 3])
def test_the_likeliest_tokens_are_those_of_argmax(monkeypatch, rows):
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", rows * 37 * 4)
    problem = Problem(7, 2, 37)
    problem.weight[20] = problem.weight[11] = 9 * problem.hidden_states[2, 1]  # equal, and the largest there
    problem.labels[1, 2] = 0
    weight = with_padding(problem.weight, 5).nan_to_num(1e9)
    found = greedy_tokens(problem.hidden_states, weight, problem.labels, problem.trained, VocabularyShard(0, 37))
    expected = (problem.hidden_states.transpose(0, 1) @ problem.weight.t()).argmax(-1)
    assert torch.equal(found.long(), expected * (problem.labels >= 0))
    assert found[1, 2] == 11


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_round_no_worse_than_the_plain_one(dtype, monkeypatch):
    problem = Problem(64, 2, 301, dtype=dtype)
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 20 * 301 * 4)
    truth, stock = problem.solve(torch.float64), problem.solve(dtype)
    ours = problem.fused(VocabularyShard(0, 301), problem.hidden_states, problem.weight)
    for mine, plain, exact in zip(ours, stock, truth, strict=True):
        assert mine.dtype == plain.dtype
        assert (mine - exact).norm() <= 1.1 * (plain - exact).norm()


class Sizes(TorchDispatchMode):
    """Notes the sizes of everything that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.products: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        if isinstance(answer, torch.Tensor):
            self.largest = max(self.largest, answer.numel())
        if func.name() == "aten::mm":
            self.products.append(args[0].shape[0])
        return answer


def test_nothing_is_as_large_as_the_logits_and_untrained_tokens_cost_nothing(monkeypatch):
    problem = Problem(50, 2, 997, trained=0.3)
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 7 * 997 * 4)
    n = len(problem.trained)
    with Sizes() as forward:
        weight = problem.weight.clone().requires_grad_()
        weight.main_grad = torch.zeros_like(weight)
        hidden_states = problem.hidden_states.clone().requires_grad_()
        losses = token_losses(hidden_states, weight, problem.labels, problem.trained, VocabularyShard(0, 997))
    assert sum(forward.products) == n
    with Sizes() as backward:
        losses.backward(problem.grad_losses)
    assert sum(backward.products) == 2 * n  # logits again, and the gradient of hidden states
    # The weight is larger than a chunk of logits, and no other tensor.
    assert max(forward.largest, backward.largest) == weight.numel() < n * 997


def test_gradient_goes_into_main_grad_and_costs_no_memory_on_the_way():
    problem = Problem(9, 2, 37)
    part = VocabularyShard(0, 37)
    weight = problem.weight.clone().requires_grad_()
    weight.main_grad = torch.ones(37, 24)
    token_losses(problem.hidden_states, weight, problem.labels, problem.trained, part).backward(problem.grad_losses)
    torch.testing.assert_close(weight.main_grad - 1, problem.solve()[2], rtol=1e-5, atol=1e-6)
    # What DDP's hook finds, and throws away unread because of the mark.
    assert weight.grad_added_to_main_grad
    assert weight.grad.data_ptr() == weight.data_ptr()
    assert torch.equal(weight, problem.weight)


def test_embedding_that_shares_the_weight_keeps_its_gradient():
    problem = Problem(9, 2, 37)
    weight = problem.weight.clone().requires_grad_()
    weight.main_grad, weight.zero_out_wgrad = torch.zeros(37, 24), True
    losses = token_losses(problem.hidden_states, weight, problem.labels, problem.trained, VocabularyShard(0, 37))
    ((losses * problem.grad_losses).sum() + torch.nn.functional.embedding(torch.tensor([3]), weight).sum()).backward()
    expected = torch.zeros(37, 24)
    expected[3] = 1
    assert torch.equal(weight.grad, expected)


def test_frozen_weight_gets_no_gradient():
    problem = Problem(9, 2, 37)
    hidden_states = problem.hidden_states.clone().requires_grad_()
    losses = token_losses(hidden_states, problem.weight, problem.labels, problem.trained, VocabularyShard(0, 37))
    losses.backward(problem.grad_losses)
    torch.testing.assert_close(hidden_states.grad, problem.solve()[1])


def entropy(log_probs: torch.Tensor) -> torch.Tensor:
    return -(log_probs.exp() * log_probs).sum(-1)


# What heads compute beside losses, of log-probabilities of the whole vocabulary; 23 are more than a rank has.
SECONDS = {
    Head(entropy=True): entropy,
    Head(uniform=True): lambda log_probs: -log_probs.mean(-1),
    Head(top=23): lambda log_probs: entropy(log_probs.topk(23).values.log_softmax(-1)),
}


def split_over_ranks(tp_size: int, sequence_parallel: bool, vocabulary: int) -> None:
    """On every rank: its part of the answers against the whole ones. Each rank has 20 rows of the padded vocabulary."""
    parallel = ParallelSettings(tensor_model_parallel_size=tp_size, sequence_parallel=sequence_parallel)
    coords = groups.build(parallel, seed=0, timeout=30)
    problem = Problem(12, 2, vocabulary)
    cross_entropy.CHUNK_BYTES, usual = 500, cross_entropy.CHUNK_BYTES
    rows = slice(coords.tp_rank * 20, (coords.tp_rank + 1) * 20)
    count = max(0, min(20, vocabulary - rows.start))
    part = VocabularyShard(rows.start, count, groups.tensor_parallel_group(), sequence_parallel)
    tokens = slice(None)
    if sequence_parallel:
        tokens = slice(coords.tp_rank * 12 // tp_size, (coords.tp_rank + 1) * 12 // tp_size)
    weight = with_padding(problem.weight, 20 * tp_size - vocabulary)[rows]
    losses, of_hidden, of_weight = problem.fused(part, problem.hidden_states[tokens], weight)
    for head, second in SECONDS.items():
        found = token_losses(problem.hidden_states[tokens], weight, problem.labels, problem.trained, part, head)
        log_probs = (problem.hidden_states.transpose(0, 1) @ problem.weight.t()).log_softmax(-1)
        torch.testing.assert_close(found[..., 1], second(log_probs) * (problem.labels >= 0))
    cross_entropy.CHUNK_BYTES = usual
    expected = problem.solve()
    torch.testing.assert_close((losses, of_hidden), (expected[0], expected[1][tokens]))
    torch.testing.assert_close(of_weight[:count], expected[2][rows])
    assert not of_weight[count:].any()


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize(("tp_size", "vocabulary"), [(2, 40), (2, 33), (4, 43)])
def test_vocabulary_is_split_over_ranks(pool, tp_size, vocabulary, sequence_parallel):
    """Also where the last rank's rows only pad the vocabulary: 43 of 4 · 20."""
    pool.run(tp_size, on_device, split_over_ranks, tp_size, sequence_parallel, vocabulary)


@pytest.mark.covering
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", ["1", "tp2 sp", "pp2 vpp2", "dp2, grad overlap"])
def test_model_learns_the_same_with_and_without_fusion(pool, model_dir, layout, tied):
    model, chosen = model_dir("qwen2", tied=tied), LAYOUTS_OF_SWITCH[layout]
    fused = run_with(pool, model, chosen, {"cross_entropy_loss_fusion": True}, chunk_bytes=301 * 4 * 5)
    plain = run_with(pool, model, chosen, {"cross_entropy_loss_fusion": False})
    assert worst_error(fused, plain) < 1e-5
    assert [loss for loss, _, _ in fused] == pytest.approx([loss for loss, _, _ in plain], rel=1e-6)
    # The switch chooses: only the fused one adds the output layer's gradient to main_grad itself.
    assert (any(direct for _, _, direct in fused), any(direct for _, _, direct in plain)) == (True, False)


def count_calls(model: Path, settings: Settings) -> tuple[int, int]:
    """Micro-batches, and how often hooks saw the output layer called."""
    assembly = assemble(model, settings)
    batches = shard_samples(random_samples(301, LENGTHS), assembly.coords, settings.parallel)
    calls: list[torch.nn.Module] = []
    assembly.model[-1].module.output_layer.register_forward_pre_hook(lambda module, inputs: calls.append(module))
    measure_loss(assembly, batches)
    return len(batches), len(calls)


def test_hooks_see_the_output_layer_called(pool, model_dir):
    """overlap_param_gather waits for a module's weight in such a hook; computed past it, the weight may be old."""
    ((num_batches, calls),) = pool.run(1, count_calls, model_dir("qwen2"), LAYOUTS["1"].settings())
    assert calls == num_batches
