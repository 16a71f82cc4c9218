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
    """What a case takes. Each part is computed when it is first asked for: one rules most layouts of a search out."""

    case: Case
    _plain: Estimate | None = None  # of the same case with nothing recomputed, which knows what both share

    def with_recompute(self, how: RecomputeSettings) -> Estimate:
        """Return the same case with other activations recomputed."""
        settings = self.case.settings.model_copy(update={"recompute": how})
        return Estimate(replace(self.case, settings=settings), self._plain or self)

    @cached_property
    def fixed_memory(self) -> FixedMemory:
        """What recomputation does not change of `bytes`."""
        return self._plain.fixed_memory if self._plain else fixed_memory(self.case)

    @cached_property
    def fixed_time(self) -> FixedTime:
        """What recomputation does not change of `time`."""
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
        """The stage whose ranks hold most."""
        return max(self.stages, key=lambda stage: stage.total)

    @cached_property
    def peak_bytes(self) -> int:
        """The total of `fullest`, without the parts."""
        return fullest_bytes(self.case, self.fixed_memory)

    @property
    def fits(self) -> bool:
        """Whether every rank's bytes are there."""
        return self.peak_bytes <= self.case.machine.device.memory

    @cached_property
    def is_tight(self) -> bool:
        """Whether the fullest rank does not fit at the upper end of what is known of its class of models."""
        return self.peak_bytes > safe_bytes(self.case)

    @cached_property
    def sort_key(self) -> tuple[bool, float, int]:
        """What layouts are ranked by: whether it is tight; seconds of a step to four digits; bytes."""
        return self.is_tight, float(f"{self.time.total:.4g}"), self.peak_bytes


def estimate(case: Case) -> Estimate:
    """Return memory and time of a case whose settings the rules have nothing against.

    Raises:
        MegatuneError: INPUT, where nothing is known of the device's generation, or of its speed in the model's dtype.
    """
    found = Estimate(case)
    for part in ("stages", "time"):  # computed here, where what is wrong is to be raised
        getattr(found, part)
    return found
