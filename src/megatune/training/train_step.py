"""One optimizer step over its micro-batches, its checks, and the learning rate of Transformers' schedulers as a pure
function of the step."""

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
    """The result of one optimizer step, equal on all ranks.

    Attributes:
        totals: loss, normalizer and metrics.
        grad_norm: L2 norm of all gradients before clipping.
        updated: whether weights, optimizer state and router biases were updated.
        problem: why `check` rejected the step, or None. A step without a problem that was not updated overflowed in
            fp16, which the loss scaler handles.
        seconds: time of "forward_backward" and of "optimizer" on this rank, if `timed`.
    """

    totals: StepTotals
    grad_norm: float
    updated: bool
    problem: str | None
    seconds: Mapping[str, float]


def not_finite(loss: float, grad_norm: float) -> str | None:
    """Return the problem of a step's loss and gradient norm, or None if they are finite."""
    numbers = {"loss": loss, "gradient norm": grad_norm}
    return ", ".join(f"{name} {value}" for name, value in numbers.items() if not math.isfinite(value)) or None


def train_step(
    assembly: Assembly,
    batches: Sequence[Batch],
    objective: Objective = _CROSS_ENTROPY,
    *,
    learning_rate: float,
    check: Callable[[float, float], str | None] = not_finite,
    votes: Votes = NO_VOTES,
    checked_step: int | None = None,
    timed: bool = False,
    busy: BusyTime | None = None,
) -> StepResult:
    """Run forward, backward and update over one step's micro-batches; collective.

    Args:
        batches: this data-parallel rank's micro-batches.
        check: takes the loss and the gradient norm, which are equal on all ranks. If it returns a problem, the update
            is skipped.
        votes: the requests of this rank, for `StepTotals`.
        checked_step: the step's number, to compare gradients and weights between ranks that hold copies of them; None
            for no comparison.
        busy: the busy time of this rank, for `StepTotals`.
        timed: synchronize the device between the parts of the step to measure each.

    Raises:
        MegatuneError: NOT_FINITE, if copies differ.
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
        # The device was synchronized to read the norm, so that reading the loss needs no second wait.
        problem = check(totals.loss, grad_norm)
        return problem is None

    updated, grad_norm = optimizer.step(assembly.optimizer, learning_rate, accepts)
    if not updated:
        if problem is None and not math.isfinite(totals.loss):
            problem = check(totals.loss, grad_norm)
        for bias, value in zip(biases, before, strict=True):
            bias.copy_(value)
    if checked_step is not None:
        check_weights(assembly, checked_step, grad_norm=grad_norm, learning_rate=learning_rate)
    if timed:
        device.synchronize()
        seconds["optimizer"] = time.monotonic() - began
    return StepResult(totals, grad_norm, updated, problem, seconds)


def check_gradients(assembly: Assembly, step: int) -> None:
    """Compare reduced gradients between ranks before the optimizer uses them. Collective.

    Replicas hold copies only if the optimizer is not distributed; else only tensor-parallel ranks do. `step` is counted
    from 1.

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
    """Compare weights after an update, and numbers that every rank holds, such as `grad_norm`. Collective.

    Raises:
        MegatuneError: NOT_FINITE, see `check_agreement`.
    """
    kept = {f"the optimizer's {name}": value for name, value in optimizer.scalars(assembly.optimizer).items()}
    check_scalars(f"step {step}", {"step": step, **values, **kept})
    gather_parameters(assembly.model)
    held = [NamedValues(_name(local, assembly), local.parameter, local.kept) for local in assembly.parameters]
    check_agreement(f"step {step}: weights", held)


def _name(local: LocalParameter, assembly: Assembly) -> str:
    """Return the name of the first Hugging Face tensor in a parameter, and the number of the others."""
    first, *others = local.hf_shapes(assembly.architecture)
    return f"{first} (and {len(others)} more in one tensor)" if others else first


def not_finite_gradients(assembly: Assembly) -> dict[int, list[str]]:
    """Return the names of the parameters whose gradients are not finite, by rank. Collective."""
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
    """Compute the number of warm-up steps as Transformers does.

    Args:
        warmup_steps: a number of steps if at least 1, else a ratio of `total_steps` (Transformers 5).
        warmup_ratio: a ratio of `total_steps`, used if `warmup_steps` is 0.
    """
    if warmup_steps >= 1:
        return int(warmup_steps)
    return math.ceil(total_steps * (warmup_steps or warmup_ratio or 0.0))


class LearningRateSchedule:
    """The learning rate of each step, bitwise equal to that of Transformers' `get_scheduler`.

    It has no state, so that a resumed run uses the same rates as an uninterrupted one. As in Transformers, "constant"
    has no warm-up (use "constant_with_warmup"), and the first step of a warm-up has a learning rate of 0.

    Args:
        learning_rate: the peak.
        lr_scheduler_kwargs: arguments of the scheduler, under Transformers' names (min_lr, num_decay_steps, ...).
        warmup_steps: steps of linear warm-up; see `warmup_steps_of`.

    Raises:
        ValueError: a type that is not in SCHEDULER_TYPES.
        MegatuneError: SETTINGS, if the arguments do not fit the type, or the phases do not fit the run.
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
            # Transformers accepts a negative stable phase, and the rate would jump into the middle of the decay.
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
        """Create the schedule of a run of `total_steps`."""
        warmup = warmup_steps_of(settings.warmup_steps, settings.warmup_ratio, total_steps)
        shape = settings.lr_scheduler_type, settings.lr_scheduler_kwargs
        return cls(settings.learning_rate, *shape, warmup, total_steps)

    def at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return self.learning_rate * self._factor(step)


def _factor_of_step(
    learning_rate: float, lr_scheduler_type: str, kwargs: dict[str, Any], warmup_steps: int, total_steps: int
) -> Callable[[int], float]:
    """Return the multiplier of the learning rate, as a function of the step, from Transformers' scheduler."""
    if kwargs and lr_scheduler_type in ("constant", "constant_with_warmup"):  # get_scheduler ignores them
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
