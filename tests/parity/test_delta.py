"""Gated delta nets and gated attention: logits, loss and gradients against Transformers, in every kind of layout."""

from __future__ import annotations

import pytest
from computing import LENGTHS, differences, failures, parameter_names
from layouts import EXPERT_LAYOUTS, LAYOUTS, MORE_LAYOUTS, SEQUENCE_LAYOUTS, Layout

from megatune.verify.samples import random_samples

# One key head and two value heads on each rank, which has parts of several documents before its heads are gathered.
TP4 = {"tensor_model_parallel_size": 4, "sequence_parallel": True}
ALL = {
    **LAYOUTS,
    **MORE_LAYOUTS,
    **SEQUENCE_LAYOUTS,
    **EXPERT_LAYOUTS,
    "tp4 sp, packed": Layout(4, TP4, packed=True),
}
_MIXED = (
    "1", "tp2 sp", "pp2", "pp2 vpp2", "dp2", "packed", "tp2 sp, packed", "cp2, packed", "cp2 tp2 sp", "tp4 sp, packed",
)  # fmt: skip
_SPARSE = ("1", "ep2 etp1 tp2 sp", "ep2 pp2", "ep2, packed", "cp2 ep2, packed")
CASES = [*_MIXED, *(layout for layout in _SPARSE if layout not in _MIXED)]


@pytest.mark.covering
@pytest.mark.parametrize("layout", CASES)
def test_family_agrees(pool, model_dir, reference, table, tmp_path, layout):
    model = model_dir("qwen3_next")
    samples = random_samples(301, LENGTHS)
    found = differences(pool, model, ALL[layout], samples, reference(model, samples), tmp_path)
    # As many gradients as the checkpoint has trained tensors: none is left out.
    assert len(found) - 3 == len(parameter_names(model))
    assert not failures(found)
    table.add("qwen3_next, untied", layout, found)
