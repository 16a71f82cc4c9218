"""What several tests of the engine compare: gradients of a tiny model under different settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from layouts import Layout
from pool import RankPool

from megatune.bridge.assemble import assemble
from megatune.config.settings import Settings
from megatune.engine.layers import cross_entropy
from megatune.verify.measure import measure_loss, shard_samples
from megatune.verify.samples import random_samples

LENGTHS = (17, 5, 30, 12)


def measure_gradients(model: Path, settings: Settings, chunk_bytes: int) -> tuple[float, dict[str, torch.Tensor], int]:
    """On every rank: the loss, its gradients by the parameters' names, and how many weights say that their gradient was
    added to main_grad directly."""
    cross_entropy.CHUNK_BYTES, usual = chunk_bytes, cross_entropy.CHUNK_BYTES
    try:
        assembly = assemble(model, settings)
        loss = measure_loss(assembly, shard_samples(random_samples(301, LENGTHS), assembly.coords, settings.parallel))
    finally:
        cross_entropy.CHUNK_BYTES = usual
    named = {
        f"{index}.{name}": parameter
        for index, chunk in enumerate(assembly.model)
        for name, parameter in chunk.module.named_parameters()
    }
    direct = sum(parameter.grad_added_to_main_grad for parameter in named.values())
    return loss, {name: parameter.main_grad.clone() for name, parameter in named.items()}, direct


def run_with(
    pool: RankPool,
    model: Path,
    layout: Layout,
    performance: dict[str, Any],
    *,
    precision: dict[str, bool] | None = None,
    chunk_bytes: int = cross_entropy.CHUNK_BYTES,
) -> list[tuple[float, dict[str, torch.Tensor], int]]:
    """`measure_gradients` of every rank with settings of `performance`."""
    settings = replace(layout, performance=performance).settings(precision=precision)
    return pool.run(layout.world_size, measure_gradients, model, settings, chunk_bytes)


def worst_error(found: list[tuple[float, dict[str, torch.Tensor], int]], expected: list[Any]) -> float:
    """Largest relative L2 error of a gradient, over parameters and ranks."""
    worst = 0.0
    for (_, mine, _), (_, truth, _) in zip(found, expected, strict=True):
        assert mine.keys() == truth.keys()
        for name, gradient in mine.items():
            error = (gradient - truth[name]).norm() / truth[name].norm().clamp(min=1e-30)
            worst = max(worst, error.item())
    return worst
