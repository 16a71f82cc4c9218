"""Fits the planner's factors to measured runs.

Seconds of a step and bytes of a rank are fitted separately, each by least squares on the logarithm of predicted over
measured, with Huber's loss (a run with an error above 20 % counts less) and weak regularization towards 1, because
there are few runs. A factor is fitted only if the runs determine it: it scales at least a tenth of the prediction, and
its share varies between the runs differently from that of the other factor. A fit is kept only if it helps: each run is
predicted with factors fitted to the others, and if the median error is larger than without factors, the fit is refused.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.pages import columns
from megatune.plan.case import Case
from megatune.plan.catalogue.own import calibration_path, write_calibration
from megatune.plan.estimate import estimate
from megatune.plan.machine import Calibration
from megatune.plan.pages.words import percent, size
from megatune.plan.run.record import RunRecord, comparable, read_records

_SEEN = 0.1  # least share of the prediction that a fitted factor scales
_APART = 0.05  # least difference between the shares of two factors that can be distinguished
_HUBER = 0.2  # residual above which a run counts less
_PULL = 0.003  # weight of the regularization, relative to one run
_RANGE = (0.02, 50.0)
# The factors of each measurement, the preferred one first, and its name in messages. "framework" is a number of bytes
# that is added, not a factor.
_FACTORS = {"time": ("compute", "communication"), "memory": ("framework", "activations")}
_WHAT = {"time": "of a step", "memory": "of a rank's memory"}
_ERRORS = tuple((of, when) for of in _FACTORS for when in ("before", "after", "left_out"))
_NEUTRAL = Calibration()

_Array: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """The fitted factors, and the errors of the runs with and without them.

    Attributes:
        runs: names of the folders, with the first step of a run that was resumed.
        errors: of each run, predicted over measured less 1; None if not measured. For the "time" of a step and the
            "memory" of the fullest rank: "before" and "after" the fit, and with the run "left_out" of the fit.
        left: why a factor was not changed, by its name in `Calibration`: the runs do not determine it, or the fit was
            refused.
        refused: fits that are not kept: "time", "memory".
    """

    device: str
    calibration: Calibration
    runs: tuple[str, ...]
    errors: Mapping[tuple[str, str], Sequence[float | None]]
    left: Mapping[str, str]
    refused: tuple[str, ...] = ()

    def median(self, of: str, when: str) -> float | None:
        """Return the median absolute error over all runs."""
        return _median(self.errors[of, when])

    def lines(self) -> Iterator[str]:
        """Yield the report for a terminal."""
        found, several = self.calibration, len(self.runs) > 1
        change = f"{size(abs(found.framework))} {'more' if found.framework >= 0 else 'less'}"
        values = {
            "compute": f"computing takes {found.compute:.2f} times as long as planned",
            "communication": f"communication takes {found.communication:.2f} times as long",
            "activations": f"activations and loss take {found.activations:.2f} times as much",
            "framework": f"{change} a rank in addition to tensors",
        }
        yield f"{self.device}, fitted to {len(self.runs)} run{'s' * several}"
        for name, text in values.items():
            yield f"  {name:<14} {f'as it is: {self.left[name]}' if name in self.left else text}"

        def shown(error: float | None, sign: str = "+") -> str:
            return "—" if error is None else (sign if error > 0 else "") + percent(error)

        head = ("error of", "step before", "after", "left out", "memory before", "after", "left out")
        errors = zip(*(self.errors[each] for each in _ERRORS), strict=True)
        rows = [head, *((name, *map(shown, each)) for name, each in zip(self.runs, errors, strict=True))]
        if several:
            rows.append(("median size", *(shown(self.median(*each), sign="") for each in _ERRORS)))
        yield from columns(rows)
        if several:
            yield "left out: predicted with factors fitted to the other runs"


def _median(errors: Sequence[float | None]) -> float | None:
    known = [abs(error) for error in errors if error is not None]
    return statistics.median(known) if known else None


@dataclass(frozen=True)
class _Run:
    """A measured process of a run: the cases of its mean and its longest row, the seconds of a step, pairs of a stage
    and the bytes of its fullest rank, and what these count; () if not measured."""

    name: str
    mean: Case
    longest: Case
    seconds: tuple[float, ...]
    memory: tuple[tuple[int, int], ...]
    counted: str

    def measured(self, of: str) -> tuple[float, ...]:
        """Return the measured seconds of a step, or bytes of stages."""
        return self.seconds if of == "time" else tuple(float(held) for _, held in self.memory)

    def predicted(self, of: str, calibration: Calibration) -> list[float]:
        """Predict what `measured` returns."""
        case = self.mean if of == "time" else self.longest
        planned = estimate(replace(case, machine=replace(case.machine, calibration=calibration)))
        if of == "time":
            return [planned.time.total for _ in self.seconds]
        return [float(comparable(planned.stages[stage], self.counted)) for stage, _ in self.memory]

    def error(self, of: str, calibration: Calibration | None) -> float | None:
        """Return predicted over measured less 1; None if not measured."""
        if calibration is None or not self.measured(of):
            return None
        return max(self.predicted(of, calibration)) / max(self.measured(of)) - 1


def calibrate(runs: Sequence[str | Path]) -> CalibrationReport:
    """Fit the factors for the device that these runs were on.

    Args:
        runs: folders of runs (output_dir); processes that measured a step are used.

    Raises:
        MegatuneError: INPUT, with every run that cannot be used, or if the runs are of several devices.
    """
    measured = _measured(runs)
    devices = sorted({run.mean.machine.device.name for run in measured})
    if len(devices) > 1:
        what = f"the runs are of several devices: {', '.join(devices)}"
        raise MegatuneError(Finding(what, fix="calibrate each device with its own runs"), ExitCode.INPUT)
    found: dict[str, Any] = {}
    left: dict[str, str] = {}
    refused: list[str] = []
    errors: dict[tuple[str, str], list[float | None]] = {}
    for of, names in _FACTORS.items():
        fitted, why = _fit(of, measured)
        others = [measured[:index] + measured[index + 1 :] for index in range(len(measured))]
        fits = [Calibration(**_fit(of, each)[0]) if each else None for each in others]
        errors[of, "before"] = [run.error(of, _NEUTRAL) for run in measured]
        errors[of, "left_out"] = [run.error(of, fit) for run, fit in zip(measured, fits, strict=True)]
        if worse := _worse(errors[of, "before"], errors[of, "left_out"]):
            fitted, why = {}, dict.fromkeys(names, worse)
            refused.append(of)
        errors[of, "after"] = [run.error(of, Calibration(**fitted)) for run in measured]
        found, left = found | fitted, left | why
    calibration = Calibration(**found, num_runs=len(measured))
    if refused and not (calibration.of_time or calibration.of_memory):
        calibration = _NEUTRAL
    return CalibrationReport(
        device=devices[0],
        calibration=calibration,
        runs=tuple(run.name for run in measured),
        errors=errors,
        left=left,
        refused=tuple(refused),
    )


def keep_first(run: Path) -> Path | None:
    """Store a run's memory beyond tensors for later plans on its device, if it has no calibration yet. Its seconds are
    not used: a first run may be too short.

    Returns:
        The file; None if none is written.

    Raises:
        MegatuneError: INPUT if the run measured nothing; CANNOT_WRITE.
    """
    measured = _measured([run])
    device = measured[0].mean.machine.device.name
    path = calibration_path(device)
    if path.exists() or not (framework := _fit("memory", measured)[0].get("framework", 0)):
        return None
    write_calibration(Calibration(framework=framework, num_runs=len(measured)), path, device)
    return path


def _worse(before: Sequence[float | None], left_out: Sequence[float | None]) -> str:
    """Return why a fit is refused; "" if it helps the runs that were left out of it, or if this is unknown."""
    pairs = [pair for pair in zip(before, left_out, strict=True) if None not in pair]
    old, new = (_median([pair[index] for pair in pairs]) for index in (0, 1))
    if old is None or new is None or new <= old:
        return ""
    return f"refused: runs that were left out of the fit are off by {percent(new)} with it, by {percent(old)} without"


def _measured(runs: Sequence[str | Path]) -> list[_Run]:
    found: list[_Run] = []
    findings: list[Finding] = []
    for folder in map(Path, runs):
        try:
            records = read_records(folder)
        except MegatuneError as error:
            findings.extend(error.findings)
            continue
        usable = [run for record in records if (run := _run(folder.name, record)) is not None]
        if not usable:
            findings.append(Finding("no step of it was measured", str(folder), fix="give a run that trained"))
        found += usable
    if not found and not findings:
        findings = [Finding("no runs are given", fix="megatune plan --calibrate OUTPUT ...")]
    if findings:
        raise MegatuneError(findings, ExitCode.INPUT)
    return found


def _run(folder: str, record: RunRecord) -> _Run | None:
    measured, trained = record.measured, record.as_trained()
    if measured is None or trained is None or (measured.step_seconds is None and not measured.stages):
        return None
    longest, mean = trained
    # Stages without a measurement are not compared. Overhead is counted if all stages have it.
    stages = [each for each in measured.stages if each.peak]
    is_whole = bool(stages) and all(each.overhead for each in stages)
    memory = tuple((each.stage, each.peak + (each.overhead if is_whole else 0)) for each in stages)
    counted = "resident" if is_whole else measured.counted
    name = folder if not record.first_step else f"{folder} from step {record.first_step}"
    seconds = (measured.step_seconds,) if measured.step_seconds else ()
    return _Run(name, mean.case, longest.case, seconds, memory, counted)


def _fit(of: str, runs: Sequence[_Run]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of `Calibration` fitted to one kind of measurement, and why the others are not fitted."""
    measured = np.array([value for run in runs for value in run.measured(of)])
    if not len(measured):
        what = "no memory was measured" if of == "memory" else "no step was measured"
        return {}, dict.fromkeys(_FACTORS[of], what)
    scale = float(measured.min())  # the unknowns are logarithms of factors, or bytes in this unit

    def calibration(names: Sequence[str], unknowns: Sequence[float]) -> Calibration:
        fields: dict[str, Any] = {
            name: int(scale * value) if name == "framework" else math.exp(value)
            for name, value in zip(names, unknowns, strict=True)
        }
        return Calibration(**fields)

    def predicted(fitted: Calibration) -> _Array:
        return np.array([value for run in runs for value in run.predicted(of, fitted)])

    base, step = predicted(_NEUTRAL), 0.01
    shares = {name: (predicted(calibration([name], [step])) / base - 1) / step for name in _FACTORS[of]}
    known, left = _identified(shares, _WHAT[of])
    if of == "memory" and not shares["framework"].any():
        left["framework"] = "an allocator that counts tensors does not measure it"

    def residuals(unknowns: _Array) -> _Array:
        return np.log(np.maximum(predicted(calibration(known, unknowns.tolist())) / measured, 0.01))

    if not known:
        return {}, left
    fitted = calibration(known, _least_squares(residuals, len(known)).tolist())
    return {name: value if name == "framework" else round(value, 4)
            for name, value in asdict(fitted).items() if name in known}, left  # fmt: skip


