"""How many rows are computed at once, and in a step."""

from __future__ import annotations

from typing import Annotated

from megatune.config.setting import Count, Group


class BatchSettings(Group):
    per_device_train_batch_size: Annotated[Count, "rows"] = 8
    """Rows of one micro-batch: what one process computes at once.
    How: Activations grow in proportion to it. The global batch is this times gradient_accumulation_steps times the
    data-parallel size.
    When: Raise it while memory lasts and rows are short: larger products use a GPU better. With packed or long rows 1
    is usual."""
    gradient_accumulation_steps: Annotated[Count, "micro-batches"] = 1
    """Micro-batches of one step, computed one after the other before the optimizer updates the weights.
    How: Gradients are added up, so memory stays what one micro-batch takes. With a pipeline, stages idle for about
    (stages − 1) / micro-batches of a step's computing.
    When: Raise it for a larger global batch at the same memory. With a pipeline use several times
    pipeline_model_parallel_size; with virtual stages a multiple of it."""
    per_device_eval_batch_size: Annotated[Count, "rows"] = 8
    """Rows of one micro-batch in evaluation.
    How: An evaluation keeps no activations for a backward pass, so larger ones fit than in training. It changes no
    result.
    When: Raise it where evaluation takes long."""
