"""Whole sparse models in the engine's step: the norm of the gradient, and auxiliary losses through the schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from layouts import Layout

from megatune.config.groups.parallel import ExpertSettings
from megatune.config.settings import Settings
from megatune.verify.samples import Sample, random_samples

_SIZES = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
_EP, _PP = {"expert_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
_ETP1, _WHOLE = {"expert_tensor_parallel_size": 1}, {"use_distributed_optimizer": False}
LAYOUTS = {
    "ep2 dp4": Layout(4, _EP),
    "ep2, no distributed optimizer": Layout(2, _EP | _WHOLE),
    "tp2 sp": Layout(2, _SP),
    "tp2 sp etp1": Layout(2, _SP | _ETP1),
    "tp2 sp etp1, no distributed optimizer": Layout(2, _SP | _ETP1 | _WHOLE),
    "tp2 sp etp1 ep2 pp2, overlaps": Layout(
        4, _SP | _ETP1 | _EP | _PP | {"overlap_grad_reduce": True, "overlap_param_gather": True}
    ),
}
# Rows differ in length, and micro-batches in trained tokens.
LENGTHS = (17, 5, 30, 12)


def norm_and_losses(
    model: Path, settings: Settings, samples: list[Sample]
) -> tuple[float, dict[str, float], dict[str, float]]:
    """On every rank: the norm of all gradients, the auxiliary losses of a step, and those of an evaluation."""
    from megatune.bridge.assemble import assemble
    from megatune.engine.step import forward_backward
    from megatune.objectives.choose import CrossEntropy
    from megatune.verify.measure import shard_samples

    assembly: Any = assemble(model, settings)
    batches = shard_samples(samples, assembly.coords, settings.parallel)
    losses = forward_backward(assembly.model, batches, CrossEntropy()).metrics
    assembly.optimizer.prepare_grads()
    norm = float(assembly.optimizer.get_grad_norm())
    later = forward_backward(assembly.model, batches, CrossEntropy(), forward_only=True).metrics
    return norm, losses, later


@pytest.mark.covering
@pytest.mark.parametrize("coeff", [0.0, 2.0], ids=["", "aux_loss"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_have_one_norm_in_every_layout(pool, model_dir, layout, coeff):
    """Every element counts once, of experts and of the rest; so does every auxiliary loss."""
    model, samples = model_dir("qwen3_moe", **_SIZES), random_samples(301, LENGTHS)
    experts = ExpertSettings(moe_aux_loss_coeff=coeff, moe_z_loss_coeff=coeff / 10)

    def run(layout: Layout) -> list[tuple[float, dict[str, float], dict[str, float]]]:
        settings = layout.settings().model_copy(update={"experts": experts})
        return pool.run(layout.world_size, norm_and_losses, model, settings, samples)

    ((expected_norm, expected_losses, _),) = run(Layout(1))
    assert set(expected_losses) == {"expert_load", *(("load_balancing_loss", "z_loss") if coeff else ())}
    for norm, losses, later in run(LAYOUTS[layout]):
        assert norm == pytest.approx(expected_norm, rel=1e-6)
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        assert later == {}
