"""megatune's side of a step: the engine as the training loop calls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatune.bridge.parameters import local_parameters
from megatune.config.load import load
from megatune.data.batches import Batch
from megatune.engine import device, groups, optimizer
from megatune.engine.layers.attention.choice import describe
from megatune.engine.model import Chunk, build_model
from megatune.engine.step import Objective, forward_backward
from megatune.errors import ExitCode, MegatuneError
from megatune.launch.world import LOOPBACK, find_free_port
from megatune.objectives.choose import CrossEntropy
from training.case import LEARNING_RATE, Case
from training.timeline import Timeline
from training.weights import RandomCheckpoint

_TIMEOUT = 120.0  # seconds that a single rank may take to meet itself


class Megatune:
    """One rank.

    Args:
        options: settings, by the keys of a YAML file; rows are packed unless they say otherwise.
        objective: cross-entropy unless another one is named.
    """

    def __init__(
        self, case: Case, options: Mapping[str, Any], timeline: Timeline, objective: Objective | None = None
    ) -> None:
        self._case, self._timeline, self._objective = case, timeline, objective or CrossEntropy()
        keys = {"packing": True, **options, "bf16": case.bf16, "learning_rate": LEARNING_RATE, "max_grad_norm": 1.0}
        keys |= {"recompute_granularity": "full"} if case.recompute else {}
        keys |= {"freeze_vision_tower": False, "freeze_multi_modal_projector": False} if case.images else {}
        loaded = load(overrides=[f"{key}={str(value).lower()}" for key, value in keys.items()])
        if loaded.findings:
            raise MegatuneError(loaded.findings, ExitCode.SETTINGS)
        self._settings = loaded.settings

    def build(self) -> None:
        """Model, weights and optimizer."""
        groups.join(0, 1, 0, LOOPBACK, find_free_port(), timeout=_TIMEOUT)
        coords = groups.build(self._settings.parallel, seed=0, timeout=_TIMEOUT)
        architecture = self._case.shape.architecture()
        self._model = build_model(architecture, self._settings)
        parameters = local_parameters(self._model, architecture, coords)
        shapes = {name: shape for local in parameters for name, shape in local.hf_shapes(architecture).items()}
        checkpoint = RandomCheckpoint(shapes, device.current())
        with torch.no_grad():
            for local in parameters:
                checkpoint.fill(local.parameter.data.view(-1), local.rows(architecture))
        self._optimizer = optimizer.build_optimizer(
            self._model, architecture, self._settings.optimizer, self._settings.parallel, self._settings.precision
        )
        self._time_phases()

    def _time_phases(self) -> None:
        """Mark where Megatron-Core's schedule goes from one phase to the next."""
        model, timeline = self._model[0], self._timeline
        model.register_forward_pre_hook(lambda *_: timeline.mark("forward"))
        model.register_forward_hook(lambda *_: timeline.mark("backward"))
        reduce = model.config.finalize_model_grads_func

        def timed_reduce(*args: Any, **kwargs: Any) -> None:
            timeline.mark("reduce")
            reduce(*args, **kwargs)

        model.config.finalize_model_grads_func = timed_reduce

    @property
    def module(self) -> torch.nn.Module:
        """The model, for timing its parts."""
        return self._model[0]

    @property
    def chunks(self) -> list[Chunk]:
        """The model as the engine takes it."""
        return self._model

    def describe(self) -> str:
        """What computes it."""
        return f"attention: {describe(self._settings, self._case.shape.architecture())}"

    def step(self, batches: list[Batch]) -> float:
        """A training step; the loss is its mean over the trained tokens, or what else the objective counts."""
        # Megatron-Core first clears the gradients of the step before.
        self._timeline.mark("optimizer")
        totals = forward_backward(self._model, batches, self._objective)
        self._timeline.mark("optimizer")
        updated, _ = optimizer.step(self._optimizer, LEARNING_RATE)
        if not updated:
            raise FloatingPointError("the gradients are not finite")
        return totals.loss

    def close(self) -> None:
        groups.leave()
