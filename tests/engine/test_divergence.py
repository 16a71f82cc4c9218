"""The divergence from a teacher's distributions, fused with both output layers, against the plain formula."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pool import on_device
from torch import Tensor
from torch.nn.functional import pad

from megatune.config.settings import ParallelSettings
from megatune.engine import device, groups
from megatune.engine.layers import cross_entropy
from megatune.engine.layers.cross_entropy import VocabularyShard
from megatune.engine.layers.divergence import TeacherOutputs, aligned

pytestmark = pytest.mark.usefixtures("computing_device")

SIZE = 37  # tokens that the model knows
Case = dict[str, Any]
CASES: dict[str, Case] = {
    "forward": {"beta": 0.0},
    "reverse, T 0.7": {"beta": 1.0, "temperature": 0.7},
    "JSD": {"beta": 0.3},
    "JSD, top 5, T 1.3": {"beta": 0.5, "top_k": 5, "temperature": 1.3},
    "forward, top 1": {"beta": 0.0, "top_k": 1},
    "reverse, top 50": {"beta": 1.0, "top_k": 50},
    "JSD, larger teacher, soft caps": {"beta": 0.5, "of_teacher": 44, "softcap": 2.0},
    "reverse, smaller teacher": {"beta": 1.0, "of_teacher": 30},
    "JSD, larger teacher, top 3": {"beta": 0.5, "of_teacher": 44, "top_k": 3},
}


@dataclass
class Problem:
    """A model and a teacher of other widths, and a gradient for every token."""

    beta: float
    top_k: int | None = None
    temperature: float = 1.0
    of_teacher: int = SIZE
    softcap: float | None = None
    s: int = 8
    b: int = 3

    def __post_init__(self) -> None:
        generator = torch.Generator(device.current()).manual_seed(5)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.hidden_states, self.weight = random(self.s, self.b, 24), random(SIZE, 24)
        self.hidden_of_teacher, self.weight_of_teacher = random(self.s, self.b, 16), random(self.of_teacher, 16)
        self.labels = torch.where(random(self.b, self.s) > -0.3, 1, -100)
        self.grad = random(self.b, self.s)

    def solve(self) -> tuple[Tensor, ...]:
        """Divergences, and gradients of hidden states and weight, in fp64, from all logits."""
        inputs = [each.double().requires_grad_() for each in (self.hidden_states, self.weight)]
        others = self.hidden_of_teacher.double(), self.weight_of_teacher.double()
        shared = min(SIZE, self.of_teacher)
        own, other = (self._logits(*each)[..., :shared] for each in (inputs, others))
        if self.top_k is not None:
            chosen = other.topk(min(self.top_k, shared)).indices
            own, other = own.gather(-1, chosen), other.gather(-1, chosen)
        p, t = own.softmax(-1), other.softmax(-1)
        mixed = self.beta * t + (1 - self.beta) * p
        if self.beta in (0, 1):
            value = (t * (t / p).log()).sum(-1) if self.beta == 0 else (p * (p / t).log()).sum(-1)
        else:
            value = (self.beta * t * (t / mixed).log() + (1 - self.beta) * p * (p / mixed).log()).sum(-1)
        value = value * (self.labels >= 0)
        value.backward(self.grad.double())
        return value.detach(), *(each.grad for each in inputs)

    def _logits(self, hidden_states: Tensor, weight: Tensor) -> Tensor:
        logits = hidden_states.transpose(0, 1) @ weight.t()
        return (logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()) / self.temperature

    def fused(self, part: VocabularyShard, tokens: slice = slice(None), rows: int = SIZE) -> tuple[Tensor, ...]:
        """The same of this rank's tokens and part of the vocabulary; what pads it has numbers that would show."""
        of_rank = slice(part.first, part.first + rows)
        padded = pad(self.weight, (0, 0, 0, rows * part.size - SIZE), value=torch.nan)[of_rank]
        each = -(-self.of_teacher // part.size)
        first = each * (part.first // rows)
        theirs = pad(self.weight_of_teacher, (0, 0, 0, each * part.size - self.of_teacher), value=torch.nan)
        shared = max(0, min(part.num_rows, self.of_teacher - part.first))
        weight_of_teacher = aligned(theirs[first : first + each], rows, part)
        mine = self.hidden_of_teacher[tokens], weight_of_teacher, shared, self.softcap
        teacher = TeacherOutputs(*mine, self.beta, self.top_k)
        inputs = [each.clone().requires_grad_() for each in (self.hidden_states[tokens], padded)]
        trained = (self.labels.reshape(-1) >= 0).nonzero()[:, 0]
        found = teacher.divergences(*inputs, self.labels, trained, part, self.temperature)
        found.backward(self.grad)
        return found.detach(), *(each.grad for each in inputs)


def assert_near(found: Tensor, exact: Tensor) -> None:
    assert (found - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize("chunk", [10**6, 700])
@pytest.mark.parametrize("name", CASES)
def test_it_equals_the_plain_formula(monkeypatch: pytest.MonkeyPatch, name: str, chunk: int) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", chunk)
    problem = Problem(**CASES[name])
    found = problem.fused(VocabularyShard(0, SIZE, softcap=problem.softcap))
    for mine, exact in zip(found, problem.solve(), strict=True):
        assert_near(mine, exact)


def test_a_teacher_that_agrees_is_at_no_distance() -> None:
    for beta in (0.0, 0.5, 1.0):
        problem = Problem(beta)
        problem.hidden_of_teacher, problem.weight_of_teacher = problem.hidden_states, problem.weight
        assert all(each.abs().max() < 1e-5 for each in problem.fused(VocabularyShard(0, SIZE)))


def test_both_passes_take_the_same_tokens_of_the_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of few tokens are rounded otherwise than those of many: chunks of both have one size, though rows that
    pad the vocabulary are computed in neither."""
    problem, padded, top_k = Problem(0.5, s=12, b=1), 47, 5
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 4000)  # 3 tokens, and without padding 4
    weights = [pad(each, (0, 0, 0, padded - SIZE)) for each in (problem.weight, problem.weight_of_teacher)]
    teacher = TeacherOutputs(problem.hidden_of_teacher, weights[1], SIZE, None, problem.beta, top_k)
    trained, part = torch.arange(problem.s), VocabularyShard(0, SIZE)
    for place in range(problem.s):
        weight = weights[0].clone().requires_grad_()
        labels = torch.ones(1, problem.s, dtype=torch.int64)
        found = teacher.divergences(problem.hidden_states, weight, labels, trained, part, 1.0)
        found[0, place].backward()
        assert int((weight.grad != 0).any(1).sum()) == top_k


def split_over_ranks(tp_size: int, sequence_parallel: bool, case: Case) -> None:
    """On every rank: its part of the answers against the whole ones. Each rank has 20 rows of the vocabulary."""
    parallel = ParallelSettings(tensor_model_parallel_size=tp_size, sequence_parallel=sequence_parallel)
    coords = groups.build(parallel, seed=0, timeout=30)
    problem, first = Problem(**case), coords.tp_rank * 20
    cross_entropy.CHUNK_BYTES, usual = 700, cross_entropy.CHUNK_BYTES
    count = max(0, min(20, SIZE - first))
    part = VocabularyShard(first, count, groups.tensor_parallel_group(), sequence_parallel, problem.softcap)
    size = problem.s // tp_size
    tokens = slice(coords.tp_rank * size, (coords.tp_rank + 1) * size) if sequence_parallel else slice(None)
    values, of_hidden, of_weight = problem.fused(part, tokens, rows=20)
    cross_entropy.CHUNK_BYTES = usual
    exact = problem.solve()
    wanted = exact[0], exact[1][tokens], exact[2][first : first + count]
    for mine, other in zip((values, of_hidden, of_weight[:count]), wanted, strict=True):
        assert_near(mine, other)
    assert not of_weight[count:].any()


@pytest.mark.covering
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_vocabulary_is_split_over_ranks(pool: Any, name: str, tp_size: int, sequence_parallel: bool) -> None:
    """Of 4 ranks two have rows that only pad it; the teacher's parts may be of another size."""
    pool.run(tp_size, on_device, split_over_ranks, tp_size, sequence_parallel, CASES[name])
