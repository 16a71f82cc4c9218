"""Rotary embeddings stretched by YaRN, where checkpoints of grouped-query attention ask for it."""

from __future__ import annotations

import pytest
from computing import LENGTHS, differences, failures
from layouts import LAYOUTS, Layout

from megatune.verify.samples import random_samples

# Shorter than the rows of the test. The factor of cosine and sine is left to be derived.
ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
FUSED = Layout(1, performance={"apply_rope_fusion": True})


@pytest.mark.covering
@pytest.mark.parametrize("layout", [LAYOUTS["tp2 sp"], FUSED], ids=["tp2 sp", "fused"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mixtral"])
def test_yarn_agrees(pool, model_dir, reference, tmp_path, family, layout):
    # As Qwen's README says, config.json keeps the unscaled max_position_embeddings.
    model = model_dir(family, rope_parameters=ROPE, max_position_embeddings=16)
    samples = random_samples(301, LENGTHS)
    found = differences(pool, model, layout, samples, reference(model, samples), tmp_path)
    assert not failures(found)
