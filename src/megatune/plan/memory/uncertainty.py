"""How far planned memory lies from what runs hold, by what is planned.

On GPUs of Ampere and Hopper, two of three published runs (benchmarks/planner/memory.py) hold between 1 / (1 + u) and
1 + u times what is planned; a test holds the figures against them. On a CPU three runs were off by 22 % in the
median, and by 18 % with factors fitted to the two others (docs/trouble.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from megatune.plan.case import Case
from megatune.plan.memory.estimate import StageMemory
from megatune.plan.time.uncertainty import FITTED_GENERATIONS

UNCERTAINTIES = {"dense": 0.25, "experts": 0.4, "cpu": 0.25}
_UNMEASURED = 0.25  # more on GPUs of other generations: no run on them was compared with
_CALIBRATED = 0.8  # of the uncertainty is left where factors were fitted to runs on the machine


def memory_uncertainty(case: Case) -> float:
    """Relative: 0.25 means between 1 / 1.25 of the plan and 1.25 times it."""
    generation = case.machine.device.generation
    kind = "cpu" if generation == "cpu" else "experts" if case.model.architecture.moe is not None else "dense"
    known = UNCERTAINTIES[kind]
    if case.machine.calibration.num_runs:
        return _CALIBRATED * known
    return known if generation in (*FITTED_GENERATIONS, "cpu") else known + _UNMEASURED


def least_and_most(case: Case, stages: Sequence[StageMemory]) -> tuple[int, int]:
    """Return bytes that the fullest rank holds at least and at most, within the uncertainty.

    Weights, gradients and optimizer state are exact: a rank never holds less than these.
    """
    factor = 1 + memory_uncertainty(case)
    exact = max(each.weights + each.gradients + each.master_weights + each.optimizer_state for each in stages)
    total = max(each.total for each in stages)
    return max(exact, int(total / factor)), int(total * factor)
