"""The first step of preference training: the policy still is the reference, so all margins are 0."""

from __future__ import annotations

import torch

from megatune.config.groups.optimizer import PrecisionSettings
from megatune.engine.step import StepTotals
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.objectives.joint_losses import JOINT
from megatune.objectives.kto import KTO
from megatune.objectives.pair_losses import SEPARABLE, WITHOUT_REFERENCE, Pairs
from megatune.objectives.preference import Preference

# What rounding may make of a mean log-probability, as a share of it: the passes have other shapes and, with experts,
# tokens on the border between two of them.
_BOUNDS = {"float32": 2**-16, "bfloat16": 2**-7, "float16": 2**-9}


def check_first_step(objective: Preference | KTO, totals: StepTotals, precision: PrecisionSettings) -> str:
    """Hold the first step's log-probabilities and losses against those of a policy that is its reference.

    Returns:
        A line that says so, with a loss at margin 0.

    Raises:
        MegatuneError: NOT_FINITE, when they differ by more than rounding does.
    """
    metrics, bound = totals.metrics, _BOUNDS[precision.params_dtype]
    beta = objective.beta if isinstance(objective, KTO) else objective.shape.beta
    off: list[str] = []
    apart: list[float] = []  # by how much log-probabilities may differ
    for answer in ("chosen", "rejected"):
        if f"logps/{answer}" not in metrics:  # a step of answers of one kind
            continue
        log_prob, difference = metrics[f"logps/{answer}"], metrics[f"rewards/{answer}"] / beta
        apart.append(bound * (1 + abs(log_prob)))
        if abs(difference) > apart[-1]:
            off.append(f"log-probabilities of {answer} answers differ by {difference:.6g} of {log_prob:.6g}")
    if isinstance(objective, KTO):
        found, wrong = _check_answers(objective, totals, max(apart), bound * (1 + abs(objective.kl_log_prob)))
    else:
        found, wrong = _check_pairs(objective, totals, apart)
    off += wrong
    if off:
        what = f"the reference is not the model that training starts from: in step 1 {'; '.join(off)}"
        why = f"rounding in {precision.params_dtype} explains {max(apart):.2g}; the rest comes from other weights"
        fix = "delete the reference-*.npy files of the prepared rows, which are computed again; then megatune verify"
        raise MegatuneError(Finding(what, why=why, fix=fix), ExitCode.NOT_FINITE)
    return f"reference agrees: {', '.join(found)}"


def _check_answers(objective: KTO, totals: StepTotals, apart: float, kl_apart: float) -> tuple[list[str], list[str]]:
    """Return KTO's loss before weights, and what is wrong with it: at ratios of 0, and z of 0, it is a half.

    Args:
        objective: with the step's z.
        apart, kl_apart: by how much log-probabilities may differ, and those of answers to other prompts.
    """
    value = totals.metrics.get(f"loss/{objective.name}", totals.loss)
    off = []
    if objective.kl > kl_apart:
        off.append(f"log-probabilities of answers to other prompts differ by {objective.kl:.6g}")
    if abs(value - 0.5) > objective.beta * (apart + kl_apart) / 4:  # σ is nowhere steeper
        off.append(f"{objective.name} is {value:.6f}, and 0.500000 where policy and reference are the same")
    return [f"{value:.6f}"], off


def _check_pairs(objective: Preference, totals: StepTotals, apart: list[float]) -> tuple[list[str], list[str]]:
    """Return the losses that have a reference, and what is wrong with them."""
    found: list[str] = []
    off: list[str] = []
    metrics = totals.metrics
    for name, weight in objective.losses.items():
        if name in WITHOUT_REFERENCE:
            continue
        value = metrics.get(f"loss/{name}", totals.loss / weight)
        expected = _loss(objective, name, 0.0, 0.0)
        ends = (_loss(objective, name, side * apart[0], -side * apart[1]) for side in (-1, 1))
        found.append(f"{value:.6f}")
        if abs(value - expected) > max(abs(end - expected) for end in ends):
            off.append(f"{name} is {value:.6f}, and {expected:.6f} where policy and reference are the same")
    return found, off


def _loss(objective: Preference, name: str, chosen: float, rejected: float) -> float:
    """Return the loss of a pair with these log-ratios."""
    one = torch.ones(1, dtype=torch.float64)
    policy = chosen * one, rejected * one
    pairs = Pairs(*policy, 0 * one, 0 * one, one, one, policy[0])
    return float({**SEPARABLE, **JOINT}[name](pairs, objective.shape))
