"""The benchmark of preference training measures the same work on both sides."""

from __future__ import annotations

import pytest


@pytest.mark.extended
def test_both_sides_compute_the_same_losses() -> None:
    from preference import engines, measure, section
    from training.pairs import PairCase
    from training.shapes import TINY_DENSE

    case = PairCase(
        name="lora", shape=TINY_DENSE.with_layers(1), tokens=48, micro_batches=2, document_median=None, bf16=False,
        pairs=2, steps=1,
    )  # fmt: skip
    _, packed, precomputed, _ = engines("lora", 4)
    found = measure(case, [packed, precomputed])
    (ours, _), (theirs, _) = found
    assert ours.steps.keys() == theirs.steps.keys()
    assert ours.loss_gap(theirs) < 1e-5
    assert abs(theirs.steps[2].loss - 0.693147) > 1e-4  # B is random
    assert all(result.outcomes[0].ready.reference_seconds > 0 for result, _ in found)
    assert "losses within" in list(section(case, found))[-1]
