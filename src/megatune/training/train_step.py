"""What any training loop is built of: one optimizer step from its micro-batches, its checks, and its learning rate,
which is Transformers' own, as a pure function of the step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers import get_scheduler

from megatune.bridge.assemble import Assembly
from megatune.bridge.parameters import LocalParameter
from megatune.config.groups.optimizer import OptimizerSettings
from megatune.data.batches import Batch
from megatune.engine import device, groups, optimizer
from megatune.engine.agreement import NamedValues, check_agreement, check_scalars
from megatune.engine.collectives import BusyTime
from megatune.engine.layers.moe.router import expert_biases
from megatune.engine.model import gather_parameters
from megatune.engine.step import NO_VOTES, Objective, StepTotals, Votes, forward_backward
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.objectives.choose import CrossEntropy

_CROSS_ENTROPY = CrossEntropy()


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step; equal on all ranks.

    Attributes:
        totals: loss, normalizer and metrics.
        grad_norm: L2 norm of all gradients before clipping.
        updated: False where nothing has changed: weights, the optimizer's state and biases of routers.
        problem: why the step was refused; None where it was not. One that was not updated all the same overflowed in
            fp16, which is the loss scale's own affair.
        seconds: of "forward_backward" and of "optimizer" on this rank, where they were asked for.
    """

    totals: StepTotals
    grad_norm: float
    updated: bool
    problem: str | None
    seconds: Mapping[str, float]


def not_finite(loss: float, grad_norm: float) -> str | None:
    """Return what is wrong with a step's numbers, None where they are finite."""
    numbers = {"loss": loss, "gradient norm": grad_norm}
    return ", ".join(f"{name} {value}" for name, value in numbers.items() if not math.isfinite(value)) or None


def train_step(
    assembly: Assembly,
    batches: Sequence[Batch],
    objective: Objective = _CROSS_ENTROPY,
    *,
    learning_rate: float,
    judge: Callable[[float, float], str | None] = not_finite,
    votes: Votes = NO_VOTES,
    checked_step: int | None = None,
    timed: bool = False,
    busy: BusyTime | None = None,
) -> StepResult:
    """Run forward, backward and update over one step's micro-batches; collective.

    Args:
        batches: this data-parallel rank's micro-batches.
        judge: gets the loss and the norm of all gradients, the same on all ranks; where it returns why the step is to
            be refused, nothing is changed.
        votes: what this rank asks of all; for `StepTotals`.
        checked_step: compare gradients and weights between the ranks that hold copies of them, and report this step's
            number where they differ; None leaves the check out.
        busy: of this rank, for `StepTotals`.
        timed: wait for the device between the parts of the step, to say how long each takes.

    Raises:
        MegatuneError: NOT_FINITE, where copies differ.
    """
    seconds: dict[str, float] = {}
    began = time.monotonic()
    biases = expert_biases(assembly.model)
    before = [bias.clone() for bias in biases]
    totals = forward_backward(assembly.model, batches, objective, votes=votes, busy=busy)
    if timed:
        device.synchronize()
        seconds["forward_backward"], began = time.monotonic() - began, time.monotonic()
    if checked_step is not None:
        check_gradients(assembly, checked_step)
    problem: str | None = None

    def accepts(grad_norm: float) -> bool:
        nonlocal problem
        # The loss is read where the norm was waited for, and is no second wait.
        problem = judge(totals.loss, grad_norm)
        return problem is None

    updated, grad_norm = optimizer.step(assembly.optimizer, learning_rate, accepts)
    if not updated:
        if problem is None and not math.isfinite(totals.loss):
            problem = judge(totals.loss, grad_norm)
        for bias, value in zip(biases, before, strict=True):
            bias.copy_(value)
    if checked_step is not None:
        check_weights(assembly, checked_step, grad_norm=grad_norm, learning_rate=learning_rate)
    if timed:
        device.synchronize()
        seconds["optimizer"] = time.monotonic() - began
    return StepResult(totals, grad_norm, updated, problem, seconds)


def check_gradients(assembly: Assembly, step: int) -> None:
    """Compare gradients after they were summed, before the optimizer uses them; collective.

    Each replica holds all sums where the optimizer is not distributed, and its share where it is: that is held by
    tensor-parallel ranks only. `step` is counted from 1, for the report.

    Raises:
        MegatuneError: NOT_FINITE, see `check_agreement`.
    """
    shards = optimizer.main_shards(assembly.optimizer)
    held = [
        NamedValues(_name(local, assembly), local.parameter, shards[local.parameter].grad)
        for local in assembly.parameters
        if local.parameter in shards
    ]
    is_split = assembly.model[0].ddp_config.use_distributed_optimizer
    check_agreement(f"step {step}: gradients", held, over_replicas=not is_split)


def check_weights(assembly: Assembly, step: int, **values: float) -> None:
    """Compare weights after an update, and numbers that every rank holds, such as `grad_norm`; collective.

    Raises:
        MegatuneError: NOT_FINITE, see `check_agreement`.
    """
    kept = {f"the optimizer's {name}": value for name, value in optimizer.scalars(assembly.optimizer).items()}
    check_scalars(f"step {step}", {"step": step, **values, **kept})
    gather_parameters(assembly.model)
    held = [NamedValues(_name(local, assembly), local.parameter, local.kept) for local in assembly.parameters]
    check_agreement(f"step {step}: weights", held)


