"""Optimizer steps on preference pairs against the same steps by Transformers and torch.optim.

Measured as in test_one_step. The policy leaves its reference, and BCO's mean of rewards runs along.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs_kit import Case, expect, log_probs, near, random_pairs, shard_pairs
from test_one_step import OPTIMIZERS, TOLERANCES, _checkpoint_copy, saved, update_errors
from test_preference import EVERY, LOSSES
from torch import Tensor

from megatune.bridge.assemble import assemble
from megatune.bridge.save import save_weights
from megatune.engine.model import gather_parameters
from megatune.objectives.preference import Preference, RunningReward
from megatune.training.joint_losses import with_joint_losses
from megatune.training.train_step import train_step
from megatune.verify.reference import load_reference_model

NUM_STEPS, ADAM = 3, "adam, larger epsilon"


def engine_steps(case: Case, folder: Path) -> list[float]:
    """On every rank: the losses; weights are written."""
    assembly, running, losses = assemble(case.model, case.settings), RunningReward(), []
    for _ in range(NUM_STEPS):
        objective, batches = running.of_next_step(case.objective), shard_pairs(case, assembly)
        if objective.joint:
            batches = with_joint_losses(assembly.model, batches, objective)
        result = train_step(assembly, batches, objective, learning_rate=case.settings.optimizer.learning_rate)
        assert result.updated
        running.add(result.totals)
        losses.append(result.totals.loss)
    gather_parameters(assembly.model)
    save_weights(folder, assembly.parameters, assembly.architecture, assembly.place, form=assembly.form)
    return losses


def plain_steps(
    model: Any, pairs: list[Any], reference: list[float], objective: Preference, settings: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Weights before and after, and losses."""
    before, losses, rewards = _checkpoint_copy(model), [], []
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": settings["weight_decay"]},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    betas = settings["adam_beta1"], settings["adam_beta2"]
    optimizer = torch.optim.AdamW(groups, settings["learning_rate"], betas, settings["adam_epsilon"])
    for _ in range(NUM_STEPS):
        shift = sum(rewards) / max(len(rewards), 1)
        shifted = replace(objective, shape=replace(objective.shape, reward_shift=shift))
        now = torch.tensor(log_probs(model, pairs)) - torch.tensor(reference)
        losses.append(expect(model, pairs, reference, shifted).loss)
        rewards += (objective.shape.beta * now).tolist()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"])
        optimizer.step()
    return before, _checkpoint_copy(model), losses


@pytest.mark.parametrize(
    ("family", "losses", "layout", "size"),
    [
        ("qwen3", "a mix", "1", 1),
        ("qwen3", "a mix", "cp2, packed", 2),
        ("qwen3", "a mix", "tp2 pp2 dp2 sp", 1),
        ("qwen3", "joint losses", "dp2, overlaps", 2),
        ("qwen3", "orpo", "pp2 vpp2", 1),
        ("qwen3_moe", "sigmoid", "ep2", 1),
    ],
)
def test_three_steps_equal_plain_transformers(
    pool: Any, model_dir: Any, tmp_path: Path, family: str, losses: str, layout: str, size: int
) -> None:
    model, pairs = load_reference_model(model_dir(family), torch.float32), random_pairs(301)
    optimizer = OPTIMIZERS[ADAM]
    reference = near(log_probs(model, pairs))
    case = Case(model_dir(family), EVERY[layout].settings(optimizer), pairs, reference, LOSSES[losses], size)
    answers = pool.run(EVERY[layout].world_size, engine_steps, case, tmp_path)
    before, after, expected = plain_steps(model, pairs, reference, LOSSES[losses], optimizer)
    for found in answers:
        assert found == pytest.approx(expected, rel=1e-4)
    errors = update_errors(before, after, saved(tmp_path))
    assert not {name: f"{error:.1e}" for name, error in errors.items() if not error <= TOLERANCES[ADAM]}
