"""How far plans lie from what runs take and hold, by what is planned.

Time: of the published runs of benchmarks/planner_accuracy.py two of three lie nearer than these figures say. They are
of all kinds of software: a calibrated machine does better. Memory: on GPUs of Ampere and Hopper, two of three published
runs (benchmarks/planner/memory.py) hold between 1 / (1 + u) and 1 + u times what is planned; a test holds the figures
against them. On a CPU three runs were off by 22 % in the median, and by 18 % with factors fitted to the two others
(docs/trouble.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from megatune.plan.case import Case
from megatune.plan.memory import StageMemory

Regime = Literal["dense", "dense, model parallel", "experts"]

TIME_UNCERTAINTIES: dict[Regime, float] = {"dense": 0.15, "dense, model parallel": 0.25, "experts": 0.75}
MEMORY_UNCERTAINTIES = {"dense": 0.25, "experts": 0.4, "cpu": 0.25}
_UNMEASURED = 0.25  # more on devices of other generations: no run on them was compared with
_FITTED_GENERATIONS = ("ampere", "hopper")
_CALIBRATED = 0.8  # of memory's uncertainty is left where factors were fitted to runs on the machine

ModelClass = Literal["dense", "experts", "lora", "vision"]


class Bound(NamedTuple):
    """What nine of ten published runs of a class of models respect.

    Attributes:
        memory: they hold at most 1 + memory times what is planned.
        time: they take between 1 / (1 + time) of what is planned and 1 + time times it.
    """

    memory: float
    time: float


BOUNDS: dict[ModelClass, Bound] = {
    "dense": Bound(0.35, 0.3),
    "experts": Bound(0.4, 1.5),
    "lora": Bound(0.35, 0.3),
    "vision": Bound(0.4, 1.5),
}


def model_class(case: Case) -> ModelClass:
    """Return what bounds are stated for: experts before pictures, pictures before adapters."""
    architecture = case.model.architecture
    if architecture.moe is not None:
        return "experts"
    if architecture.vision is not None:
        return "vision"
    return "lora" if case.settings.finetuning.finetuning_type == "lora" else "dense"


def memory_bound(case: Case) -> float:
    """Return how far the memory of a run may lie above its plan: 0.3 means that nine of ten hold at most 1.3 times."""
    return BOUNDS[model_class(case)].memory


def time_bound(case: Case) -> float:
    """Return how far a step may lie from its plan: with 0.3 nine of ten take 1 / 1.3 of it to 1.3 times it."""
    return BOUNDS[model_class(case)].time


def regime_of(case: Case) -> Regime:
    """Return what predictions of this case's kind were compared with."""
    if case.model.architecture.moe is not None:
        return "experts"
    return "dense" if case.settings.parallel.model_parallel_size == 1 else "dense, model parallel"


def time_uncertainty(case: Case) -> float:
    """Return the relative uncertainty of seconds: with 0.25 two of three steps take between 1 / 1.25 of the prediction
    and 1.25 times it."""
    known = TIME_UNCERTAINTIES[regime_of(case)]
    if case.machine.calibration.num_runs:
        return known / 2
    return known if case.machine.device.generation in _FITTED_GENERATIONS else known + _UNMEASURED


def memory_uncertainty(case: Case) -> float:
    """Return the relative uncertainty of bytes: 0.25 means between 1 / 1.25 of the plan and 1.25 times it."""
    generation = case.machine.device.generation
    kind = "cpu" if generation == "cpu" else "experts" if case.model.architecture.moe is not None else "dense"
    known = MEMORY_UNCERTAINTIES[kind]
    if case.machine.calibration.num_runs:
        return _CALIBRATED * known
    return known if generation in (*_FITTED_GENERATIONS, "cpu") else known + _UNMEASURED


def least_and_most(case: Case, stages: Sequence[StageMemory]) -> tuple[int, int]:
    """Return bytes that the fullest rank holds at least and at most, within the uncertainty.

    Weights, gradients and optimizer state are exact: a rank never holds less than these.
    """
    factor = 1 + memory_uncertainty(case)
    exact = max(each.weights + each.gradients + each.master_weights + each.optimizer_state for each in stages)
    total = max(each.total for each in stages)
    return max(exact, int(total / factor)), int(total * factor)
