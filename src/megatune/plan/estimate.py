"""The estimate of one case: memory of every stage, and the time of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatune.plan.case import Case
from megatune.plan.memory.estimate import StageMemory, stage_memory
from megatune.plan.time import StepTime, step_time


@dataclass(frozen=True)
class Estimate:
    """What a case takes."""

    case: Case
    stages: tuple[StageMemory, ...]
    time: StepTime

    @cached_property
    def fullest(self) -> StageMemory:
        """The stage whose ranks hold most."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def fits(self) -> bool:
        """Whether every rank's bytes are there."""
        return self.fullest.total <= self.case.machine.device.memory


def estimate(case: Case) -> Estimate:
    """Return memory and time of a case whose settings the rules have nothing against."""
    return Estimate(case, stage_memory(case), step_time(case))
