"""KTO of answers to questions with pictures against Transformers with autograd: z, loss and gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import LAYOUTS
from pairs_kit import (
    Case,
    answer_log_probs,
    documents_of,
    gradient_errors,
    gradients_of,
    log_probs,
    near,
    random_pairs,
    shard_pairs,
)
from test_vision import NUM_LAYERS, SQUARE, WIDE

from megatune.bridge.assemble import assemble
from megatune.bridge.shard_files import save_gradients
from megatune.data.batches import Batch, DocumentValues
from megatune.data.rows import DESIRABLE
from megatune.engine import groups, step
from megatune.engine.optimizer import main_shards
from megatune.families import load_architecture
from megatune.objectives.kto import KTO
from megatune.verify.reference import load_reference_model

OBJECTIVE = KTO("kto", 0.3, 1.3, 0.8)
# A reference apart from the model: z is above 0.
APART = 1.5


def with_tags(batch: Batch) -> Batch:
    """The first of two answers to a question is desirable."""
    tags = torch.arange(len(batch.lengths)) % 2 == 0
    return replace(batch, extras={**batch.extras, DESIRABLE: DocumentValues(tags)})


def compute(case: Case, objective: KTO, folder: Path) -> tuple[float, float]:
    """On every rank: z, here of the answers themselves, and the loss; gradients are written."""
    assembly = assemble(case.model, case.settings)
    batches = [with_tags(batch) for batch in shard_pairs(case, assembly)]
    objective.before_step(assembly.model, [batches])
    totals = step.forward_backward(assembly.model, batches, objective)
    shards = main_shards(assembly.optimizer)
    save_gradients(folder, assembly.parameters, shards, assembly.architecture, assembly.coords)
    groups.barrier()
    return objective.kl, totals.loss


@pytest.mark.parametrize("family", ["mistral3"])
def test_answers_with_pictures_agree(pool: Any, model_dir: Any, tmp_path: Path, family: str) -> None:
    model, layout = model_dir(family, num_hidden_layers=NUM_LAYERS), LAYOUTS["tp2 sp"]
    vision = load_architecture(model).vision
    pairs = random_pairs(301, media=[[WIDE], [], [SQUARE, WIDE]], vision=vision)
    loaded = load_reference_model(model, torch.float32)
    reference = near([value - APART for value in log_probs(loaded, pairs)])

    loaded.zero_grad()
    sums = torch.stack([answer_log_probs(loaded, each).double().sum().float() for each in documents_of(pairs)])
    ratios = sums - torch.tensor(reference)
    z = ratios.mean().item()
    assert z > 0.1
    margins = OBJECTIVE.beta * (ratios - z).view(-1, 2)
    losses = OBJECTIVE.chosen_weight * (1 - margins[:, 0].sigmoid())
    losses = losses + OBJECTIVE.rejected_weight * (1 - (-margins[:, 1]).sigmoid())
    loss = losses.sum() / len(ratios)
    loss.backward()
    gradients = gradients_of(loaded, None)
    assert any("vision_tower" in name for name in gradients)

    case = Case(model, layout.settings(), pairs, reference, OBJECTIVE, 2)
    for found in pool.run(layout.world_size, compute, case, OBJECTIVE, tmp_path):
        assert found == pytest.approx((z, loss.item()), rel=1e-5)
    errors = gradient_errors(tmp_path, gradients)
    assert not {name: f"{error:.1e}" for name, error in errors.items() if not error <= 1e-5}
