"""Mixtures of experts: logits, loss and gradients against Transformers, in every layout of experts."""

from __future__ import annotations

import pytest
from computing import LENGTHS, differences, failures, parameter_names
from layouts import EXPERT_LAYOUTS, MORE_EXPERT_LAYOUTS

from megatune.verify.samples import random_samples

FAMILIES = ("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v3")


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_family_agrees_in_every_layout(pool, model_dir, reference, table, tmp_path, family, layout):
    model = model_dir(family)
    samples = random_samples(301, LENGTHS)
    found = differences(pool, model, EXPERT_LAYOUTS[layout], samples, reference(model, samples), tmp_path)
    # As many gradients as the checkpoint has trained tensors: none is left out.
    assert len(found) - 3 == len(parameter_names(model))
    assert not failures(found)
    table.add(f"{family}, untied", layout, found)


@pytest.mark.parametrize("layout", MORE_EXPERT_LAYOUTS)
def test_other_layouts_agree(pool, model_dir, reference, table, tmp_path, layout):
    model = model_dir("qwen3_moe", tied=True)
    samples = random_samples(301, LENGTHS)
    found = differences(pool, model, MORE_EXPERT_LAYOUTS[layout], samples, reference(model, samples), tmp_path)
    assert not failures(found)
    table.add("qwen3_moe, tied", layout, found)
