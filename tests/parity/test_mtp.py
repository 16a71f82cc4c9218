"""Multi-token prediction: both losses and the gradient of their sum, in every kind of layout, against layers of
Transformers in plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from computing import LENGTHS
from layouts import (
    EXPERT_LAYOUTS,
    LAYOUTS,
    MORE_EXPERT_LAYOUTS,
    MORE_LAYOUTS,
    MORE_SEQUENCE_LAYOUTS,
    SEQUENCE_LAYOUTS,
    Layout,
)
from mtp_kit import make_model
from pairs_kit import gradient_errors

from megatune.bridge.assemble import assemble
from megatune.bridge.shard_files import save_gradients
from megatune.config.settings import ModelSettings, Settings
from megatune.engine import groups, step
from megatune.engine.optimizer import main_shards
from megatune.objectives.choose import CrossEntropy
from megatune.verify.measure import shard_samples
from megatune.verify.results import GRADIENT_TOLERANCE, LOSS_TOLERANCE
from megatune.verify.samples import Sample, random_samples

FACTOR = 0.7  # the gradient of either loss shows
_BLOCK = {"recompute_granularity": "full", "recompute_method": "block"}
EVERY = {
    **LAYOUTS, **MORE_LAYOUTS, **SEQUENCE_LAYOUTS, **MORE_SEQUENCE_LAYOUTS, **EXPERT_LAYOUTS, **MORE_EXPERT_LAYOUTS,
    "pp2, no layer in the last stage": Layout(
        2, {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et*4|L"}
    ),
    "recompute block": Layout(1, recompute=_BLOCK),
    "recompute 2 of block": Layout(1, recompute=_BLOCK | {"recompute_num_layers": 2, "moe_layer_recompute": True}),
}  # fmt: skip


def compute(model: Path, settings: Settings, samples: list[Sample], folder: Path) -> tuple[float, dict[str, float]]:
    """On every rank: loss and metrics; gradients are written."""
    assembly = assemble(model, settings)
    batches = shard_samples(
        samples, assembly.coords, settings.parallel, micro_batch_size=1, packed=settings.packing, vision=None
    )
    totals = step.forward_backward(assembly.model, batches, CrossEntropy())
    shards = main_shards(assembly.optimizer)
    save_gradients(folder, assembly.parameters, shards, assembly.architecture, assembly.coords)
    groups.barrier()
    return totals.loss, totals.metrics


CASES = [
    *(f"glm4_moe {name}" for name in ("1", "tp2 sp", "pp2 vpp2", "ep2 etp1 tp2 sp", "ep2 pp2", "cp2 ep2, packed")),
    *(f"glm4_moe {name}" for name in ("recompute block", "recompute 2 of block", "cp2, packed, recompute full")),
    "glm4_moe plain cross-entropy, tp2 sp",
    "glm4_moe pp2, no layer in the last stage",
    "glm4_moe ep2 pp2 vpp2 dp4, overlaps, fusions, recompute full",
    *(f"deepseek_v3 {name}" for name in ("1", "ep2 etp1 tp2 sp", "pp2, packed", "cp2 pp2")),
    *(f"glm4_moe_lite {name}" for name in ("ep2 pp2", "tp2 sp, packed")),
    *(f"qwen3_next {name}" for name in ("1", "tp2 sp", "ep2 pp2", "cp2 tp2 sp", "ep2, packed", "cp2, packed")),
    *(f"qwen3_5_text {name}" for name in ("tp2 pp2 dp2 sp", "packed", "dp2, grad overlap")),
    *(f"qwen3_5_text, tied {name}" for name in ("tp2", "pp2", "tp2 pp2 vpp2")),
]


@pytest.mark.covering
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_agree(pool: Any, tmp_path: Path, case: str) -> None:
    family, _, name = case.replace(", tied ", " ").partition(" ")
    layout = EVERY[name]
    made = make_model(family, tmp_path / "model", tied=", tied " in case)
    first, *others = random_samples(301, LENGTHS)
    # Of these every token is trained, the first ones too: those of the document before in a row must not predict them.
    samples = [first, *(replace(each, labels=each.input_ids) for each in others)]
    loss, mtp_loss, expected = made.compute(samples, FACTOR)
    (folder := tmp_path / "gradients").mkdir()
    settings = layout.settings().model_copy(
        update={"model": ModelSettings(mtp_num_layers=1, mtp_loss_scaling_factor=FACTOR)}
    )
    found = pool.run(layout.world_size, compute, tmp_path / "model", settings, samples, folder)
    for own, metrics in found:
        assert own == pytest.approx(loss, rel=LOSS_TOLERANCE)
        assert metrics["mtp_loss"] == pytest.approx(mtp_loss, rel=LOSS_TOLERANCE)
    errors = gradient_errors(folder, expected)
    assert not {name: f"{error:.1e}" for name, error in errors.items() if not error <= GRADIENT_TOLERANCE}
