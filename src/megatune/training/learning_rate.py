"""Learning-rate schedules: those of Transformers' names, as pure functions of the step.

The formulas are those of transformers/optimization.py. Taking them out of its schedulers would import peft, and what
peft imports, into every start: more than two seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatune.errors import ExitCode, Finding, MegatuneError


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
    """The learning rate of every optimizer step, equal to that of Transformers' `get_scheduler`.

    It has no state: a resume asks for the next step and gets the rate the uninterrupted run would have used.
    As in Transformers, "constant" has no warm-up (that is "constant_with_warmup"), and the first step of a warm-up
    has a learning rate of 0.

    Args:
        learning_rate: the peak.
        lr_scheduler_kwargs: arguments of the type, under Transformers' names (min_lr, num_decay_steps, ...).
        warmup_steps: steps of linear warm-up; see `warmup_steps_of`.

    Raises:
        ValueError: a type that is not in SCHEDULES.
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
        if lr_scheduler_type not in SCHEDULES:
            raise ValueError(f"lr_scheduler_type {lr_scheduler_type!r} is not one of {', '.join(SCHEDULES)}")
        kwargs = dict(lr_scheduler_kwargs or {})
        decay = kwargs.get("num_decay_steps") if lr_scheduler_type == "warmup_stable_decay" else None
        if isinstance(decay, int) and kwargs.get("num_stable_steps") is None and warmup_steps + decay > total_steps:
            # Transformers would accept a negative stable phase, and the rate would jump into the middle of the decay.
            phases = f"warm-up of {warmup_steps} and decay of {decay} steps"
            fix = f"set num_decay_steps to at most {max(0, total_steps - warmup_steps)}"
            raise _refused(f"{phases} do not fit a run of {total_steps} steps", fix=fix)
        self.learning_rate = learning_rate
        try:
            run = _Run(learning_rate, warmup_steps, total_steps)
            self._factor = SCHEDULES[lr_scheduler_type](run, **kwargs)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise _refused(f"lr_scheduler_kwargs do not fit lr_scheduler_type {lr_scheduler_type}", error) from error

    def at(self, step: int) -> float:
        """Return the learning rate of optimizer step number `step`, counted from 0."""
        return self.learning_rate * self._factor(step)


def _refused(what: str, why: object = "", fix: str = "") -> MegatuneError:
    return MegatuneError(Finding(what, where="lr_scheduler_kwargs", why=str(why), fix=fix), ExitCode.SETTINGS)


@dataclass(frozen=True, slots=True)
class _Run:
    """What every schedule depends on: the highest rate, the steps of warm-up, and all steps."""

    peak: float
    warmup: int
    total: int

    def rising(self, then: Callable[[int], float]) -> _Factor:
        """Rise from 0 to 1 in the warm-up; then comes a function of the step."""
        return lambda step: step / max(1, self.warmup) if step < self.warmup else then(step)

    def progress(self, step: int) -> float:
        """Return the share of the steps after the warm-up; beyond the run it is above 1."""
        return (step - self.warmup) / max(1, self.total - self.warmup)


def _constant(_: _Run) -> _Factor:
    return lambda step: 1.0


def _constant_with_warmup(run: _Run) -> _Factor:
    return run.rising(lambda step: 1.0)


def _linear(run: _Run) -> _Factor:
    left = max(1, run.total - run.warmup)
    return run.rising(lambda step: max(0.0, (run.total - step) / left))


def _wave(progress: float, cycles: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * progress))


def _cosine(run: _Run, num_cycles: float = 0.5, lowest: float = 0.0) -> _Factor:
    return run.rising(lambda step: max(0.0, _wave(run.progress(step), num_cycles) * (1 - lowest) + lowest))


def _cosine_with_min_lr(
    run: _Run, num_cycles: float = 0.5, min_lr: float | None = None, min_lr_rate: float | None = None
) -> _Factor:
    shares = [share for share in (min_lr_rate, None if min_lr is None else min_lr / run.peak) if share is not None]
    if len(shares) != 1:
        raise ValueError("give min_lr or min_lr_rate, one of the two")
    return _cosine(run, num_cycles, shares[0])


def _cosine_with_restarts(run: _Run, num_cycles: int = 1) -> _Factor:
    def fall(step: int) -> float:
        progress = run.progress(step)
        return _wave(num_cycles * progress % 1.0, 0.5) if progress < 1 else 0.0

    return run.rising(fall)


def _polynomial(run: _Run, lr_end: float = 1e-7, power: float = 1.0) -> _Factor:
    if lr_end >= run.peak:
        raise ValueError(f"lr_end {lr_end:g} is not below the learning rate of {run.peak:g}")
    lowest = lr_end / run.peak
    return run.rising(lambda step: (1 - lowest) * max(0.0, 1 - run.progress(step)) ** power + lowest)


def _inverse_sqrt(run: _Run, timescale: int | None = None) -> _Factor:
    scale = timescale or run.warmup or 10_000
    return run.rising(lambda step: math.sqrt(scale / (step + scale - run.warmup)))


_SHAPES: dict[str, Callable[[float, float], float]] = {
    "linear": lambda left, cycles: left,
    "cosine": lambda left, cycles: _wave(1 - left, cycles),
    "1-sqrt": lambda left, cycles: 1.0 - math.sqrt(1 - left),
}


def _warmup_stable_decay(
    run: _Run,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> _Factor:
    if unknown := {warmup_type, decay_type} - _SHAPES.keys():
        raise ValueError(f"{', '.join(sorted(unknown))}: expected one of {', '.join(_SHAPES)}")
    stable = run.total - run.warmup - num_decay_steps if num_stable_steps is None else num_stable_steps
    falls = run.warmup + stable

    def factor(step: int) -> float:
        if run.warmup <= step < falls:
            return 1.0
        if step < run.warmup:
            height = _SHAPES[warmup_type](step / max(1, run.warmup), 0.5)
        else:
            left = 1 - (step - falls) / max(1, num_decay_steps)
            height = _SHAPES[decay_type](left, num_cycles) if left > 0 else 0.0
        return max(0.0, height * (1.0 - min_lr_ratio) + min_lr_ratio)

    return factor


_Factor = Callable[[int], float]
SCHEDULES: Mapping[str, Callable[..., _Factor]] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
    "constant_with_warmup": _constant_with_warmup,
    "inverse_sqrt": _inverse_sqrt,
    "polynomial": _polynomial,
    "cosine_with_restarts": _cosine_with_restarts,
    "cosine_with_min_lr": _cosine_with_min_lr,
    "warmup_stable_decay": _warmup_stable_decay,
}
