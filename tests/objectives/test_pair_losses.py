"""Losses of pairs beside their papers' equations, one pair at a time, in Python's own floats (fp64)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch

from megatune.objectives.pair_losses import (
    PAIR_LOSSES,
    WITHOUT_REFERENCE,
    PairLossOptions,
    Pairs,
    log_odds,
    negative_log_likelihood,
)
from megatune.objectives.preference import Preference

NUM_PAIRS = 9
OPTIONS = PairLossOptions(beta=0.3, smoothing=0.1, gamma=0.6, tau=0.05, reward_shift=0.17)
BOUND = 1e-12  # of fp64


def random_pairs(seed: int = 0) -> Pairs:
    """Of the size that answers of some tens of tokens have."""
    generator = random.Random(seed)
    tokens = [[float(generator.randint(3, 40)) for _ in range(NUM_PAIRS)] for _ in range(2)]
    policy = [[-count * generator.uniform(0.05, 2) for count in row] for row in tokens]
    reference = [[value + generator.gauss(0, 4) for value in row] for row in policy]
    likelihood = [1.25 * value for value in policy[0]]
    columns = [*policy, *reference, *tokens, likelihood]
    return Pairs(*(torch.tensor(column, dtype=torch.float64) for column in columns))


class Pair:
    """One pair's numbers, by the letters of the papers."""

    def __init__(self, pairs: Pairs, index: int) -> None:
        values = (float(getattr(pairs, each.name)[index]) for each in fields(pairs))
        self.c, self.r, ref_c, ref_r, self.n_c, self.n_r, self.likelihood = values
        self.rho_c, self.rho_r = self.c - ref_c, self.r - ref_r
        self.delta = self.rho_c - self.rho_r
        self.avg_c, self.avg_r = self.c / self.n_c, self.r / self.n_r


def s(x: float) -> float:
    """The logistic function."""
    return 1 / (1 + math.exp(-x))


def log_s(x: float) -> float:
    return math.log(s(x))


B, E, G, T, SHIFT = OPTIONS.beta, OPTIONS.smoothing, OPTIONS.gamma, OPTIONS.tau, OPTIONS.reward_shift


def cdpo(x: float) -> float:
    return -(1 - E) * log_s(x) - E * log_s(-x)


def odds(avg: float) -> float:
    return math.exp(avg) / (1 - math.exp(avg))


def reverse_kl(pair: Pair) -> float:
    policy, labels = (s(B * pair.delta), s(-B * pair.delta)), (1 - E, E)
    return sum(p * math.log(p / label) for p, label in zip(policy, labels, strict=True))


EQUATIONS: dict[str, Callable[[Pair], float]] = {
    "sigmoid": lambda p: cdpo(B * p.delta),
    "robust": lambda p: (-(1 - E) * log_s(B * p.delta) + E * log_s(-B * p.delta)) / (1 - 2 * E),
    "hinge": lambda p: max(0.0, 1 - B * p.delta),
    "ipo": lambda p: (p.rho_c / p.n_c - p.rho_r / p.n_r - 1 / (2 * B)) ** 2,
    "apo_zero": lambda p: 1 - s(B * p.rho_c) + s(B * p.rho_r),
    "apo_down": lambda p: s(B * p.rho_c) + 1 - s(B * p.delta),
    "sppo_hard": lambda p: (p.rho_c - 1 / (2 * B)) ** 2 + (p.rho_r + 1 / (2 * B)) ** 2,
    "nca_pair": lambda p: -log_s(B * p.rho_c) - log_s(-B * p.rho_c) / 2 - log_s(-B * p.rho_r) / 2,
    "exo_pair": reverse_kl,
    "discopop": lambda p: -log_s(B * p.delta) * (1 - s(B * p.delta / T)) + math.exp(-B * p.delta) * s(B * p.delta / T),
    "bco_pair": lambda p: -log_s(B * p.rho_c - SHIFT) - log_s(-(B * p.rho_r - SHIFT)),
    "simpo": lambda p: cdpo(B * (p.avg_c - p.avg_r) - G),
    "cpo": lambda p: cdpo(B * (p.c - p.r)),
    "orpo": lambda p: -p.likelihood / p.n_c - B * log_s(math.log(odds(p.avg_c) / odds(p.avg_r))),
}


def test_every_loss_has_an_equation():
    assert EQUATIONS.keys() == PAIR_LOSSES.keys()
    assert set(WITHOUT_REFERENCE) < PAIR_LOSSES.keys()


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_losses_are_their_papers(name):
    pairs = random_pairs()
    found = PAIR_LOSSES[name](pairs, OPTIONS)
    expected = [EQUATIONS[name](Pair(pairs, index)) for index in range(NUM_PAIRS)]
    assert found.tolist() == pytest.approx(expected, rel=BOUND, abs=BOUND)


def test_likelihood_is_a_mean_over_tokens_of_equal_weight():
    pairs = random_pairs()
    expected = [-Pair(pairs, index).likelihood / Pair(pairs, index).n_c for index in range(NUM_PAIRS)]
    assert negative_log_likelihood(pairs, OPTIONS).tolist() == pytest.approx(expected, rel=BOUND)


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_gradients_are_finite_where_answers_are_far_from_the_reference(name):
    """Also in fp32, as engines compute: 10 000 tokens that became likely, or unlikely; or certain."""
    far = torch.tensor([-1e4, -1e2, -1e-3, 0.0])
    chosen, rejected = far.clone().requires_grad_(), far.flip(0).clone().requires_grad_()
    tokens = torch.full((4,), 100.0)
    pairs = Pairs(chosen, rejected, far.flip(0), far, tokens, tokens, chosen)
    loss = PAIR_LOSSES[name](pairs, replace(OPTIONS, beta=0.1))
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(chosen.grad).all()
    assert torch.isfinite(rejected.grad).all()


def test_log_odds_keep_their_digits():
    for average in (-30.0, -3.0, -0.1, -1e-6):
        expected = average - math.log(-math.expm1(average))
        assert float(log_odds(torch.tensor(average))) == pytest.approx(expected, rel=1e-6)
    certain = torch.zeros((), requires_grad=True)
    log_odds(certain).backward()
    assert torch.isfinite(log_odds(certain))
    assert torch.isfinite(certain.grad)


def test_the_running_reward_of_bco_is_part_of_the_state():
    """The mean of the rewards of whole steps; another loss keeps nothing."""
    objective = Preference({"bco_pair": 1.0, "sigmoid": 1.0})
    for pairs, chosen, rejected in ((4.0, 0.5, -0.1), (2.0, 1.0, 0.0)):
        metrics = {"rewards/chosen": chosen, "rewards/rejected": rejected}
        objective.after_step(SimpleNamespace(normalizer=pairs, metrics=metrics))
    assert objective.options.reward_shift == pytest.approx((4 * 0.2 + 2 * 0.5) / 6)
    resumed = Preference({"bco_pair": 1.0, "sigmoid": 1.0})
    resumed.load_state_dict(objective.state_dict())
    assert resumed == objective
    without = Preference({"sigmoid": 1.0})
    without.after_step(SimpleNamespace(normalizer=1.0, metrics={"rewards/chosen": 1.0, "rewards/rejected": 1.0}))
    assert without == Preference({"sigmoid": 1.0})
    assert without.state_dict() == {}
