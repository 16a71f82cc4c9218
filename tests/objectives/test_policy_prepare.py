"""From scores to advantages, against the same written out response by response and token by token."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatune.config.rl.algorithm import AlgorithmSettings, CorrectionFilter, IsWeight, TrainInferCorrection
from megatune.errors import MegatuneError
from megatune.objectives.policy.losses import Terms, kl_terms, token_losses
from megatune.objectives.policy.prepare import AlgorithmState, prepare
from megatune.objectives.policy.samples import Prepared, StepSamples

LENGTHS = (3, 1, 5, 2, 4, 4, 2, 6, 1, 3, 2, 5)
GROUPS = (0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3)  # 0 and 2 of one domain, 1 and 3 of the other
DOMAINS = tuple("math" if group % 2 == 0 else "code" for group in GROUPS)
SCORES = (1.0, 0.0, 0.5, 1.0, 1.0, 1.0, 0.0, 0.25, 1.0, 0.0, 0.0, 1.0)
LIMIT = 5


def ragged(seed: int, scale: float = 1.0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [(scale * generator.normal(-1, 1, length)).astype(np.float32) for length in LENGTHS]


SAMPLES = StepSamples(
    scores=np.array(SCORES), lengths=np.array(LENGTHS), groups=np.array(GROUPS), domains=DOMAINS,
    at_limit=np.array(LENGTHS) >= LIMIT, difficulty=np.linspace(-0.2, 1.2, len(LENGTHS)),
    rollout_log_probs=ragged(0), values=ragged(3),
)  # fmt: skip
PLAIN = AlgorithmSettings(adv_estimator="reinforce")


def run(part: AlgorithmSettings, samples: StepSamples = SAMPLES, **options: Any) -> Prepared:
    return prepare(samples, part, AlgorithmState(part), **options)


def close(found: list[np.ndarray], expected: list[Any]) -> None:
    assert [len(each) for each in found] == list(LENGTHS)
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, np.broadcast_to(other, mine.shape), rtol=2e-6, atol=1e-6)


def others(number: int, key: tuple[Any, ...]) -> list[float]:
    return [SCORES[each] for each in range(len(SCORES)) if key[each] == key[number]]


def expected_rewards(name: str) -> list[float]:
    found = []
    for number, score in enumerate(SCORES):
        group, domain = others(number, GROUPS), others(number, DOMAINS)
        center = statistics.mean(group)
        match name:
            case "grpo":
                found.append((score - center) / (statistics.stdev(group) + 1e-6))
            case "rloo":
                found.append(score - (sum(group) - score) / (len(group) - 1))
            case "dr_grpo":
                found.append(score - center)
            case "batch":
                found.append((score - statistics.mean(domain)) / (statistics.stdev(domain) + 1e-6))
            case "group std alone":
                found.append(score / (statistics.stdev(group) + 1e-6))
    return found


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("grpo", AlgorithmSettings(adv_estimator="grpo", norm_mean_type="batch")),
        ("rloo", AlgorithmSettings(adv_estimator="rloo")),
        ("dr_grpo", PLAIN.model_copy(update={"norm_mean_type": "group"})),
        ("batch", PLAIN.model_copy(update={"norm_mean_type": "batch", "norm_std_type": "batch"})),
        ("group std alone", PLAIN.model_copy(update={"norm_std_type": "group"})),
    ],
)
def test_rewards_of_samples_are_advantages_of_their_tokens(name: str, part: AlgorithmSettings) -> None:
    found = run(part)
    close(found.advantages, expected_rewards(name))
    close(found.mask, [1.0] * len(LENGTHS))
    close(found.weights, [1.0] * len(LENGTHS))
    shuffled = np.random.default_rng(0).permutation(len(LENGTHS))
    samples = StepSamples(
        scores=SAMPLES.scores[shuffled], lengths=SAMPLES.lengths[shuffled], groups=SAMPLES.groups[shuffled],
        domains=[DOMAINS[each] for each in shuffled], at_limit=SAMPLES.at_limit[shuffled],
    )  # fmt: skip
    again = run(part, samples).advantages
    close([again[place] for place in np.argsort(shuffled)], expected_rewards(name))


def test_a_sample_without_a_score_trains_nothing_and_is_in_no_mean() -> None:
    """The others train as if it had not been sampled, whatever its score is."""
    part = AlgorithmSettings(
        adv_estimator="reinforce", norm_mean_type="group", norm_std_type="running", whiten_advantages=True,
        length_loss_weight=True,
    )  # fmt: skip
    left = np.array([number not in (1, 3, 4, 5) for number in range(len(LENGTHS))])  # one of a group, and a whole group
    state, other = AlgorithmState(part), AlgorithmState(part)
    found = prepare(replace(SAMPLES, scores=np.where(left, SCORES, 1e9), failed=~left), part, state)
    alone = StepSamples(
        scores=SAMPLES.scores[left], lengths=SAMPLES.lengths[left], groups=SAMPLES.groups[left],
        domains=[DOMAINS[each] for each in np.flatnonzero(left)], at_limit=SAMPLES.at_limit[left],
    )  # fmt: skip
    expected = prepare(alone, part, other)
    for name in ("advantages", "mask", "weights"):
        mine, others = getattr(found, name), iter(getattr(expected, name))
        for number, each in enumerate(mine):
            if left[number]:
                np.testing.assert_allclose(each, next(others), rtol=1e-6, atol=1e-6)
            elif name != "weights":
                assert not each.any()
    assert state.state_dict() == other.state_dict()
    assert found.metrics["critic/rewards/mean"] == pytest.approx(expected.metrics["critic/rewards/mean"])
    assert (found.metrics["actor/samples_used"], found.metrics["actor/samples_total"]) == (8, 12)


def test_reinforce_plus_plus_whitens_over_the_tokens_of_a_domain() -> None:
    found = run(AlgorithmSettings(adv_estimator="reinforce_plus_plus"))
    centered = expected_rewards("dr_grpo")
    expected = []
    for number, length in enumerate(LENGTHS):
        tokens = [
            centered[each]
            for each in range(len(LENGTHS))
            if DOMAINS[each] == DOMAINS[number]
            for _ in range(LENGTHS[each])
        ]
        value = (centered[number] - statistics.mean(tokens)) / math.sqrt(statistics.variance(tokens) + 1e-8)
        expected.append([value] * length)
    close(found.advantages, expected)


def test_whitened_rewards_are_of_the_tokens_of_a_domain() -> None:
    """A response's score is the reward of its last token, and the others' is 0; both are whitened, then discounted."""
    found = run(PLAIN.model_copy(update={"whiten_rewards": True, "gamma": 0.9}))
    tokens = [[0.0] * (length - 1) + [score] for length, score in zip(LENGTHS, SCORES, strict=True)]
    expected = []
    for number, own in enumerate(tokens):
        domain = [each for other, values in enumerate(tokens) if DOMAINS[other] == DOMAINS[number] for each in values]
        center, width = statistics.mean(domain), math.sqrt(statistics.variance(domain) + 1e-8)
        white = [(value - center) / width for value in own]
        expected.append(
            [sum(0.9**place * value for place, value in enumerate(white[start:])) for start in range(len(white))]
        )
    close(found.advantages, expected)


@pytest.mark.parametrize(("kind", "of"), [
    ("kl", lambda d: d), ("abs", abs), ("mse", lambda d: d * d / 2), ("k3", lambda d: math.exp(-d) - 1 + d),
])  # fmt: skip
def test_the_penalty_is_of_every_token_and_its_coefficient_moves(kind: Any, of: Any) -> None:
    part = AlgorithmSettings(
        adv_estimator="reinforce", add_token_level_kl=True, kl_penalty=kind, init_kl_coef=0.3, gamma=0.9,
        target_kl=0.01, kl_horizon=50,
    )  # fmt: skip
    samples = replace(SAMPLES, old_log_probs=ragged(1, 0.3), reference_log_probs=ragged(2, 0.3))
    state = AlgorithmState(part)
    found = prepare(samples, part, state)
    expected, means = [], []
    for number, (mine, base) in enumerate(zip(ragged(1, 0.3), ragged(2, 0.3), strict=True)):
        kls = [of(float(a) - float(b)) for a, b in zip(mine, base, strict=True)]
        means.append(statistics.mean(kls))
        rewards, later, returns = [-0.3 * kl for kl in kls], 0.0, []
        rewards[-1] += SCORES[number]
        for reward in reversed(rewards):
            later = reward + 0.9 * later
            returns.append(later)
        expected.append(returns[::-1])
    close(found.advantages, expected)
    assert found.metrics["critic/kl"] == pytest.approx(statistics.mean(means), abs=1e-6)
    assert found.metrics["critic/kl_coef"] == 0.3
    sign = 1 if statistics.mean(means) > 0.01 * 1.2 else -1
    assert state.kl_coef == pytest.approx(0.3 * (1 + sign * 0.2 * len(LENGTHS) / 50))


def test_advantages_of_the_critic_are_sums_of_its_errors() -> None:
    part = AlgorithmSettings(adv_estimator="gae", gamma=0.95, lambd=0.9, max_len_mask=True)
    found = run(part)
    advantages, returns = [], []
    for number, values in enumerate(ragged(3)):
        kept = LENGTHS[number] < LIMIT
        rewards = [0.0] * (len(values) - 1) + [SCORES[number] * kept]
        following = [*values[1:], 0.0]
        errors = [r + 0.95 * n - v for r, n, v in zip(rewards, following, values, strict=True)]
        mine = [sum((0.95 * 0.9) ** (u - t) * errors[u] for u in range(t, len(errors))) for t in range(len(errors))]
        advantages.append([each * kept for each in mine])
        returns.append([a + v for a, v in zip(mine, values, strict=True)])
    close(found.advantages, advantages)
    close(found.returns, returns)
    close(found.mask, [float(length < LIMIT) for length in LENGTHS])


def test_samples_that_do_not_train_are_in_no_mean() -> None:
    part = AlgorithmSettings(
        adv_estimator="grpo", max_len_mask=True, difficulty_mask=True, difficulty_high_threshold=0.95,
        error_max_len_clip=True, error_max_len_threshold=3, difficulty_loss_weight=True, length_loss_weight=True,
        whiten_advantages=True, advantage_clip=0.8,
    )  # fmt: skip
    found = run(part)
    # Too long; of a group that is always right; neither right nor wrong; wrong, and long.
    kept = [0, 1, 6, 8, 10]
    close(found.mask, [float(number in kept) for number in range(len(LENGTHS))])
    assert found.num_tokens == sum(LENGTHS[number] for number in kept)
    raw = {}
    for number in kept:
        difficulty = min(max(-0.2 + 1.4 * number / 11, 0.0), 1.0)
        raw[number] = (0.5 + 1.5 * difficulty) * (1.5 - (LENGTHS[number] - 1) / 2)
    mean = statistics.mean(raw.values())
    for number in kept:
        np.testing.assert_allclose(found.weights[number], raw[number] / mean, rtol=1e-6)
    grpo = expected_rewards("grpo")
    for number in kept:
        tokens = [grpo[each] for each in kept if DOMAINS[each] == DOMAINS[number] for _ in range(LENGTHS[each])]
        value = grpo[number]
        if len(tokens) > 1:
            value = (value - statistics.mean(tokens)) / math.sqrt(statistics.variance(tokens) + 1e-8)
        np.testing.assert_allclose(found.advantages[number], np.clip(value, -0.8, 0.8), rtol=1e-5)
    assert found.metrics["math/actor/max_len_mask_ratio"] == pytest.approx(4 / 6)


@pytest.mark.parametrize("level", ["token", "geometric", "segment", "sequence"])
def test_the_correction_weighs_and_filters(level: Any) -> None:
    correction = TrainInferCorrection(
        is_weight=IsWeight(enabled=True, weight_type=level, upper_bound=1.1),
        filters=[
            CorrectionFilter(enabled=True, agg_type=level, ratio_low=0.9, ratio_high=1.2),
            CorrectionFilter(enabled=False, ratio_high=0.0),
            CorrectionFilter(enabled=True, ratio_enabled=False, diff_enabled=True, diff_low=-0.05, diff_high=0.05),
        ],
    )
    part = PLAIN.model_copy(update={"train_infer_correction": correction})
    old = [a + 0.15 * b for a, b in zip(ragged(0), ragged(5), strict=True)]
    turns = [np.array([length - length // 3, length // 3][: 1 + (length > 2)]) for length in LENGTHS]
    found = run(part, replace(SAMPLES, old_log_probs=old, turns=turns))
    weights, masks = [], []
    for mine, rollout, (first, *_) in zip(old, ragged(0), turns, strict=True):
        logs = [float(a) - float(b) for a, b in zip(mine, rollout, strict=True)]
        whole = {"sequence": sum(logs), "token": 0.0}.get(level, sum(logs) / len(logs))
        ratios = [math.exp(each if level == "token" else whole) for each in logs]
        if level == "segment":
            parts = [turn for turn in (logs[:first], logs[first:]) if turn]
            ratios = [math.exp(sum(turn) / len(turn)) for turn in parts for _ in turn]
        gaps = [math.exp(a) - math.exp(b) for a, b in zip(mine, rollout, strict=True)]
        weights.append([min(ratio, 1.1) for ratio in ratios])
        masks.append([float(0.9 <= r <= 1.2 and abs(g) <= 0.05) for r, g in zip(ratios, gaps, strict=True)])
    close(found.weights, weights)
    close(found.mask, masks)
    assert 0 < found.num_tokens < sum(LENGTHS)
    assert found.metrics["actor/train_infer_final_mask_mean"] == pytest.approx(found.num_tokens / sum(LENGTHS))
    gap = np.abs(np.concatenate(old) - np.concatenate(ragged(0))).mean()
    assert found.metrics["actor/train_infer_log_prob_gap"] == pytest.approx(gap, rel=1e-5)


def test_teachers_teach_their_samples() -> None:
    nothing = np.zeros(0, np.float32)
    one = [each if domain == "math" else nothing for each, domain in zip(ragged(7), DOMAINS, strict=True)]
    samples = replace(SAMPLES, teachers={"one": one, "all": ragged(8)})
    pure = AlgorithmSettings(is_pure_opd=True)
    expected = []
    for mine, first, every in zip(ragged(0), one, ragged(8), strict=True):
        penalty = 0.5 * (mine - every)
        expected.append(-(penalty + 2 * (mine - first)) if len(first) else -penalty)
    close(run(pure, samples, opd_coefs={"one": 2.0, "all": 0.5}).advantages, expected)
    mixed = run(PLAIN.model_copy(update={"use_opd": True}), samples, opd_coefs={"one": 2.0, "all": 0.5})
    close(mixed.advantages, [each + score for each, score in zip(expected, SCORES, strict=True)])


def test_running_moments_are_of_all_steps_and_come_back() -> None:
    part = PLAIN.model_copy(update={"norm_mean_type": "running", "norm_std_type": "running", "reward_clip": 1.2})
    state = AlgorithmState(part)
    prepare(SAMPLES, part, state)
    resumed = AlgorithmState(part)
    resumed.load_state_dict(json.loads(json.dumps(state.state_dict())))
    later = replace(SAMPLES, scores=2 - SAMPLES.scores)
    found = prepare(later, part, resumed)
    for number, domain in enumerate(DOMAINS):
        seen = others(number, DOMAINS)
        seen = seen + [2 - score for score in seen]
        value = (2 - SCORES[number] - statistics.mean(seen)) / (statistics.stdev(seen) + 1e-6)
        np.testing.assert_allclose(found.advantages[number], np.clip(value, -1.2, 1.2), rtol=1e-6, err_msg=domain)


@pytest.mark.parametrize(
    ("part", "what"),
    [
        (AlgorithmSettings(), "adv_estimator: gae: there are no values"),
        (PLAIN.model_copy(update={"add_token_level_kl": True}), "reference"),
        (PLAIN.model_copy(update={"use_opd": True}), "teacher"),
    ],
)
def test_what_is_missing_is_named(part: AlgorithmSettings, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        run(part, replace(SAMPLES, values=None))


def test_k3_has_a_finite_gradient_however_far_the_reference_is() -> None:
    log_probs = torch.tensor([-100.0, -3.0, -1.0, -0.5], requires_grad=True)
    reference = torch.tensor([-1.0, -1.0, -1.0, -99.0])
    found = kl_terms(log_probs, reference, "k3")
    expected = [10.0, math.expm1(2) - 2, 0.0, 10.0]
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-6)
    found.sum().backward()
    assert log_probs.grad is not None
    np.testing.assert_allclose(log_probs.grad.numpy(), [0.0, 1 - math.exp(2), 0.0, 0.0], rtol=1e-6)


@pytest.mark.parametrize(("kind", "of"), [("k1", lambda d: d), ("k2", lambda d: d**2 / 2), ("abs", np.abs)])
def test_other_estimates_of_the_divergence(kind: Any, of: Any) -> None:
    d = np.array([-2.0, -0.5, 0.25, 3.0])
    found = kl_terms(torch.from_numpy(d), torch.zeros(4, dtype=torch.float64), kind)
    np.testing.assert_allclose(found.numpy(), of(d))


@pytest.mark.parametrize("variant", ["tis", "topr", "cispo"])
def test_bounds_of_the_ratio(variant: Any) -> None:
    ratios = torch.tensor([0.5, 0.95, 1.5, 9.0], dtype=torch.float64)
    terms = Terms(torch.full((4,), -2.0), ratios.log(), torch.ones(4), torch.zeros(4, dtype=torch.bool))
    usual = (0.9, 1.1) if variant == "cispo" else (0.0, 1.0)
    for bounds, (low, high) in {(None, None): usual, (0.0, 5.0): (0.0, 5.0), (0.6, None): (0.6, usual[1])}.items():
        found = token_losses(variant, terms, PLAIN, 1.0, 1.0, bounds)
        np.testing.assert_allclose(found.numpy(), 2 * ratios.clamp(low, high).numpy(), rtol=1e-6)


def test_the_bound_of_a_dual_clip() -> None:
    terms = Terms(torch.zeros(2), torch.tensor([1.0, 3.0]).exp().log(), -torch.ones(2))
    part = PLAIN.model_copy(update={"dual_clip_loss": True, "dual_clip_bound": 4.0})
    np.testing.assert_allclose(token_losses(None, terms, part, 1.0, 1.0).numpy(), [math.e, 4.0], rtol=1e-6)
    assert part.model_copy(update={"dual_clip_bound": None, "pg_clip": 0.3}).dual_clip == 1.6


OWN = "tests.objectives.own_functions."


def run_of(**keys: Any) -> Prepared:
    return run(AlgorithmSettings(**keys))


def test_advantages_of_a_function():
    whole = run_of(adv_estimator="grpo", norm_mean_type="group", norm_std_type="group", whiten_advantages=True)
    own = run_of(adv_estimator="reinforce", advantage_function=f"{OWN}grpo", whiten_advantages=True)
    for found, expected in zip(own.advantages, whole.advantages, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)
    clipped = run_of(adv_estimator="reinforce", advantage_function=f"{OWN}rising", advantage_clip=1.0)
    assert {tuple(each[:3]) for each in clipped.advantages if len(each) > 2} == {(0.0, 1.0, 1.0)}
    with pytest.raises(MegatuneError, match=r"advantage_function .*wrong: values of tokens do not fit"):
        run_of(adv_estimator="reinforce", advantage_function=f"{OWN}wrong")
    with pytest.raises(MegatuneError, match=r"advantage_function '.*\.missing': .* has no attribute 'missing'"):
        run_of(adv_estimator="reinforce", advantage_function=f"{OWN}missing")


def test_losses_of_a_function():
    log_probs, old = torch.randn(2, 5, 7).unbind()
    log_probs.requires_grad_()
    terms = Terms(log_probs, log_probs - old, torch.randn(5, 7))
    gradients = []
    for path in (None, f"{OWN}clipped"):
        asked = AlgorithmSettings(pg_clip_low=0.2, pg_clip_high=0.2, loss_function=path)
        loss = token_losses(None, terms, asked, 1.0, 1.0).sum()
        gradients.append(torch.autograd.grad(loss, log_probs, retain_graph=True)[0])
    assert torch.equal(*gradients)
    with pytest.raises(MegatuneError, match=r"loss_function .*summed returns \(\)"):
        token_losses(None, terms, AlgorithmSettings(loss_function=f"{OWN}summed"), 1.0, 1.0)
