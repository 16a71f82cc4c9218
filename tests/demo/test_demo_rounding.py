"""Random models with gated delta nets round so little in fp32 that a comparison with Transformers shows mistakes."""

from __future__ import annotations

import torch

from megatune.demo.checkpoint import make_checkpoint
from megatune.verify.reference import compute_reference, load_reference_model
from megatune.verify.results import GRADIENT_TOLERANCE
from megatune.verify.samples import random_samples


def test_fp32_is_as_good_as_the_tolerance(tmp_path):
    model = make_checkpoint("qwen3_5_text", tmp_path / "model")
    samples = random_samples(500, [64])
    found, expected = (
        compute_reference(load_reference_model(model, dtype), samples).gradients
        for dtype in (torch.float32, torch.float64)
    )
    gaps = {name: (found[name].double() - each).norm() / each.norm() for name, each in expected.items()}
    assert {name: gap for name, gap in gaps.items() if gap > GRADIENT_TOLERANCE} == {}
