"""The benchmark of LoRA measures the same work on both sides, and all of its memory."""

from __future__ import annotations

import pytest


@pytest.mark.extended
def test_both_sides_compute_the_same_losses_and_adapters_keep_less() -> None:
    from lora import engines, measure, section
    from training.case import Case
    from training.shapes import TINY_DENSE

    from megatune.plan.flops import num_parameters

    shape = TINY_DENSE.with_layers(1)
    case = Case(name="dense", shape=shape, tokens=64, micro_batches=2, document_median=16, bf16=False)
    found = measure(case, engines(case, 4), steps=2)
    (full, of_full), (lora, of_lora), (theirs, of_theirs) = found
    assert [len(result.steps) for result in (full, lora, theirs)] == [2, 2, 2]
    assert lora.loss_gap(theirs) < 1e-6 < lora.loss_gap(full)  # B is random
    assert of_lora[0] < of_full[0] / 2
    weights = 4 * num_parameters(shape.architecture())  # bytes of the model alone, on each side
    assert min(of_lora[0], of_theirs[0]) > weights
    assert of_full[0] > 4 * weights * 0.99
    assert all(peak > kept for kept, peak in (of_full, of_lora, of_theirs))
    assert "losses within" in list(section(case, found))[-1]
