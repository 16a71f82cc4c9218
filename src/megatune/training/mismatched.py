"""The pass without gradient that comes before a step of KTO, over prompts with answers to other prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from megatune.data.batches import Batch
from megatune.engine.model import Chunk
from megatune.objectives.kto import KTO, MeanRatio
from megatune.training.train_step import evaluate


def with_kl(
    model: list[Chunk],
    steps: Iterable[Sequence[Batch]],
    objective: KTO,
    *,
    on_step: Callable[[int], None] = lambda index: None,
) -> KTO:
    """Return the objective with z, of all documents of all ranks; collective.

    Costs a forward pass, without dropout.

    Args:
        model: pipeline chunks; computed in eval mode.
        steps: this data-parallel rank's micro-batches of `MismatchedRows`, with log-probabilities of the reference.
        on_step: as of `evaluate`.
    """
    metrics = evaluate(model, steps, MeanRatio(), on_step=on_step).metrics
    return replace(objective, kl=max(0.0, metrics.get("ratio", 0.0)), kl_log_prob=metrics.get("log_prob", 0.0))