def _name(local: LocalParameter, assembly: Assembly) -> str:
    """Name the first of the Hugging Face tensors that the parameter is made of, and how many more there are."""
    first, *others = local.hf_shapes(assembly.architecture)
    return f"{first} (and {len(others)} more in one tensor)" if others else first


def not_finite_gradients(assembly: Assembly) -> dict[int, list[str]]:
    """Name the parameters whose gradients are not finite, by rank; collective."""
    shards = optimizer.main_shards(assembly.optimizer)
    mine = [
        name
        for local in assembly.parameters
        if local.parameter in shards and not shards[local.parameter].grad.isfinite().all()
        for name in local.hf_shapes(assembly.architecture)
    ]
    return {rank: names for rank, names in enumerate(groups.all_gather_object(mine)) if names}


SCHEDULER_TYPES = (
    *("cosine", "linear", "constant", "constant_with_warmup"),
    *("inverse_sqrt", "polynomial", "cosine_with_restarts", "cosine_with_min_lr", "warmup_stable_decay"),
)


def warmup_steps_of(warmup_steps: float, warmup_ratio: float | None, total_steps: int) -> int:
    """Count warm-up steps as Transformers does.

    Args:
        warmup_steps: a number of steps from 1 on; below 1 it is a ratio of `total_steps` (Transformers 5).
        warmup_ratio: ratio of `total_steps`, used where `warmup_steps` is 0.
    """
    if warmup_steps >= 1:
        return int(warmup_steps)
    return math.ceil(total_steps * (warmup_steps or warmup_ratio or 0.0))


class LearningRateSchedule:
    """The learning rate of every optimizer step, equal to Transformers' `get_scheduler` bit for bit.

    It has no state: a resume asks for the next step and gets the rate the uninterrupted run would have used.
    As in Transformers, "constant" has no warm-up (that is "constant_with_warmup"), and the first step of a warm-up
    has a learning rate of 0.

    Args:
        learning_rate: the peak.
        lr_scheduler_kwargs: arguments of the type, under Transformers' names (min_lr, num_decay_steps, ...).
        warmup_steps: steps of linear warm-up; see `warmup_steps_of`.

    Raises:
        ValueError: a type that is not in SCHEDULER_TYPES.
        MegatuneError: SETTINGS, where the arguments do not fit the type or the run has no room for the phases.
    """

    def __init__(
        self,
        learning_rate: float,
        lr_scheduler_type: str = "linear",
        lr_scheduler_kwargs: Mapping[str, Any] | None = None,
        warmup_steps: int = 0,
        total_steps: int = 1,
    ) -> None:
        if lr_scheduler_type not in SCHEDULER_TYPES:
            raise ValueError(f"lr_scheduler_type {lr_scheduler_type!r} is not one of {', '.join(SCHEDULER_TYPES)}")
        kwargs = dict(lr_scheduler_kwargs or {})
        decay = kwargs.get("num_decay_steps") if lr_scheduler_type == "warmup_stable_decay" else None
        if isinstance(decay, int) and kwargs.get("num_stable_steps") is None and warmup_steps + decay > total_steps:
            # Transformers would accept a negative stable phase, and the rate would jump into the middle of the decay.
            phases = f"warm-up of {warmup_steps} and decay of {decay} steps"
            fix = f"set num_decay_steps to at most {max(0, total_steps - warmup_steps)}"
            raise _refused(f"{phases} do not fit a run of {total_steps} steps", fix=fix)
        self.learning_rate, self.warmup_steps = learning_rate, warmup_steps
        try:
            self._factor = _factor_of_step(learning_rate, lr_scheduler_type, kwargs, warmup_steps, total_steps)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise _refused(f"lr_scheduler_kwargs do not fit lr_scheduler_type {lr_scheduler_type}", error) from error

    @classmethod
    def of(cls, settings: OptimizerSettings, total_steps: int) -> Self:
        """Make the schedule of a run of so many steps."""
        warmup = warmup_steps_of(settings.warmup_steps, settings.warmup_ratio, total_steps)
        shape = settings.lr_scheduler_type, settings.lr_scheduler_kwargs
        return cls(settings.learning_rate, *shape, warmup, total_steps)

    def at(self, step: int) -> float:
        """Return the learning rate of optimizer step number `step`, counted from 0."""
        return self.learning_rate * self._factor(step)


def _factor_of_step(
    learning_rate: float, lr_scheduler_type: str, kwargs: dict[str, Any], warmup_steps: int, total_steps: int
) -> Callable[[int], float]:
    """Take Transformers' own multiplier of the learning rate out of the scheduler it builds."""
    if kwargs and lr_scheduler_type in ("constant", "constant_with_warmup"):  # get_scheduler drops them without a word
        raise TypeError(f"unexpected arguments: {', '.join(kwargs)}")

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=learning_rate)
    scheduler = get_scheduler(
        lr_scheduler_type,
        optimizer,
        num_warmup_steps=warmup_steps,
        # warmup_stable_decay takes either; given both, Transformers uses num_stable_steps and warns.
        num_training_steps=None if kwargs.get("num_stable_steps") is not None else total_steps,
        scheduler_specific_kwargs=kwargs,
    )
    return scheduler.lr_lambdas[0]


def _refused(what: str, why: object = "", fix: str = "") -> MegatuneError:
    return MegatuneError(Finding(what, where="lr_scheduler_kwargs", why=str(why), fix=fix), ExitCode.SETTINGS)
