"""Errors of one computation against another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatune.verify.results import Results, compare, write_gradients, write_logits, write_loss


def numbers(folder: Path, first: float, second: float) -> Results:
    """Gradients of two experts, [4] each, and of their router."""
    folder.mkdir()
    write_loss(folder, 1.0)
    write_logits(folder, [torch.ones(2, 3)])
    gradients = {"model.layers.1.mlp.experts.0.up_proj.weight": torch.full((4,), first)}
    gradients["model.layers.1.mlp.experts.11.up_proj.weight"] = torch.full((4,), second)
    gradients["model.layers.1.mlp.gate.weight"] = torch.ones(2)
    write_gradients(folder, gradients)
    return Results(folder)


def test_experts_of_a_layer_are_taken_together(tmp_path):
    computed, truth = numbers(tmp_path / "computed", 3.0, 5.0), numbers(tmp_path / "truth", 3.0, 4.0)
    apart = compare(computed, truth)
    assert list(apart.gradients.values()) == pytest.approx([0.0, 0.25, 0.0])
    together = compare(computed, truth, experts_together=True)
    # The second one's error, 1, as a share of both: 3 and 4 make up 5.
    assert together.gradients == pytest.approx(
        {"model.layers.1.mlp.experts.*.up_proj.weight": 0.2, "model.layers.1.mlp.gate.weight": 0.0}
    )
    assert together.gradient == pytest.approx(apart.gradient)
