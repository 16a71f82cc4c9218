"""Losses of policy and critic against plain Transformers with autograd: loss, metrics and the gradient of every weight,
in every kind of layout. The expected losses are written out response by response."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layouts import EXPERT_LAYOUTS, LAYOUTS, SEQUENCE_LAYOUTS, Layout
from pairs_kit import Expected, gradient_errors
from policy_kit import Case, Response, choose_at_random, compute, distributions, gradients, random_tokens
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from megatune.config.groups.run import RunSettings
from megatune.config.rl.algorithm import AlgorithmSettings, CorrectionFilter, IsWeight, TrainInferCorrection
from megatune.objectives.policy.objective import PolicyObjective, ValueObjective
from megatune.verify.reference import load_reference_model

OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
EVERY = {**EXPERT_LAYOUTS, **LAYOUTS, **SEQUENCE_LAYOUTS, "dp2, overlaps": Layout(2, OVERLAPS)}
GRPO = PolicyObjective(
    AlgorithmSettings(
        adv_estimator="grpo", pg_clip_low=0.1, pg_clip_high=0.14, use_kl_loss=True, kl_loss_coef=0.3,
        entropy_loss_coef=0.05, enable_old_logprobs_recompute=True,
    ),
    temperature=0.8,
)  # fmt: skip
PPO = PolicyObjective(
    AlgorithmSettings(
        pg_clip=0.1, pg_clip_low=0.1, pg_clip_high=0.1, dual_clip_loss=True, loss_agg_mode="token-mean",
        enable_old_logprobs_recompute=True,
    )
)  # fmt: skip
GSPO = PolicyObjective(
    AlgorithmSettings(
        pg_clip_low=0.1, pg_clip_high=0.14, importance_sampling="seq", loss_agg_mode="seq-mean-token-sum",
        enable_old_logprobs_recompute=True,
    )
)  # fmt: skip
# What is left to the update: old log-probabilities are its own, and the rollout engine's are corrected for.
CORRECTED = PolicyObjective(
    AlgorithmSettings(
        loss_agg_mode="seq-mean-token-sum-norm",
        train_infer_correction=TrainInferCorrection(
            is_weight=IsWeight(enabled=True, weight_type="sequence", upper_bound=1.3),
            filters=[CorrectionFilter(enabled=True, agg_type="geometric", ratio_low=0.95, ratio_high=1.2)],
        ),
    ),
    variant="topr", topr_positive_weight=0.7, norm_length=20, samples=7,
)  # fmt: skip
POLICIES = {"grpo": GRPO, "ppo": PPO, "gspo": GSPO, "corrected": CORRECTED}
VALUE = ValueObjective(clip=0.2)
CASES: list[tuple[str, str, int]] = [
    *(
        ("grpo", layout, size)
        for layout, size in (
            ("1", 2), ("tp2 sp", 1), ("pp2 vpp2", 2), ("cp2 p2p", 1), ("packed", 1), ("ep2", 1), ("dp2, overlaps", 1),
        )
    ),
    *(("ppo", layout, 1) for layout in ("1", "tp2 sp", "pp2 vpp2", "cp2, packed", "ep2", "dp2, overlaps")),
    *(("gspo", layout, 1) for layout in ("1", "cp2 p2p", "cp2, packed")),
    *(("corrected", layout, 2) for layout in ("1", "cp2, packed")),
]  # fmt: skip
REPLAYED = [("qwen3_moe", "1"), ("qwen3_moe", "cp2 ep2, packed"), ("deepseek_v3", "ep2 etp1 tp2 sp")]
REPLAYED += [("deepseek_v3", "ep2 pp2")]
Truth = Callable[[str, str], tuple[Path, list[Response], Expected]]


def respond(model: Any, objective: PolicyObjective) -> list[Response]:
    """Old, rollout's and reference log-probabilities are near the policy's, so that some ratios are clipped, and some
    are not; advantages are of tokens, and one response does not count."""
    generator = np.random.default_rng(11)
    found = []
    for number, (prompt, tokens) in enumerate(random_tokens(301)):
        size = len(tokens) - prompt
        with torch.no_grad():
            near = distributions(model, Response(tokens, prompt, {}), objective.temperature)[0].numpy()
        advantages = generator.normal(0, 1, size if objective is PPO else 1) * np.ones(size)
        values = {
            "mask": np.full(size, number != 4), "advantages": advantages * (number != 4),
            "weights": np.full(size, generator.uniform(0.5, 2)),
        }  # fmt: skip
        for name, scale in (("old_log_probs", 0.15), ("rollout_log_probs", 0.15), ("reference_log_probs", 0.5)):
            values[name] = near + generator.normal(0, scale, size)
        values = {name: value.astype(np.float32) for name, value in values.items()}
        found.append(Response(tokens, prompt, values, score=float(advantages[0])))
    return found


def loss_of(objective: PolicyObjective, log_probs: Tensor, entropies: Tensor, response: Response) -> Tensor:
    """Losses of the tokens of one response, before aggregation."""
    known = {name: torch.from_numpy(values) for name, values in response.values.items()}
    part, advantages, weights = objective.settings, known["advantages"], known["weights"]
    if objective is CORRECTED:
        log_ratio = log_probs.detach() - known["rollout_log_probs"]
        kept = bool(0.95 <= log_ratio.mean().exp() <= 1.2)
        weights = weights * log_ratio.sum().exp().clamp(max=1.3) * kept
        return -weights * advantages * log_probs * (0.7 if response.score > 0 else 1.0)
    ratio = (log_probs - known["old_log_probs"]).exp()
    if objective is GSPO:
        ratio = ratio.log().mean().exp().expand_as(ratio)
    low, high = 1 - part.pg_clip_low, 1 + part.pg_clip_high
    loss = -torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
    if part.dual_clip_loss:
        loss = torch.where(advantages < 0, loss.clamp(max=-part.dual_clip * advantages), loss)
    loss = weights * loss
    if part.use_kl_loss:
        away = known["reference_log_probs"] - log_probs
        loss = loss + part.kl_loss_coef * (away.exp() - away - 1)
    return loss - part.entropy_loss_coef * entropies


def expect(model: Any, responses: list[Response], objective: PolicyObjective) -> Expected:
    """Aggregate all responses at once, and differentiate."""
    sums, log_ratios, of_entropies, sizes = [], [], [], []
    for each in responses:
        if each.values["mask"].all():
            log_probs, entropies = distributions(model, each, objective.temperature)
            sums.append(loss_of(objective, log_probs, entropies, each))
            sizes.append(len(log_probs))
            of_entropies.append(entropies)
            log_ratios.append(log_probs - torch.from_numpy(each.values["old_log_probs"]))
    match objective.settings.loss_agg_mode:
        case "token-mean":
            loss = torch.cat(sums).mean()
        case "seq-mean-token-sum":
            loss = torch.stack([each.sum() for each in sums]).mean()
        case "seq-mean-token-mean":
            loss = torch.stack([each.mean() for each in sums]).mean()
        case _:
            loss = torch.stack([each.sum() for each in sums]).sum() / 20
    metrics = {"actor/entropy": torch.cat(of_entropies).mean().item()}
    if objective.settings.enable_old_logprobs_recompute:
        metrics["actor/policykl"] = torch.cat(log_ratios).mean().item()
        if objective is not GSPO:
            ratios, part = torch.cat(log_ratios).exp(), objective.settings
            clipped = ((ratios < 1 - part.pg_clip_low) | (ratios > 1 + part.pg_clip_high)).float().mean().item()
            metrics["actor/ppo_ratio_clipfrac"] = clipped
    return Expected(loss.item(), metrics, gradients(model, loss))


@pytest.fixture(scope="module")
def truth(model_dir: Any) -> Truth:
    """A checkpoint, responses, and what Transformers computes of them; made once."""
    made: dict[tuple[str, str], tuple[Path, list[Response], Expected]] = {}

    def make(name: str, family: str) -> tuple[Path, list[Response], Expected]:
        if (name, family) not in made:
            model = load_reference_model(model_dir(family), torch.float32)
            responses = respond(model, POLICIES[name])
            made[name, family] = model_dir(family), responses, expect(model, responses, POLICIES[name])
        return made[name, family]

    return make


def check(answers: list[tuple[float, dict[str, float]]], folder: Path, expected: Expected) -> None:
    for loss, metrics in answers:
        assert loss == pytest.approx(expected.loss, rel=2e-6)
        assert {name: metrics[name] for name in expected.metrics} == pytest.approx(expected.metrics, rel=1e-5, abs=1e-6)
    errors = gradient_errors(folder, expected.gradients)
    assert not {name: f"{error:.1e}" for name, error in errors.items() if not error <= 1e-5}


@pytest.mark.covering
@pytest.mark.parametrize(("name", "layout", "size"), CASES)
def test_policies_agree(pool: Any, truth: Truth, tmp_path: Path, name: str, layout: str, size: int) -> None:
    model, responses, expected = truth(name, "qwen3_moe" if "ep" in layout else "qwen3")
    assert 0.2 < expected.metrics.get("actor/ppo_ratio_clipfrac", 0.5) < 0.8
    case = Case(model, EVERY[layout].settings(), responses, POLICIES[name], size)
    check(pool.run(EVERY[layout].world_size, compute, case, tmp_path), tmp_path, expected)


@pytest.fixture(scope="module")
def replayed(model_dir: Any) -> Callable[[str], tuple[list[Response], Expected]]:
    """Responses with the rollout engine's choices, and what Transformers computes with them; made once."""
    made: dict[str, tuple[list[Response], Expected]] = {}

    def make(family: str) -> tuple[list[Response], Expected]:
        if family not in made:
            model = load_reference_model(model_dir(family), torch.float32)
            responses = choose_at_random(model.config, respond(model, GRPO))
            made[family] = responses, expect(model, responses, GRPO)
        return made[family]

    return make


