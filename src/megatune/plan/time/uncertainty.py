"""How far predictions lie from measurements, by what is planned.

Of the published runs of benchmarks/planner_accuracy.py two of three lie nearer than these figures say. They are of all
kinds of software: a calibrated machine does better.
"""

from __future__ import annotations

from typing import Literal

from megatune.plan.case import Case

Regime = Literal["dense", "dense, model parallel", "experts"]

UNCERTAINTIES: dict[Regime, float] = {"dense": 0.15, "dense, model parallel": 0.25, "experts": 0.75}
# No run of these was compared with.
_UNMEASURED = 0.25
FITTED_GENERATIONS = ("ampere", "hopper")


def regime_of(case: Case) -> Regime:
    """Return what predictions of this case's kind were compared with."""
    if case.model.architecture.moe is not None:
        return "experts"
    return "dense" if case.settings.parallel.model_parallel_size == 1 else "dense, model parallel"


def uncertainty(case: Case) -> float:
    """Relative: 0.25 means that two of three steps take between 1 / 1.25 of the prediction and 1.25 times it."""
    known = UNCERTAINTIES[regime_of(case)]
    if case.machine.calibration.num_runs:
        return known / 2
    return known if case.machine.device.generation in FITTED_GENERATIONS else known + _UNMEASURED
