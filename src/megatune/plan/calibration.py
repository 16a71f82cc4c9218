"""Fits the planner's factors to measured runs.

Seconds of a step and bytes of a rank are fitted apart, each by least squares on the logarithm of predicted over
measured, with Huber's weights (a run beyond 20 % counts less) and a weak pull towards 1, so that few runs do not lead
far astray. A factor is fitted only where the runs can tell it: where what it scales is a tenth of what is predicted,
and moves apart from what the other factor scales. And it is kept only where it helps: each run is predicted with
factors that were fitted to the others, and where that is farther off in the median than no factors are, the fit is
refused.
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
from megatune.plan.case import Case
from megatune.plan.catalogue.own import calibration_path, write_calibration
from megatune.plan.estimate import estimate
from megatune.plan.machine import Calibration
from megatune.plan.pages.words import columns, percent, size
from megatune.plan.run.record import RunRecord, comparable, read_records

_SEEN = 0.1  # share of the predicted that a factor must scale, to be fitted
_APART = 0.05  # how far two factors' shares must move apart between runs, to be distinguished from each other
_HUBER = 0.2  # residual from which a run counts less
_PULL = 0.003  # weight of the pull towards 1, of one run's weight
_RANGE = (0.02, 50.0)
# What is fitted to each measurement, the one that is preferred first, and what that is of. Every run of a CPU has bytes
# beyond tensors, which are a sum and not a factor.
_FACTORS = {"time": ("compute", "communication"), "memory": ("framework", "activations")}
_WHAT = {"time": "of a step", "memory": "of a rank's memory"}
_ERRORS = tuple((of, when) for of in _FACTORS for when in ("before", "after", "left_out"))
_NEUTRAL = Calibration()

_Array: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """Factors, and how much better they predict the runs they were fitted to.

    Attributes:
        runs: names of folders, with the step it resumed from where there are several processes in one.
        errors: of each run, predicted over measured, less 1; None where nothing was measured. Of the "time" of a step
            and the "memory" of the fullest rank, "before", "after", and "left_out" of the runs that were fitted.
        left: why a factor was left as it is, of those that the runs could not tell and of a refused fit, by its name in
            `Calibration`.
        refused: what was fitted and is not kept: "time", "memory".
    """

    device: str
    calibration: Calibration
    runs: tuple[str, ...]
    errors: Mapping[tuple[str, str], Sequence[float | None]]
    left: Mapping[str, str]
    refused: tuple[str, ...] = ()

    def median(self, of: str, when: str) -> float | None:
        """Return the median size of an error over all runs."""
        return _median(self.errors[of, when])

    def lines(self) -> Iterator[str]:
        """Yield the report for a terminal."""
        found, several = self.calibration, len(self.runs) > 1
        beside = f"{size(abs(found.framework))} {'more' if found.framework >= 0 else 'less'}"
        values = {
            "compute": f"computing takes {found.compute:.2f} times as long as planned",
            "communication": f"communication takes {found.communication:.2f} times as long",
            "activations": f"activations and loss take {found.activations:.2f} times as much",
            "framework": f"{beside} a rank in addition to tensors",
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
            yield "left out: predicted with factors that were fitted to the other runs"


def _median(errors: Sequence[float | None]) -> float | None:
    known = [abs(error) for error in errors if error is not None]
    return statistics.median(known) if known else None


@dataclass(frozen=True)
class _Run:
    """A measured process of a run: cases of the rows as they were, the seconds of a step, stages with the bytes of
    their fullest ranks, and what these count; () where nothing was measured."""

    name: str
    mean: Case
    longest: Case
    seconds: tuple[float, ...]
    memory: tuple[tuple[int, int], ...]
    counted: str

    def measured(self, of: str) -> tuple[float, ...]:
        """Return the seconds of a step, or bytes of the stages that were measured."""
        return self.seconds if of == "time" else tuple(float(held) for _, held in self.memory)

    def predicted(self, of: str, calibration: Calibration) -> list[float]:
        """Predict what `measured` returns."""
        case = self.mean if of == "time" else self.longest
        planned = estimate(replace(case, machine=replace(case.machine, calibration=calibration)))
        if of == "time":
            return [planned.time.total for _ in self.seconds]
        return [float(comparable(planned.stages[stage], self.counted)) for stage, _ in self.memory]

    def error(self, of: str, calibration: Calibration | None) -> float | None:
        """Return predicted over measured, less 1; None where it was not measured."""
        if calibration is None or not self.measured(of):
            return None
        return max(self.predicted(of, calibration)) / max(self.measured(of)) - 1


def calibrate(runs: Sequence[str | Path]) -> CalibrationReport:
    """Fit the factors for the device that these runs were on.

    Args:
        runs: folders of runs (output_dir); a process that trained a step and lived to note it counts.

    Raises:
        MegatuneError: INPUT, with every run that cannot be used; where they are of several devices.
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
    """Keep what a run held beyond tensors for later plans on its device, where nothing was fitted to that before; its
    seconds are not taken: a first run may be too short for these.

    Returns:
        The file; None where none is written.

    Raises:
        MegatuneError: INPUT, where the run measured nothing; CANNOT_WRITE.
    """
    measured = _measured([run])
    device = measured[0].mean.machine.device.name
    path, framework = calibration_path(device), _fit("memory", measured)[0].get("framework", 0)
    if path.exists() or not framework:
        return None
    write_calibration(Calibration(framework=framework, num_runs=len(measured)), path, device)
    return path


