"""The estimate of one case: memory of every stage, and the time of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from megatune.config.groups.performance import RecomputeSettings
from megatune.plan.case import Case
from megatune.plan.memory.estimate import FixedMemory, fixed_memory, fullest_bytes, stage_memory
from megatune.plan.memory.stage import StageMemory
from megatune.plan.time import FixedTime, StepTime, step_time
from megatune.plan.uncertainty import safe_bytes


@dataclass(frozen=True, eq=False)
class Estimate:
    """Memory and time of a case, each computed on first access: one of them rules out most layouts of a search."""

    case: Case
    _plain: Estimate | None = None  # of the case without recomputation, which has the parts that both share

    def with_recompute(self, recompute: RecomputeSettings) -> Estimate:
        """Return the estimate of the case with another recomputation."""
        settings = self.case.settings.model_copy(update={"recompute": recompute})
        return Estimate(replace(self.case, settings=settings), self._plain or self)

    @cached_property
    def fixed_memory(self) -> FixedMemory:
        """The part of `peak_bytes` that recomputation does not change."""
        return self._plain.fixed_memory if self._plain else fixed_memory(self.case)

    @cached_property
    def fixed_time(self) -> FixedTime:
        """The part of `time` that recomputation does not change."""
        return self._plain.fixed_time if self._plain else FixedTime(self.case)

    @cached_property
    def stages(self) -> tuple[StageMemory, ...]:
        """Memory of each pipeline stage, the first stage first."""
        return stage_memory(self.case)

    @cached_property
    def time(self) -> StepTime:
        """Seconds of a step, by part."""
        return step_time(self.case, self.fixed_time)

    @cached_property
    def fullest(self) -> StageMemory:
        """The stage with the most memory per rank."""
        return max(self.stages, key=lambda stage: stage.total)

    @cached_property
    def peak_bytes(self) -> int:
        """The total of `fullest`, computed without the parts."""
        return fullest_bytes(self.case, self.fixed_memory)

    @property
    def fits(self) -> bool:
        """Whether every rank fits on its device."""
        return self.peak_bytes <= self.case.machine.device.memory

    @cached_property
    def is_tight(self) -> bool:
        """Whether the fullest rank exceeds the memory at the upper end of the uncertainty of its class of models."""
        return self.peak_bytes > safe_bytes(self.case)

    @cached_property
    def sort_key(self) -> tuple[bool, float, int]:
        """The order of layouts: whether it is tight; seconds of a step to four digits; bytes."""
        return self.is_tight, float(f"{self.time.total:.4g}"), self.peak_bytes


def estimate(case: Case) -> Estimate:
    """Return memory and time of a case whose settings meet the rules.

    Raises:
        MegatuneError: INPUT if the device's generation, or its speed in the model's dtype, is unknown.
    """
    found = Estimate(case)
    for part in ("stages", "time"):  # computed here, so that errors are raised here
        getattr(found, part)
    return found