def _identified(shares: Mapping[str, _Array], what: str) -> tuple[list[str], dict[str, str]]:
    """Return which of two factors the runs determine, preferring the first, and why not the others; `shares` are the
    relative changes of each run's prediction by each factor."""
    known = [name for name, share in shares.items() if share.max() >= _SEEN]
    left = {name: f"it is less than {_SEEN:.0%} {what} in all of these runs" for name in shares if name not in known}
    if len(known) == 2:
        first, second = shares.values()
        apart = second - (first @ second) / (first @ first) * first
        if math.sqrt(float(np.mean(apart**2))) < _APART:
            name = known.pop()
            left[name] = f"these runs do not distinguish it from {known[0]}: add runs in which its share differs"
    return known, left


def _least_squares(residuals: Callable[[_Array], _Array], count: int) -> _Array:
    """Solve for the unknowns from 0, with Huber's loss and regularization towards 0."""
    from scipy.optimize import approx_fprime, least_squares  # takes half a second to import

    def regularized(unknowns: _Array) -> _Array:
        return np.append(residuals(unknowns), math.sqrt(_PULL) * unknowns)

    def slopes(unknowns: _Array) -> _Array:
        return approx_fprime(unknowns, regularized, 1e-3)  # the default step is below the rounding of bytes

    bounds = np.log(_RANGE)
    return least_squares(regularized, np.zeros(count), slopes, bounds, loss="huber", f_scale=_HUBER).x
