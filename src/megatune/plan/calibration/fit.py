"""Fits the planner's factors to measured runs.

Seconds of a step and bytes of a rank are fitted apart, each by least squares on the logarithm of predicted over
measured, with Huber's weights (a run beyond 20 % counts less) and a weak pull towards 1, so that few runs do not lead
far astray. A factor is fitted only where the runs can tell it: where what it scales is a tenth of what was measured,
and moves apart from what the other factor scales. And it is kept only where it helps: each run is predicted with
factors that were fitted to the others, and where that is farther off in the median than no factors are, the fit is
refused.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.case import Case
from megatune.plan.estimate import estimate
from megatune.plan.machine import Calibration
from megatune.plan.pages.words import columns, percent, size
from megatune.plan.run.record import RunRecord, comparable, read_records

_SEEN = 0.1  # share of the measured that a factor must scale, to be fitted
_APART = 0.05  # how far two factors' shares must move apart between runs, to be distinguished from each other
_HUBER = 0.2  # residual from which a run counts less
_PULL = 0.003  # weight of the pull towards 1, of one run's weight
_RANGE = (0.02, 50.0)
_FACTORS = {"time": ("compute", "communication"), "memory": ("activations", "framework")}
_ERRORS = tuple((of, when) for of in ("time", "memory") for when in ("before", "after", "left_out"))


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
        known = [abs(error) for error in self.errors[of, when] if error is not None]
        return statistics.median(known) if known else None

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


@dataclass(frozen=True)
class _Run:
    """A measured process of a run: cases of the rows as they were, without calibration."""

    name: str
    mean: Case
    longest: Case
    seconds: float | None
    memory: tuple[tuple[int, int], ...]  # stage and bytes of its fullest rank
    counted: str

    def step(self, calibration: Calibration) -> float:
        return estimate(_calibrated(self.mean, calibration)).time.total

    def stages(self, calibration: Calibration) -> list[float]:
        """Predicted bytes of the stages that were measured."""
        stages = estimate(_calibrated(self.longest, calibration)).stages
        return [float(comparable(stages[stage], self.counted)) for stage, _ in self.memory]

    def error(self, of: str, calibration: Calibration) -> float | None:
        """Return predicted over measured "time" or "memory", less 1; None where it was not measured."""
        if of == "time":
            return self.step(calibration) / self.seconds - 1 if self.seconds else None
        return max(self.stages(calibration)) / max(size for _, size in self.memory) - 1 if self.memory else None


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
    calibration, left = _fit(measured)
    others = [measured[:index] + measured[index + 1 :] for index in range(len(measured))]
    fits = [_fit(each)[0] if each else None for each in others]
    errors: dict[tuple[str, str], list[float | None]] = {}
    for of in _FACTORS:
        errors[of, "before"] = [run.error(of, Calibration()) for run in measured]
        errors[of, "left_out"] = [run.error(of, fit) if fit else None for run, fit in zip(measured, fits, strict=True)]
    refused = {of: why for of in _FACTORS if (why := _worse(errors[of, "before"], errors[of, "left_out"]))}
    calibration, left = _without(calibration, refused), {**left, **_of_factors(refused)}
    for of in _FACTORS:
        errors[of, "after"] = [run.error(of, calibration) for run in measured]
    names = tuple(run.name for run in measured)
    return CalibrationReport(
        device=devices[0], calibration=calibration, runs=names, errors=errors, left=left, refused=tuple(refused)
    )


def _worse(before: Sequence[float | None], left_out: Sequence[float | None]) -> str:
    """Return why a fit is not kept; "" where it is: it helps runs that it was not made of, or there is no telling."""
    both = [
        (abs(old), abs(new)) for old, new in zip(before, left_out, strict=True) if old is not None and new is not None
    ]
    if not both:
        return ""
    old, new = map(statistics.median, zip(*both, strict=True))
    if new <= old:
        return ""
    return f"refused: runs that were left out of the fit are off by {percent(new)} with it, by {percent(old)} without"


def _without(calibration: Calibration, refused: Mapping[str, str]) -> Calibration:
    """Return the factors without those of a refused fit; neutral ones where none is left."""
    kept = replace(calibration, **{name: getattr(Calibration(), name) for name in _of_factors(refused)})
    return Calibration() if refused and not (kept.of_time or kept.of_memory) else kept


def _of_factors(refused: Mapping[str, str]) -> dict[str, str]:
    return {name: why for of, why in refused.items() for name in _FACTORS[of]}


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
    if findings:
        raise MegatuneError(findings, ExitCode.INPUT)
    if not found:
        raise MegatuneError(Finding("no runs are given", fix="megatune plan --calibrate OUTPUT ..."), ExitCode.INPUT)
    return found


def _run(folder: str, record: RunRecord) -> _Run | None:
    measured, trained = record.measured, record.as_trained()
    if measured is None or trained is None or (measured.step_seconds is None and not measured.stages):
        return None
    longest, mean = (_calibrated(each.case, Calibration()) for each in trained)
    # A stage whose ranks did not tell is not compared. With what is beyond tensors all is counted.
    told = [each for each in measured.stages if each.peak]
    is_whole = bool(told) and all(each.overhead for each in told)
    memory = tuple((each.stage, each.peak + (each.overhead if is_whole else 0)) for each in told)
    counted = "resident" if is_whole else measured.counted
    name = folder if not record.first_step else f"{folder} from step {record.first_step}"
    return _Run(name, mean, longest, measured.step_seconds, memory, counted)


def _calibrated(case: Case, calibration: Calibration) -> Case:
    return replace(case, machine=replace(case.machine, calibration=calibration))


def _fit(runs: Sequence[_Run]) -> tuple[Calibration, dict[str, str]]:
    """Return the factors, and why some of them are as they were."""
    time, left = _fit_time([run for run in runs if run.seconds])
    memory, also_left = _fit_memory([run for run in runs if run.memory])
    return Calibration(**time, **memory, num_runs=len(runs)), {**left, **also_left}


def _fit_time(runs: Sequence[_Run]) -> tuple[dict[str, Any], dict[str, str]]:
    """Fit the factors of computing and of exchanges."""
    base = np.array([run.step(Calibration()) for run in runs])
    shares = [
        (np.array([run.step(each) for run in runs]) / base - 1) / 0.01
        for each in (Calibration(compute=1.01), Calibration(communication=1.01))
    ]
    known, left = _identified(shares, ("compute", "communication"), "of a step")
    measured = np.array([run.seconds for run in runs])

    def residuals(logs: _Array) -> _Array:
        fitted = Calibration(**dict(zip(known, map(float, np.exp(logs)), strict=True)))  # type: ignore[arg-type]
        return np.log(np.array([run.step(fitted) for run in runs]) / measured)

    logs = _least_squares(residuals, len(known))
    return {name: round(math.exp(log), 4) for name, log in zip(known, logs, strict=True)}, left


def _fit_memory(runs: Sequence[_Run]) -> tuple[dict[str, Any], dict[str, str]]:
    """Fit the factor of activations, and the bytes beyond tensors where those were measured."""
    neutral = Calibration()
    base = np.array([size for run in runs for size in run.stages(neutral)])
    double = np.array([size for run in runs for size in run.stages(replace(neutral, activations=2.0))])
    beyond = np.array([float(run.counted == "resident") for run in runs for _ in run.memory])
    measured = np.array([float(size) for run in runs for _, size in run.memory])
    if not len(measured):
        return {}, dict.fromkeys(("activations", "framework"), "no memory was measured")
    kept = double - base
    # What is beyond tensors is fitted first: every run of a CPU has it. It is a sum, not a factor.
    scale = float(measured.min())
    known, left = _identified(
        [scale * beyond / measured, kept / measured], ("framework", "activations"), "of a rank's memory"
    )
    if not beyond.any():
        left["framework"] = "an allocator that counts tensors does not see it"

    def residuals(unknowns: _Array) -> _Array:
        values = dict(zip(known, map(float, unknowns), strict=True))
        factor, extra = math.exp(values.get("activations", 0.0)), scale * values.get("framework", 0.0)
        return np.log(np.maximum(base + (factor - 1) * kept + extra * beyond, 0.01 * measured) / measured)

    values = dict(zip(known, map(float, _least_squares(residuals, len(known))), strict=True))
    factor = round(math.exp(values.get("activations", 0.0)), 4)
    return {"activations": factor, "framework": int(scale * values.get("framework", 0.0))}, left


def _identified(shares: list[_Array], names: tuple[str, str], what: str) -> tuple[list[str], dict[str, str]]:
    """Return which of two unknowns the runs determine, the first one by preference, and why not the others, by how much
    each moves each run's measurement, relative."""
    seen = [bool(len(share)) and share.max() >= _SEEN for share in shares]
    known = [name for name, is_seen in zip(names, seen, strict=True) if is_seen]
    left = {name: f"it is less than {_SEEN:.0%} {what} in all of these runs" for name in names if name not in known}
    if len(known) == 2:
        first, second = shares
        apart = second - (first @ second) / (first @ first) * first
        if math.sqrt(float(np.mean(apart**2))) < _APART:
            left[known.pop()] = f"these runs cannot tell it from {names[0]}: give some where its share differs"
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
