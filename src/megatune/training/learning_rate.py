"""Learning-rate schedules: Transformers' own, as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import get_scheduler

from megatune.errors import ExitCode, Finding, MegatuneError

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
        self.learning_rate = learning_rate
        try:
            self._factor = _factor_of_step(learning_rate, lr_scheduler_type, kwargs, warmup_steps, total_steps)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise _refused(f"lr_scheduler_kwargs do not fit lr_scheduler_type {lr_scheduler_type}", error) from error

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