def _worse(before: Sequence[float | None], left_out: Sequence[float | None]) -> str:
    """Return why a fit is not kept; "" where it is: it helps runs that it was not made of, or there is no telling."""
    pairs = [pair for pair in zip(before, left_out, strict=True) if None not in pair]
    old, new = (_median([pair[place] for pair in pairs]) for place in (0, 1))
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
    # A stage whose ranks did not tell is not compared. With what is beyond tensors all is counted.
    told = [each for each in measured.stages if each.peak]
    is_whole = bool(told) and all(each.overhead for each in told)
    memory = tuple((each.stage, each.peak + (each.overhead if is_whole else 0)) for each in told)
    counted = "resident" if is_whole else measured.counted
    name = folder if not record.first_step else f"{folder} from step {record.first_step}"
    seconds = (measured.step_seconds,) if measured.step_seconds else ()
    return _Run(name, mean.case, longest.case, seconds, memory, counted)


def _fit(of: str, runs: Sequence[_Run]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of `Calibration` that are fitted to one kind of measurement, and why others are as they are."""
    measured = np.array([value for run in runs for value in run.measured(of)])
    if not len(measured):
        what = "no memory was measured" if of == "memory" else "no step was measured"
        return {}, dict.fromkeys(_FACTORS[of], what)
    scale = float(measured.min())  # unknowns are logarithms of factors, and bytes in this unit

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
        left["framework"] = "an allocator that counts tensors does not see it"

    def residuals(unknowns: _Array) -> _Array:
        return np.log(np.maximum(predicted(calibration(known, unknowns.tolist())) / measured, 0.01))

    fitted = calibration(known, _least_squares(residuals, len(known)).tolist())
    return {name: value if name == "framework" else round(value, 4)
            for name, value in asdict(fitted).items() if name in known}, left  # fmt: skip


def _identified(shares: Mapping[str, _Array], what: str) -> tuple[list[str], dict[str, str]]:
    """Return which of two unknowns the runs determine, the first one by preference, and why not the others, by how much
    each moves each run's measurement, relative."""
    known = [name for name, share in shares.items() if share.max() >= _SEEN]
    left = {name: f"it is less than {_SEEN:.0%} {what} in all of these runs" for name in shares if name not in known}
    if len(known) == 2:
        first, second = shares.values()
        apart = second - (first @ second) / (first @ first) * first
        if math.sqrt(float(np.mean(apart**2))) < _APART:
            name = known.pop()
            left[name] = f"these runs cannot tell it from {known[0]}: give some where its share differs"
    return known, left


def _least_squares(residuals: Callable[[_Array], _Array], count: int) -> _Array:
    """Solve for the unknowns, from 0: Gauss-Newton with Huber's weights and a pull towards 0."""
    unknowns = np.zeros(count)
    for _ in range(30 if count else 0):
        now = residuals(unknowns)
        weights = np.minimum(1.0, _HUBER / np.maximum(np.abs(now), 1e-12))
        slopes = np.stack([(residuals(unknowns + move) - now) / 1e-3 for move in 1e-3 * np.eye(count)], axis=1)
        normal = slopes.T @ (weights[:, None] * slopes) + _PULL * np.eye(count)
        step = np.linalg.solve(normal, -slopes.T @ (weights * now) - _PULL * unknowns)
        unknowns = np.clip(unknowns + np.clip(step, -1.0, 1.0), math.log(_RANGE[0]), math.log(_RANGE[1]))
        if np.abs(step).max() < 1e-5:
            break
    return unknowns
