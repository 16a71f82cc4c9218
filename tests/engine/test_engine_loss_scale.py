"""The loss scale of fp16 is one for all parameters, experts' too."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from layouts import EXPERT_LAYOUTS, MORE_EXPERT_LAYOUTS

from megatune.bridge.assemble import Assembly, assemble, attach_optimizer, load_model
from megatune.config.settings import Settings
from megatune.engine.optimizer import load_scalars, scalars, step
from megatune.verify.measure import measure_loss, shard_samples
from megatune.verify.samples import random_samples

SCALE = 2.0**12


def overflow(model: Path, settings: Settings, part: str) -> tuple[dict[str, float], dict[str, float], list[float]]:
    """On every rank: the scaling before and after a step in which gradients of the last rank's experts, or of the
    rest, overflow, and norms of gradients: of a step without, of the one after, and of one after a resume."""
    norms = []

    def fresh(values: dict[str, float]) -> Assembly:
        made = attach_optimizer(load_model(model, settings, assembly.coords), settings)
        load_scalars(made.optimizer, values)
        return made

    def measure(one: Assembly) -> None:
        measure_loss(one, shard_samples(random_samples(301, (9, 16, 12, 7)), one.coords, settings.parallel))

    assembly = assemble(model, settings)
    start = scalars(assembly.optimizer) | {"loss_scale": SCALE, "hysteresis_tracker": 1, "growth_tracker": 5}
    load_scalars(assembly.optimizer, start)
    measure(assembly)
    # Gradients of all but experts are the same on all ranks here, and so is their overflow.
    if part == "others" or assembly.coords.rank == assembly.coords.world_size - 1:
        chosen = [local for local in assembly.parameters if local.weight.per_expert == (part == "experts")]
        chosen[0].parameter.main_grad.view(-1)[-1] = math.inf
    updated, norm = step(assembly.optimizer, 0.0)
    assert (updated, norm) == (False, math.inf)
    after = scalars(assembly.optimizer)
    for one in (fresh(start), assembly, fresh(after)):
        measure(one)
        updated, norm = step(one.optimizer, 0.0)
        assert updated
        norms.append(norm)
    assert scalars(assembly.optimizer) == scalars(one.optimizer) | {"step": scalars(assembly.optimizer)["step"]}
    return start, after, norms


@pytest.mark.covering
@pytest.mark.parametrize("part", ["experts", "others"])
@pytest.mark.parametrize("layout", ["1", "ep2", "ep2 dp2, no distributed optimizer", "ep2 pp2"])
def test_an_overflow_in_one_part_scales_all(pool, model_dir, layout, part):
    chosen = {**EXPERT_LAYOUTS, **MORE_EXPERT_LAYOUTS}[layout]
    # No experts on the first stage of two.
    model = model_dir("deepseek_v3", first_k_dense_replace=2)
    settings = chosen.settings(precision={"fp16": True})
    found = pool.run(chosen.world_size, overflow, model, settings, part)
    for start, after, norms in found:
        assert after == start | {"loss_scale": SCALE / 2, "growth_tracker": 0, "hysteresis_tracker": 0}
        # A power of two scales fp16 exactly but for what becomes subnormal.
        torch.testing.assert_close(norms, [norms[0]] * 3, rtol=1e-3, atol=0)
    assert all(one == found[0] for one in found)
