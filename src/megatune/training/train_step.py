"""One optimizer step from its micro-batches, and an evaluation: what a training loop of any kind is built of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from megatune.bridge.assemble import Assembly
from megatune.data.batches import Batch
from megatune.engine import groups, optimizer
from megatune.engine.layers.moe.router import take_auxiliary_losses
from megatune.engine.model import Chunk, gather_parameters
from megatune.engine.step import forward_backward
from megatune.objectives.language_model import token_sum
from megatune.training.copies import check_gradients, check_weights


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step; equal on all ranks.

    Attributes:
        loss: mean over the step's trained tokens.
        num_tokens: trained tokens (labels that are not -100).
        grad_norm: L2 norm of all gradients before clipping.
        updated: False where gradients were not finite: the weights have not changed.
        stop_requested: by any rank.
        metrics: by name, whatever the objective and the model's layers report.
    """

    loss: float
    num_tokens: int
    grad_norm: float
    updated: bool
    stop_requested: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


def train_step(
    assembly: Assembly,
    batches: Sequence[Batch],
    *,
    learning_rate: float,
    stop_requested: bool = False,
    checked_step: int | None = None,
) -> StepResult:
    """Run forward, backward and update over one step's micro-batches; collective.

    Args:
        batches: this data-parallel rank's micro-batches.
        stop_requested: whether this rank was asked to stop; sent along with the loss.
        checked_step: compare gradients and weights between the ranks that hold copies of them, and report this step's
            number where they differ; None leaves the check out.

    Raises:
        MegatuneError: NOT_FINITE, where copies differ.
    """
    totals = forward_backward(assembly.model, batches, token_sum, raised_hand=stop_requested)
    if checked_step is not None:
        check_gradients(assembly, checked_step)
    updated, grad_norm = optimizer.step(assembly.optimizer, learning_rate)
    loss_sum, num_tokens, stops = totals.tolist()
    if checked_step is not None:
        check_weights(assembly, checked_step, grad_norm=grad_norm, learning_rate=learning_rate)
    loss = loss_sum / max(num_tokens, 1)
    return StepResult(loss, int(num_tokens), grad_norm, updated, stops > 0, _auxiliary_losses(assembly))


def _auxiliary_losses(assembly: Assembly) -> dict[str, float]:
    """Take the routers' losses, where they are part of the objective."""
    config = assembly.model[0].config
    return take_auxiliary_losses(assembly.model) if config.moe_aux_loss_coeff or config.moe_z_loss_coeff else {}


def not_finite_gradients(assembly: Assembly) -> dict[int, list[str]]:
    """Name the parameters whose gradients are not finite, by rank; collective."""
    shards = optimizer.main_shards(assembly.optimizer)
    mine = [
        name
        for local in assembly.parameters
        if local.parameter in shards and not shards[local.parameter].grad.isfinite().all()
        for name in local.hf_shapes(assembly.architecture)
    ]
    return {rank: names for rank, names in enumerate(groups.gather(mine)) if names}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation; equal on all ranks.

    Attributes:
        loss: mean over all trained tokens.
        num_tokens: those tokens.
        metrics: by name, whatever the objective reports.
    """

    loss: float
    num_tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)


def evaluate(
    model: list[Chunk], steps: Iterable[Sequence[Batch]], on_step: Callable[[int], None] = lambda index: None
) -> Evaluation:
    """Compute the loss of batches, in eval mode and without gradients; collective.

    Args:
        model: pipeline chunks; in training mode again at the end, also where an exception ends the evaluation.
        steps: of each step this data-parallel rank's micro-batches.
        on_step: called before each step with its index.
    """
    gather_parameters(model)
    loss_sum = num_tokens = 0.0
    with _eval_mode(model), torch.no_grad():
        for index, batches in enumerate(steps):
            on_step(index)
            totals = forward_backward(model, batches, token_sum, forward_only=True).tolist()
            loss_sum, num_tokens = loss_sum + totals[0], num_tokens + totals[1]
    return Evaluation(loss_sum / num_tokens, int(num_tokens))


@contextmanager
def _eval_mode(model: list[Chunk]) -> Iterator[None]:
    for chunk in model:
        chunk.eval()
    try:
        yield
    finally:
        for chunk in model:
            chunk.train()
