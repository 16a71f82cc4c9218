"""The error of plans by class of models, from published runs.

The runs are those of benchmarks/planner_accuracy.py, each planned with its own engine; a test compares this table with
them. The figure of a class is the larger one of all its runs and of those that no constant was fitted to, if these are
five or more; rounded up to 5 %, and at least that of dense models. On a CPU the median memory error of three runs was
22 %, and 18 % with factors fitted to the two others (docs/trouble.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from megatune.plan.case import Case
from megatune.plan.memory.stage import StageMemory

ModelClass = Literal["dense", "experts", "lora", "vision"]


class Spread(NamedTuple):
    """Relative errors of a plan.

    Attributes:
        memory_bound: nine of ten runs hold at most 1 + x times their plan.
        time: two of three take between 1 / (1 + x) and 1 + x times their plan.
        time_bound: the same for nine of ten.
    """

    memory_bound: float
    time: float
    time_bound: float


SPREADS: dict[ModelClass, Spread] = {
    "dense": Spread(memory_bound=0.25, time=0.15, time_bound=0.45),
    "experts": Spread(memory_bound=0.4, time=0.2, time_bound=0.6),
    "lora": Spread(memory_bound=0.25, time=0.15, time_bound=0.55),
    "vision": Spread(memory_bound=0.25, time=1.6, time_bound=1.6),
}
_CPU_MEMORY = 0.25
_UNMEASURED = 0.25  # added for generations of devices without a compared run
_OF_MEMORY = ("ampere", "hopper", "blackwell", "cpu")
_OF_TIME = ("ampere", "ada", "hopper", "blackwell", "blackwell-rtx")
# A run is warned at its start if its plan exceeds this share of the device's memory.
TIGHT = 0.95
_CALIBRATED = 0.8  # multiplies the uncertainty of memory if factors were fitted on the machine


def model_class(case: Case) -> ModelClass:
    """Return the class of a model: "experts" before "vision", "vision" before "lora"."""
    architecture = case.model.architecture
    if architecture.moe is not None:
        return "experts"
    if architecture.vision is not None:
        return "vision"
    return "lora" if case.settings.finetuning.finetuning_type == "lora" else "dense"


def memory_bound(case: Case) -> float:
    """Return how far the memory of a run may exceed its plan: with 0.3, nine of ten runs hold at most 1.3 times it.

    Few runs hold less than their plan, and no published one less than 1 / 1.1 of it.
    """
    known = _CPU_MEMORY if case.machine.device.on_cpu else SPREADS[model_class(case)].memory_bound
    return _CALIBRATED * known if case.machine.calibration.of_memory else _on_device(case, known, _OF_MEMORY)


def safe_bytes(case: Case) -> int:
    """Return the bytes that a rank may be planned to hold, so that nine of ten runs of the model's class fit."""
    return int(case.machine.device.memory / (1 + memory_bound(case)))


def time_uncertainty(case: Case) -> float:
    """Return the relative uncertainty of seconds: with 0.25, two of three steps take between 1 / 1.25 and 1.25 times
    the prediction."""
    known = SPREADS[model_class(case)].time
    return known / 2 if case.machine.calibration.of_time else _on_device(case, known, _OF_TIME)


def _on_device(case: Case, known: float, measured: Sequence[str]) -> float:
    return known if case.machine.device.generation in measured else known + _UNMEASURED


def memory_range(case: Case, stages: Sequence[StageMemory]) -> tuple[int, int]:
    """Return the bytes that the fullest rank holds at least and at most; never less than its exact state."""
    factor = 1 + memory_bound(case)
    total = max(each.total for each in stages)
    return max(*(each.exact for each in stages), int(total / factor)), int(total * factor)
