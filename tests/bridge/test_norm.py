"""The norm of all weights is that of the checkpoint's tensors, in layouts that copy, cut and pad them in every way."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from bridging import tensors
from layouts import EXPERT_LAYOUTS, LAYOUTS, MORE_EXPERT_LAYOUTS

from megatune.bridge.assemble import assemble
from megatune.bridge.parameters import parameters_norm
from megatune.config.settings import Settings


def norm(model: Path, settings: Settings) -> float:
    assembly = assemble(model, settings)
    for local in assembly.parameters:  # what training may leave in the padding is none of the model
        for rows in (local.parameter.data,) if local.weight.layout.value == "vocabulary" else ():
            rows[~rows.any(dim=1)] = 7.0
    return parameters_norm(assembly.parameters, assembly.architecture, assembly.coords)


@pytest.mark.parametrize(
    ("family", "tied", "layout"),
    [("qwen2", True, "tp2 pp2 dp2 sp"), ("qwen3_moe", False, "ep2 etp1 tp2 sp pp2 dp2")],
)
def test_each_weight_is_counted_once(pool, model_dir, family, tied, layout):
    model = model_dir(family, tied=tied)
    chosen = {**LAYOUTS, **EXPERT_LAYOUTS, **MORE_EXPERT_LAYOUTS}[layout]
    found = pool.run(chosen.world_size, norm, model, chosen.settings())
    expected = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors(model).values()))
    assert found == [pytest.approx(expected, rel=1e-6)] * chosen.world_size
