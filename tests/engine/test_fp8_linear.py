"""Linear layers that multiply in 8-bit floats, inside of a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from layouts import LAYOUTS, Layout
from pool import RankPool
from settings_gradients import measure_gradients, run_with, worst_error

from megatune.config.settings import Settings
from megatune.engine.layers import cross_entropy, fp8


def gradients_of_exact_products(model: Path, settings: Settings) -> Any:
    """On every rank: gradients of a model whose products of 8-bit floats are exact instead."""
    usual = fp8.multiply, fp8.multiply_back
    fp8.multiply = lambda inputs, weight, *, rowwise: inputs @ weight.t()
    fp8.multiply_back = lambda grad, weight, *, rowwise: grad @ weight
    try:
        return measure_gradients(model, settings, cross_entropy.CHUNK_BYTES)
    finally:
        fp8.multiply, fp8.multiply_back = usual


@pytest.mark.covering
@pytest.mark.parametrize("fused", [False, True], ids=["copied", "straight"])
@pytest.mark.parametrize("layout", ["1", "tp2", "tp2 sp", "dp2"])
def test_exchanges_are_those_of_megatron_cores_layers(pool, model_dir, layout, fused):
    model, performance = model_dir("qwen2"), {"gradient_accumulation_fusion": fused}
    chosen = replace(LAYOUTS[layout], performance=performance)
    settings = chosen.settings(precision={"fp8": "rowwise"})
    found = pool.run(chosen.world_size, gradients_of_exact_products, model, settings)
    truth = run_with(pool, model, chosen, performance)
    assert worst_error(found, truth) < 1e-6
    assert [direct for _, _, direct in found] == [direct for _, _, direct in truth]


def with_fp8(pool: RankPool, model: Path, layout: Layout, scaling: str | None) -> Any:
    return pool.run(
        layout.world_size,
        measure_gradients,
        model,
        layout.settings(precision={"bf16": True, "fp8": scaling}),
        cross_entropy.CHUNK_BYTES,
    )


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_a_model_learns_nearly_the_same(pool, model_dir, scaling):
    """The weights of tiny models are drawn wide, so that what each product rounds comes to much in the first layer."""
    model = model_dir("qwen2")
    found, truth = (with_fp8(pool, model, LAYOUTS["tp2 sp"], one) for one in (scaling, None))
    assert 0.05 < worst_error(found, truth) < 0.5
    assert found[0][0] == pytest.approx(truth[0][0], rel=0.01)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_narrow_projections_and_models_with_experts(pool, model_dir, family):
    model = model_dir(family)
    found, truth = (with_fp8(pool, model, LAYOUTS["1"], scaling) for scaling in ("rowwise", None))
    assert worst_error(found, truth) > 0.01
    assert found[0][0] == pytest.approx(truth[0][0], rel=0.01)


def test_recomputed_layers_find_the_same_scales(pool, model_dir):
    model, layout = model_dir("qwen3"), LAYOUTS["tp2 sp"]
    recomputed = replace(layout, recompute={"recompute_granularity": "full"})
    found, truth = (with_fp8(pool, model, one, "tensorwise") for one in (recomputed, layout))
    assert worst_error(found, truth) == 0
