"""Runs whose steps are spoiled: in the pool, before gradients are summed, or by a loss that jumps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import train

from megatune.config.settings import Settings
from megatune.engine import optimizer
from megatune.training import loop


class Louder:
    """A loss that is so many times what it is."""

    def __init__(self, objective: Any, factor: float) -> None:
        self._objective, self._factor = objective, factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)

    def __call__(self, *args: Any) -> Any:
        found = self._objective(*args)
        return dataclasses.replace(found, loss=found.loss * self._factor)


def train_spoiled(
    settings: Settings,
    folder: Path,
    gradients: Mapping[int, float] | None = None,
    losses: Mapping[int, float] | None = None,
    left_out: Iterable[int] = (),
    rank: int = 1,
    crash_at: int | None = None,
) -> int:
    """One rank's run.

    Args:
        gradients: step, from 1 -> what a gradient of one rank is multiplied with.
        losses: step -> what the loss is multiplied with.
        left_out: steps of which the optimizer is never asked for an update.
        rank: whose gradient it is.
    """
    step_of_the_loop, step_of_the_optimizer = loop.train_step, optimizer.step
    place = {"step": 0}

    def train_step(assembly: Any, batches: Any, objective: Any, **options: Any) -> Any:
        step = place["step"] = options["check"].__self__.state.step + 1
        objective = Louder(objective, losses[step]) if step in (losses or {}) else objective
        factor = (gradients or {}).get(step, 1.0)
        # Some large ones' gradients are added up where no hook sees them.
        trained = [each.parameter for each in assembly.parameters if each.parameter.requires_grad]
        parameter = min(trained, key=torch.Tensor.numel)
        hooks = []
        if factor != 1 and torch.distributed.get_rank() == rank % torch.distributed.get_world_size():
            hooks = [parameter.register_hook(lambda grad: grad * factor)]
        try:
            return step_of_the_loop(assembly, batches, objective, **options)
        finally:
            for hook in hooks:
                hook.remove()

    def update(chained: Any, *args: Any, **kwargs: Any) -> tuple[bool, float]:
        if place["step"] in left_out:
            chained.zero_grad()
            return True, 1.0
        return step_of_the_optimizer(chained, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", train_step)
        patch.setattr(optimizer, "step", update)
        return train(settings, folder, crash_at)
