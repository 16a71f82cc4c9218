"""Gradients over consecutive steps, and the settings that reach the optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from layouts import LAYOUTS, MORE_LAYOUTS, Layout

from megatune.bridge.assemble import assemble
from megatune.config.settings import Settings
from megatune.engine import optimizer as engine_optimizer
from megatune.engine import step
from megatune.objectives.choose import CrossEntropy
from megatune.verify.measure import shard_samples
from megatune.verify.samples import random_samples


def repeat_steps(model: Path, settings: Settings) -> tuple[bool, bool, bool]:
    """On every rank: whether gradients repeat bit for bit after another backward pass, after a step of learning rate 0,
    and whether an evaluation leaves them alone."""
    assembly = assemble(model, settings)
    batches = shard_samples(random_samples(301, [9, 16, 12, 7]), assembly.coords, settings.parallel)

    def gradients() -> list[torch.Tensor]:
        return [local.parameter.main_grad.clone() for local in assembly.parameters]

    def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

    first = step.forward_backward(assembly.model, batches, CrossEntropy())
    before = gradients()
    evaluated = step.forward_backward(assembly.model, batches, CrossEntropy(), forward_only=True)
    untouched = same(gradients(), before) and first.loss_sum == evaluated.loss_sum
    step.forward_backward(assembly.model, batches, CrossEntropy())
    again = same(gradients(), before)
    assert engine_optimizer.step(assembly.optimizer, 0.0)[0]
    step.forward_backward(assembly.model, batches, CrossEntropy())
    return again, same(gradients(), before), untouched


@pytest.mark.extended("tp2 pp2 dp2 sp, overlaps, fusions")  # three steps with overlaps are in test_one_step.py
@pytest.mark.parametrize("layout", ["1", "dp2", "tp2 pp2 vpp2", "tp2 pp2 dp2 sp, overlaps, fusions"])
def test_gradients_start_from_zero_at_every_step(pool, model_dir, layout):
    chosen = {**LAYOUTS, **MORE_LAYOUTS}[layout]
    answers = pool.run(chosen.world_size, repeat_steps, model_dir("qwen2"), chosen.settings())
    assert answers == [(True, True, True)] * chosen.world_size


def weight_decays(model: Path, settings: Settings) -> dict[int, set[float]]:
    """On every rank: the decay of parameters by their number of dimensions."""
    assembly = assemble(model, settings)
    found: dict[int, set[float]] = {}
    for group in assembly.optimizer.param_groups:
        for param in group["params"]:
            found.setdefault(param.dim(), set()).add(group["weight_decay"])
    return found


def test_norms_and_biases_do_not_decay(pool, model_dir):
    """Megatron-Core leaves that to Megatron-LM's scheduler, which is not used."""
    # The distributed optimizer's parameters are flat.
    settings = Layout(1, {"use_distributed_optimizer": False}).settings(optimizer={"weight_decay": 0.1})
    assert pool.run(1, weight_decays, model_dir("qwen2"), settings) == [{1: {0.0}, 2: {0.1}}]


def refused_step(model: Path, settings: Settings) -> tuple[bool, bool, bool]:
    """On every rank: whether a step with a NaN gradient updated, whether weights moved, and if the next one does."""
    assembly = assemble(model, settings)
    batches = shard_samples(random_samples(301, [9, 16, 12, 7]), assembly.coords, settings.parallel)
    before = [local.parameter.detach().clone() for local in assembly.parameters]
    step.forward_backward(assembly.model, batches, CrossEntropy())
    if assembly.coords.rank == 0:
        assembly.parameters[0].parameter.main_grad[0] = torch.nan
    updated, _ = engine_optimizer.step(assembly.optimizer, 1e-3)
    moved = any(not torch.equal(a, b.parameter) for a, b in zip(before, assembly.parameters, strict=True))
    step.forward_backward(assembly.model, batches, CrossEntropy())
    return updated, moved, engine_optimizer.step(assembly.optimizer, 1e-3)[0]


@pytest.mark.parametrize("layout", ["1", "tp2 pp2 vpp2"])
def test_gradients_that_are_not_finite_change_nothing_on_any_rank(pool, model_dir, layout):
    chosen = LAYOUTS[layout]
    answers = pool.run(chosen.world_size, refused_step, model_dir("qwen3"), chosen.settings())
    assert answers == [(False, False, True)] * chosen.world_size
