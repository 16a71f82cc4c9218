"""What a step reports beside its loss: its rows, and how fast it was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megatune.bridge.assemble import Assembly
from megatune.config.settings import Settings
from megatune.data.batches import Batch
from megatune.data.steps import StepRows
from megatune.engine import device
from megatune.plan.catalogue import device_by_driver_name
from megatune.plan.flops import train_flops
from megatune.training.callbacks.base import StepReport
from megatune.training.train_step import StepResult


def step_report(
    settings: Settings,
    assembly: Assembly,
    rows: StepRows,
    batches: Sequence[Batch],
    result: StepResult,
    *,
    step: int,
    seconds: float,
    **fields: Any,
) -> StepReport:
    """Report a step.

    Args:
        rows: of all steps.
        batches: this rank's micro-batches of the step.
        step: counted from 1.
        seconds: that it took.
        fields: of StepReport, which the loop knows.
    """
    lengths = [int(length) for row in rows.lengths(step - 1) for length in row]
    flops = train_flops(assembly.architecture, lengths, settings.finetuning)
    flops /= assembly.place.world_size * seconds
    planned = device_by_driver_name(device.name())
    peak = planned.flops[settings.precision.params_dtype] if planned else None
    size = settings.batch.per_device_train_batch_size
    row_tokens = [batch.input_ids.numel() / size for batch in batches]
    of_pictures = [0 if batch.pictures is None else len(batch.pictures.places) / size for batch in batches]
    return StepReport(
        step=step,
        loss=result.totals.loss,
        grad_norm=result.grad_norm,
        num_tokens=result.totals.num_tokens,
        num_input_tokens=sum(lengths),
        seconds=seconds,
        tokens_per_second=sum(lengths) / seconds,
        model_tflops=flops / 1e12,
        mfu=flops / peak if peak else None,
        memory_gib=device.peak_memory_bytes() / 2**30,
        row_tokens=sum(row_tokens) / len(row_tokens),
        longest_row=math.ceil(max(row_tokens)),
        document_tokens=sum(lengths) / len(lengths) if rows.is_packed else None,
        picture_tokens=sum(of_pictures) / len(of_pictures),
        skipped=not result.updated,
        is_bad=result.problem is not None,
        **fields,
    )
