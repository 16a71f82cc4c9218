"""T40: a data-parallel rank whose rows have no labels; the loss is over those of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from layouts import LAYOUTS
from model_sizes import MakeModel
from pool import RankPool

from megatune.bridge.assemble import assemble
from megatune.config.settings import Settings
from megatune.engine.optimizer import step
from megatune.verify.measure import measure_loss, shard_samples
from megatune.verify.samples import random_samples


def loss_and_norm(model: Path, settings: Settings) -> tuple[float, float]:
    """On every rank: the loss of four rows, of which those of rank 1 train nothing, and the norm of all gradients."""
    assembly = assemble(model, settings)
    samples = random_samples(301, [9, 16, 12, 7])
    samples = [
        replace(each, labels=(-100,) * len(each.labels)) if number % 2 else each for number, each in enumerate(samples)
    ]
    loss = measure_loss(assembly, shard_samples(samples, assembly.coords, settings.parallel))
    return loss, step(assembly.optimizer, 0.0)[1]


@pytest.mark.extended
def test_a_rank_without_labels(pool: RankPool, model_dir: MakeModel, told: Callable[..., None]) -> None:
    model = model_dir("qwen3")
    ((loss, norm),) = pool.run(1, loss_and_norm, model, LAYOUTS["1"].settings())
    for found_loss, found_norm in pool.run(2, loss_and_norm, model, LAYOUTS["dp2"].settings()):
        assert math.isclose(found_loss, loss, rel_tol=1e-6)
        assert math.isclose(found_norm, norm, rel_tol=1e-5)
    got = f"the mean over the tokens of all ranks, as one process computes it: {loss:.6f}"
    told(case="T40", fault="every row of one of two replicas trains nothing", got=got)
