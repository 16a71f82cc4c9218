"""What a run says before its first step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from megatune.bridge.assemble import Assembly
from megatune.config.settings import Settings
from megatune.data.prepare import Prepared
from megatune.engine import device
from megatune.plan.flops import num_parameters
from megatune.training.checkpoint import TrainState
from megatune.training.course import Course


def banner(
    settings: Settings,
    assembly: Assembly,
    prepared: Prepared,
    course: Course,
    state: TrainState,
    resumed: Path | None,
) -> Iterator[str]:
    """Lines on the model, the layout, the data and the course of the run."""
    architecture, place, parallel = assembly.architecture, assembly.place, settings.parallel
    yield (
        f"model      {settings.model.model_name_or_path}: {architecture.model_type}, {architecture.num_layers} layers, "
        f"{num_parameters(architecture):,} parameters"
    )
    virtual = parallel.virtual_stages
    parts = [f"tp {place.tp_size}{' + sp' if parallel.sequence_parallel else ''}", f"pp {place.pp_size}"]
    parts += [f"vpp {virtual}"] if virtual else []
    yield (
        f"layout     {' × '.join([*parts, f'dp {place.dp_size}'])} on {place.world_size} × {device.name()} "
        f"({device.BACKEND}, {torch.get_num_threads()} threads each)"
    )
    masters = "" if settings.precision.params_dtype == "float32" else ", fp32 master weights and gradients"
    kind = "distributed " if parallel.use_distributed_optimizer else ""
    yield (
        f"numbers    {settings.precision.params_dtype}{masters}; {kind}{settings.optimizer.optimizer}; "
        f"attention: {device.attention()}"
    )
    yield from (f"data       {line}" for line in prepared.report.lines())
    batch = settings.batch
    yield (
        f"batch      {batch.per_device_train_batch_size} rows × {batch.gradient_accumulation_steps} micro-batches × "
        f"dp {place.dp_size} = {course.global_batch_size} rows a step"
    )
    yield (
        f"course     {course.total_steps} steps, {course.steps_per_epoch} an epoch ({course.num_epochs:.2f} epochs), "
        f"into {settings.run.output_dir}"
    )
    if resumed is not None:
        yield f"resume     {resumed}: {state.step} steps done"
