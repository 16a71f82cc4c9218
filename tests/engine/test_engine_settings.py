"""Settings of precision and of experts' bias reach what they are about."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from layouts import EXPERT_LAYOUTS, LAYOUTS

from megatune.bridge.assemble import assemble
from megatune.config.settings import Settings
from megatune.verify.measure import measure_loss, shard_samples
from megatune.verify.samples import Sample, random_samples

# 65 tokens of three choices over eight experts: none gets just its share, so that every bias moves.
SAMPLES = random_samples(301, (17, 5, 30, 13))


def dtypes_and_host_fraction(model: Path, settings: Settings) -> tuple[set[torch.dtype], dict[str, set], float]:
    """On a rank: dtypes of gradients and of Adam's averages, and the share of them kept on the host."""
    assembly = assemble(model, settings)
    averages: dict[str, set] = {"exp_avg": set(), "exp_avg_sq": set()}
    for part in assembly.optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            for name, dtypes in averages.items():
                dtypes.add(state[name].dtype)
    gradients = {local.parameter.main_grad.dtype for local in assembly.parameters}
    return gradients, averages, assembly.optimizer.chained_optimizers[0].optimizer.host_fraction


@pytest.mark.parametrize("layout", ["1", "dp2"])
def test_precision_of_gradients_and_averages(pool, model_dir, layout):
    narrow = {"exp_avg_dtype": "bf16", "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
    precision = {"bf16": True, "accumulate_allreduce_grads_in_fp32": False}
    cases = [
        (LAYOUTS[layout].settings(narrow, precision), torch.bfloat16, torch.bfloat16, 0.5),
        (LAYOUTS[layout].settings({}, {"bf16": True}), torch.float32, torch.float32, 0.0),
    ]
    for settings, gradient, exp_avg, fraction in cases:
        (found, *_) = pool.run(LAYOUTS[layout].world_size, dtypes_and_host_fraction, model_dir("qwen3"), settings)
        assert found == ({gradient}, {"exp_avg": {exp_avg}, "exp_avg_sq": {torch.float32}}, fraction)


def moved_bias(model: Path, settings: Settings, samples: list[Sample]) -> dict[str, torch.Tensor]:
    """On every rank: by how much one step moves the bias of each router that it holds."""
    assembly = assemble(model, settings)
    biases = {
        f"{local.layer}": (local.parameter, local.parameter.clone())
        for local in assembly.parameters
        if local.weight.engine.endswith("expert_bias")
    }
    measure_loss(assembly, shard_samples(samples, assembly.coords, settings.parallel))
    return {layer: bias - before for layer, (bias, before) in biases.items()}


@pytest.mark.covering
@pytest.mark.parametrize("layout", ["ep2", "ep2 etp1 tp2 sp", "ep2 pp2"])
def test_bias_of_experts_moves_towards_those_with_fewer_tokens(pool, model_dir, layout):
    """By the rate, up or down (arXiv:2408.15664), and alike in every layout."""
    model, rate = model_dir("deepseek_v3"), {"moe_router_bias_update_rate": 0.01}

    def moved(name: str, experts: dict[str, float]) -> dict[str, torch.Tensor]:
        settings = EXPERT_LAYOUTS[name].settings()
        changed = settings.experts.model_copy(update=experts)
        ranks = pool.run(
            EXPERT_LAYOUTS[name].world_size,
            moved_bias,
            model,
            settings.model_copy(update={"experts": changed}),
            SAMPLES,
        )
        return {layer: bias for rank in ranks for layer, bias in rank.items()}

    expected = moved("1", rate)
    assert sorted(expected) == ["1", "2", "3"]
    for bias in expected.values():
        torch.testing.assert_close(bias.abs(), torch.full_like(bias, 0.01), rtol=1e-4, atol=1e-6)
        assert {True, False} == set((bias > 0).tolist())
    found = moved(layout, rate)
    assert all(torch.equal(found[layer], bias) for layer, bias in expected.items())
    assert not any(bias.any() for bias in moved(layout, {}).values())
