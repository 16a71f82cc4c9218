"""Optimizer steps on preference pairs against the same steps by Transformers and torch.optim.

Measured as in test_one_step. BCO's mean of rewards runs along, which TRL's does not: see test_trl_steps for the rest.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs_kit import Case, expect, log_probs, near, random_pairs, shard_pairs, with_base
from saving import save_adapters, save_weights
from test_one_step import OPTIMIZERS, TOLERANCES, _checkpoint_copy, saved, update_errors
from test_preference import EVERY, LOSSES
from torch import Tensor

from megatune.bridge.assemble import assemble
from megatune.engine.model import gather_parameters
from megatune.objectives.preference import Preference
from megatune.training.train_step import train_step
from megatune.verify.reference import load_reference_model

NUM_STEPS, ADAM = 3, "adam, larger epsilon"


def engine_steps(case: Case, folder: Path) -> list[dict[str, float]]:
    """On every rank: loss, gradient norm and metrics of each step; weights are written, or an adapter.

    Without values of a reference it is the model as it is at first, without its adapters.
    """
    assembly, log = assemble(case.model, case.settings), []
    objective = replace(case.objective, options=replace(case.objective.options, reward_shift=0.0))
    batches, finetuning = shard_pairs(case, assembly), case.settings.finetuning
    if case.reference is None:
        batches = with_base(assembly, batches)
    for _ in range(NUM_STEPS):
        result = train_step(assembly, batches, objective, learning_rate=case.settings.optimizer.learning_rate)
        assert result.updated
        objective.after_step(result.totals)
        log.append({"loss": result.totals.loss, "grad_norm": result.grad_norm, **result.totals.metrics})
    gather_parameters(assembly.model)
    if finetuning.finetuning_type == "lora":
        save_adapters(folder, assembly.parameters, assembly.architecture, assembly.coords, finetuning)
    else:
        save_weights(folder, assembly.parameters, assembly.architecture, assembly.coords, form=assembly.form)
    return log


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
        shifted = replace(objective, options=replace(objective.options, reward_shift=shift))
        now = torch.tensor(log_probs(model, pairs)) - torch.tensor(reference)
        losses.append(expect(model, pairs, reference, shifted).loss)
        rewards += (objective.options.beta * now).tolist()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"])
        optimizer.step()
    return before, _checkpoint_copy(model), losses


@pytest.mark.extended("tp2 pp2 dp2 sp")  # what a step hands on to the next is summed over data-parallel ranks alone
@pytest.mark.parametrize(("layout", "size"), [("cp2, packed", 2), ("dp2, overlaps", 1), ("tp2 pp2 dp2 sp", 1)])
def test_three_steps_equal_plain_transformers(
    pool: Any, model_dir: Any, tmp_path: Path, layout: str, size: int
) -> None:
    model, pairs = load_reference_model(model_dir("qwen3"), torch.float32), random_pairs(301)
    optimizer, objective = OPTIMIZERS[ADAM], LOSSES["a mix"]
    reference = near(log_probs(model, pairs))
    case = Case(model_dir("qwen3"), EVERY[layout].settings(optimizer), pairs, reference, objective, size)
    answers = pool.run(EVERY[layout].world_size, engine_steps, case, tmp_path)
    before, after, expected = plain_steps(model, pairs, reference, objective, optimizer)
    for log in answers:
        assert [step["loss"] for step in log] == pytest.approx(expected, rel=1e-4)
    errors = update_errors(before, after, saved(tmp_path))
    assert not {name: f"{error:.1e}" for name, error in errors.items() if not error <= TOLERANCES[ADAM]}