@pytest.mark.covering
@pytest.mark.parametrize(("family", "layout"), REPLAYED)
def test_choices_of_the_rollout_engine_are_taken(
    pool: Any, model_dir: Any, replayed: Any, tmp_path: Path, family: str, layout: str
) -> None:
    """Of every layer its own, also behind layers without experts."""
    responses, expected = replayed(family)
    case = Case(model_dir(family), EVERY[layout].settings(), responses, GRPO)
    check(pool.run(EVERY[layout].world_size, compute, case, tmp_path), tmp_path, expected)


def critic(folder: Path, model: Path) -> tuple[list[Response], Expected]:
    """A value model is written to the folder; one response does not count."""
    torch.manual_seed(3)
    found: Any = AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=1, pad_token_id=0, dtype=torch.float32
    )
    found.score.weight.data.normal_()
    found.save_pretrained(folder)
    found.eval()
    generator, responses, losses, errors = np.random.default_rng(7), [], [], []
    for number, (prompt, tokens) in enumerate(random_tokens(301)):
        empty = Response(tokens, prompt, {})
        hidden = found.model(input_ids=torch.tensor(tokens)[None]).last_hidden_state[0, empty.trained]
        values = found.score(hidden)[:, 0]
        near = values.detach().numpy()
        known = {"returns": generator.normal(0, 1, len(near)), "values": near + generator.normal(0, 0.3, len(near))}
        known = {name: each.astype(np.float32) for name, each in known.items()}
        known["mask"] = np.full(len(near), number != 4, np.float32)
        responses.append(Response(tokens, prompt, known))
        if number != 4:
            returns, old = torch.from_numpy(known["returns"]), torch.from_numpy(known["values"])
            error = (values - returns) ** 2
            losses.append(torch.max(error, ((old + (values - old).clamp(-0.2, 0.2)) - returns) ** 2).mean())
            errors.append(error.mean())
    loss = torch.stack(losses).mean() / 2
    metrics = {"critic/error": torch.stack(errors).mean().item()}
    return responses, Expected(loss.item(), metrics, gradients(found, loss))


@pytest.fixture(scope="module")
def critics(model_dir: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Any] = {}

    def make(family: str) -> Any:
        if family not in made:
            folder = tmp_path_factory.mktemp("critic")
            made[family] = folder, *critic(folder, model_dir(family))
        return made[family]

    return make


# Policies have these above, and reward models their score there.
@pytest.mark.extended("1", "cp2 p2p", "ep2")
@pytest.mark.parametrize("layout", ["1", "tp2 sp", "pp2 vpp2", "cp2 p2p", "packed", "ep2", "dp2, overlaps"])
def test_critics_agree(pool: Any, critics: Any, tmp_path: Path, layout: str) -> None:
    model, responses, expected = critics("qwen3_moe" if "ep" in layout else "qwen3")
    settings = EVERY[layout].settings().model_copy(update={"run": RunSettings(stage="rm", ddp_timeout=30)})
    check(
        pool.run(EVERY[layout].world_size, compute, Case(model, settings, responses, VALUE), tmp_path),
        tmp_path,
        expected,
    )
