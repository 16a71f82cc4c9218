"""Mixtures of experts: logits, loss and gradients against Transformers, every family and every layout."""

from __future__ import annotations

import pytest
from computing import LENGTHS, differences, failures, parameter_names
from layouts import (
    EXPERT_LAYOUTS,
    FAMILY_EXPERT_LAYOUTS,
    LAYOUTS,
    MORE_EXPERT_LAYOUTS,
    MORE_LAYOUTS,
    MORE_SEQUENCE_LAYOUTS,
)

from megatune.verify.samples import random_samples

CASES = [
    # It has all that the others have: latent attention, shared experts, groups, a bias of the router.
    *(("deepseek_v3", layout) for layout in EXPERT_LAYOUTS),
    *((family, layout) for family in ("qwen2_moe", "qwen3_moe", "mixtral") for layout in FAMILY_EXPERT_LAYOUTS),
]


@pytest.mark.covering
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_family_agrees(pool, model_dir, reference, table, tmp_path, family, layout):
    model = model_dir(family)
    samples = random_samples(301, LENGTHS)
    found = differences(pool, model, EXPERT_LAYOUTS[layout], samples, reference(model, samples), tmp_path)
    # As many gradients as the checkpoint has trained tensors: none is left out.
    assert len(found) - 3 == len(parameter_names(model))
    assert not failures(found)
    table.add(f"{family}, untied", layout, found)


# ep 2 has the same dispatcher above; gpt_oss has ep 2 with etp 2 in tests/parity/test_family_parity.py.
@pytest.mark.extended("ep4 allgather", "ep2 etp2 tp2 sp")
@pytest.mark.covering
@pytest.mark.parametrize("layout", MORE_EXPERT_LAYOUTS)
def test_other_layouts_agree(pool, model_dir, reference, table, tmp_path, layout):
    model = model_dir("qwen3_moe", tied=True)
    samples = random_samples(301, LENGTHS)
    found = differences(pool, model, MORE_EXPERT_LAYOUTS[layout], samples, reference(model, samples), tmp_path)
    assert not failures(found)
    table.add("qwen3_moe, tied", layout, found)


# Layouts that know nothing of experts, and were proved with a dense family.
OTHERS = {
    name: layout
    for name, layout in {**LAYOUTS, **MORE_LAYOUTS, **MORE_SEQUENCE_LAYOUTS}.items()
    if layout.takes_experts and name not in EXPERT_LAYOUTS
}


# tests/parity/test_sequences.py and test_parity.py have them all; of what they exchange or overlap the layouts above
# have each kind beside experts.
@pytest.mark.extended(
    "cp4 p2p", "cp4 all_gather", "cp4 a2a", "cp4, packed", "cp2 all_gather, packed", "cp2 a2a, packed", "dp4", "pp4",
    "plain cross-entropy, tp2 sp", "pp2 vpp2, no p2p overlap", "tp2 pp2 vpp2 dp2 sp, overlaps, fusions",
    "tp2 pp2 dp2 sp, overlaps, fusions", "cp2 pp2 vpp2 tp2 sp", "cp2 pp2 vpp2 tp2 sp, packed",
)  # fmt: skip
@pytest.mark.covering
@pytest.mark.parametrize("layout", OTHERS)
def test_layouts_of_dense_models_agree(pool, model_dir, reference, table, tmp_path, layout):
    model = model_dir("mixtral")
    samples = random_samples(301, LENGTHS)
    found = differences(pool, model, OTHERS[layout], samples, reference(model, samples), tmp_path)
    assert not failures(found)
    table.add("mixtral, untied", layout, found)
