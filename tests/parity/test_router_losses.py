"""Auxiliary losses of routers in preference stages: the gradients of the sum of both losses, by autograd.

The weight of a micro-batch's auxiliary losses is its share of the pairs or answers of the step, as it is of the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs_kit import (
    PACKED_ROWS,
    Case,
    SamplePair,
    answer_log_probs,
    compute,
    documents_of,
    gradient_errors,
    gradients_of,
    log_probs,
    near,
    random_pairs,
)
from test_preference import EVERY, GRADIENT
from test_rewards import load
from torch import Tensor
from torch.nn.functional import linear, logsigmoid
from transformers import AutoModelForSequenceClassification

from megatune.config.groups.run import RunSettings
from megatune.objectives.kto import KTO, value_losses
from megatune.objectives.pair_losses import PairLossOptions
from megatune.objectives.preference import Preference, Reward
from megatune.verify.reference import load_reference_model

BALANCE, Z = 3.0, 0.3
OBJECTIVES = {
    "dpo": Preference({"sigmoid": 1.0}, PairLossOptions(beta=0.3)),
    "kto": KTO("apo_zero_unpaired", 0.3, 1.3, 0.8),
    "rm": Reward(),
}
CASES = [
    *((stage, layout, size) for stage in OBJECTIVES for layout, size in (("1", 2), ("ep2 pp2", 1))),
    *(("dpo", layout, 1) for layout in ("tp2 sp", "cp2 ep2, packed")),
]


@contextmanager
def recorded(model: Any) -> Iterator[dict[int, list[Tensor]]]:
    """Record the logits of each layer's router, [tokens, experts] for each forward pass, with gradient."""
    layers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    found: dict[int, list[Tensor]] = {number: [] for number in range(len(layers))}

    def hook(number: int) -> Any:
        def record(gate: Any, inputs: Any, _: Any) -> None:
            found[number].append(linear(inputs[0].reshape(-1, gate.weight.shape[1]), gate.weight))

        return record

    handles = [module.register_forward_hook(hook(number)) for number, module in enumerate(layers)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def router_losses(logits: Tensor, topk: int) -> Tensor:
    """Both losses of one layer and micro-batch, as their papers write them."""
    probs = logits.softmax(-1)
    chosen = torch.zeros_like(probs).scatter(1, probs.topk(topk).indices, 1.0)
    balance = logits.shape[1] / topk * (chosen.mean(0) * probs.mean(0)).sum()
    return BALANCE * balance + Z * logits.logsumexp(-1).square().mean()


def loss_of(stage: str, model: Any, pairs: Sequence[SamplePair], reference: Sequence[float]) -> Tensor:
    """The stage's own loss of all pairs, or of all answers."""
    objective = OBJECTIVES[stage]
    if isinstance(objective, Reward):
        scores = [model(input_ids=torch.tensor([each.input_ids])).logits[0, 0] for each in documents_of(pairs)]
        chosen, rejected = torch.stack(scores).view(-1, 2).unbind(1)
        return -logsigmoid(chosen - rejected).mean()
    sums = torch.stack([answer_log_probs(model, each).sum() for each in documents_of(pairs)])
    ratios = sums - torch.tensor(reference)
    if isinstance(objective, KTO):
        desirable = torch.arange(len(ratios)) % 2 == 0
        weights = torch.where(desirable, objective.chosen_weight, objective.rejected_weight)
        return (weights * value_losses(ratios, desirable, objective.beta, 0.0)).mean()
    chosen, rejected = ratios.view(-1, 2).unbind(1)
    return -logsigmoid(objective.options.beta * (chosen - rejected)).mean()


def expect(
    stage: str, model: Any, pairs: Sequence[SamplePair], reference: Sequence[float], batches: Sequence[Sequence[int]]
) -> dict[str, Tensor]:
    """Differentiate the loss of all pairs, and each micro-batch's router losses by its share of the pairs."""
    model.zero_grad()
    with recorded(model) as found:
        loss = loss_of(stage, model, pairs, reference)
    for logits in found.values():
        for numbers in batches:
            tokens = torch.cat([logits[2 * number + side] for number in numbers for side in (0, 1)])
            loss = loss + len(numbers) / len(pairs) * router_losses(tokens, model.config.num_experts_per_tok)
    loss.backward()
    return gradients_of(model, None)


@pytest.mark.covering
@pytest.mark.parametrize(("stage", "layout", "size"), CASES)
def test_gradients_are_those_of_both_losses(
    pool: Any, model_dir: Any, tmp_path: Path, stage: str, layout: str, size: int
) -> None:
    folder, pairs, settings = model_dir("qwen3_moe"), random_pairs(301), EVERY[layout].settings()
    if stage == "rm":
        torch.manual_seed(3)
        scored = AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=1, pad_token_id=0, dtype=torch.float32
        )
        scored.save_pretrained(folder := tmp_path / "model")
    model = load(folder) if stage == "rm" else load_reference_model(folder, torch.float32)
    reference = [0.0] * 2 * len(pairs) if stage == "rm" else near(log_probs(model, pairs))
    rows = PACKED_ROWS if settings.packing else [(number,) for number in range(len(pairs))]
    batches = [[number for row in rows[first : first + size] for number in row] for first in range(0, len(rows), size)]
    expected = expect(stage, model, pairs, reference, batches)
    losses = {"moe_aux_loss_coeff": BALANCE, "moe_z_loss_coeff": Z}
    changes = {
        "experts": settings.experts.model_copy(update=losses),
        "run": RunSettings(stage=stage, ddp_timeout=30),  # type: ignore[arg-type]
    }
    case = Case(folder, settings.model_copy(update=changes), pairs, reference, OBJECTIVES[stage], size)
    (gradients := tmp_path / "gradients").mkdir()
    pool.run(EVERY[layout].world_size, compute, case, gradients)
    errors = gradient_errors(gradients, expected)
    assert not {name: f"{error:.1e}" for name, error in errors.items() if not error <= GRADIENT}
