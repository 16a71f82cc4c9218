"""What a calibration found, and how much better it predicts."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from megatune.plan.machine import Calibration
from megatune.plan.pages.words import columns, percent, size


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionErrors:
    """Predicted over measured, less 1: 0.25 is a quarter too much. None where nothing was measured."""

    before: float | None = None
    after: float | None = None
    left_out: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunError:
    """One run's errors.

    Attributes:
        name: of its folder, with the step it resumed from where there are several processes in one.
        time: of the seconds of a step; `left_out` with factors that were fitted to the other runs.
        memory: of the bytes of the fullest rank.
    """

    name: str
    time: PredictionErrors
    memory: PredictionErrors


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """Factors, and the runs they were fitted to.

    Attributes:
        device: of the runs.
        fitted: factors that the runs could tell, by their names in `Calibration`.
        left: why each of the others was left as it is.
    """

    device: str
    calibration: Calibration
    runs: tuple[RunError, ...]
    fitted: tuple[str, ...]
    left: dict[str, str]

    def median(self, of: str, when: str) -> float | None:
        """Return the median size of an error over all runs: of "time" or "memory", "before", "after" or "left_out"."""
        errors = [getattr(getattr(run, of), when) for run in self.runs]
        known = [abs(error) for error in errors if error is not None]
        return statistics.median(known) if known else None

    def lines(self) -> Iterator[str]:
        """Yield the report for a terminal."""
        calibration = self.calibration
        values = {
            "compute": f"computing takes {calibration.compute:.2f} times as long as planned",
            "communication": f"exchanges take {calibration.communication:.2f} times as long",
            "activations": f"activations and loss take {calibration.activations:.2f} times as much",
            "framework": f"{size(abs(calibration.framework))} {'more' if calibration.framework >= 0 else 'less'} a rank"
            " beside tensors",
        }
        yield f"{self.device}, fitted to {calibration.num_runs} run{'s' * (calibration.num_runs != 1)}"
        for name, text in values.items():
            yield f"  {name:<14} {text if name in self.fitted else f'as it is: {self.left[name]}'}"
        head = ("error of", "step before", "after", "left out", "memory before", "after", "left out")
        rows = [head, *(self._row(run.name, run.time, run.memory) for run in self.runs)]
        if len(self.runs) > 1:
            time, memory = (
                PredictionErrors(**{when: self.median(of, when) for when in _WHENS}) for of in ("time", "memory")
            )
            rows.append(self._row("median size", time, memory, sign=False))
        yield from columns(rows)
        if len(self.runs) > 1:
            yield "left out: predicted with factors that were fitted to the other runs"

    @staticmethod
    def _row(name: str, time: PredictionErrors, memory: PredictionErrors, *, sign: bool = True) -> tuple[str, ...]:
        def shown(error: float | None) -> str:
            return "—" if error is None else ("+" if sign and error > 0 else "") + percent(error)

        return (name, *(shown(getattr(errors, when)) for errors in (time, memory) for when in _WHENS))


_WHENS = ("before", "after", "left_out")
