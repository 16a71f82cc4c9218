"""Fits the planner's factors to measured runs.

Seconds of a step and bytes of a rank are fitted apart, each by least squares on the logarithm of predicted over
measured, with Huber's weights (a run beyond 20 % counts less) and a weak pull towards 1, so that few runs do not lead
far astray. A factor is fitted only where the runs can tell it: where what it scales is a tenth of what was measured,
and moves apart from what the other factor scales.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
_ERRORS = tuple((of, when) for of in ("time", "memory") for when in ("before", "after", "left_out"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """Factors, and how much better they predict the runs they were fitted to.

    Attributes:
        runs: names of folders, with the step it resumed from where there are several processes in one.
        errors: of each run, predicted over measured, less 1; None where nothing was measured. Of the "time" of a step
            and the "memory" of the fullest rank, "before", "after", and "left_out" of the runs that were fitted.
        left: why a factor was left as it is, of those that the runs could not tell, by its name in `Calibration`.
    """

    device: str
    calibration: Calibration
    runs: tuple[str, ...]
    errors: Mapping[tuple[str, str], Sequence[float | None]]
    left: Mapping[str, str]

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
            "communication": f"exchanges take {found.communication:.2f} times as long",
            "activations": f"activations and loss take {found.activations:.2f} times as much",
            "framework": f"{beside} a rank beside tensors",
        }
        yield f"{self.device}, fitted to {found.num_runs} run{'s' * (found.num_runs != 1)}"
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
    errors: dict[tuple[str, str], list[float | None]] = {each: [] for each in _ERRORS}
    for index, run in enumerate(measured):
        others = measured[:index] + measured[index + 1 :]
        fits = {"before": Calibration(), "after": calibration, "left_out": _fit(others)[0] if others else None}
        for of, when in _ERRORS:
            fitted = fits[when]
            errors[of, when].append(None if fitted is None else run.error(of, fitted))
    names = tuple(run.name for run in measured)
    return CalibrationReport(device=devices[0], calibration=calibration, runs=names, errors=errors, left=left)


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
    # A stage whose ranks did not tell is not compared.
    memory = tuple((each.stage, each.peak) for each in measured.stages if each.peak)
    name = folder if not record.first_step else f"{folder} from step {record.first_step}"
    return _Run(name, mean, longest, measured.step_seconds, memory, measured.counted)


def _calibrated(case: Case, calibration: Calibration) -> Case:
    return replace(case, machine=replace(case.machine, calibration=calibration))


def _fit(runs: Sequence[_Run]) -> tuple[Calibration, dict[str, str]]:
    """Return the factors, and why some of them are as they were."""
    time, left = _fit_time([run for run in runs if run.seconds])
    memory, also_left = _fit_memory([run for run in runs if run.memory])
    return Calibration(**time, **memory, num_runs=len(runs)), {**left, **also_left}


def _fit_time(runs: Sequence[_Run]) -> tuple[dict[str, Any], dict[str, str]]:
    """Fit the factors of computing and of exchanges."""
    neutral = Calibration()
    base = [run.step(neutral) for run in runs]
    shares = [
        [(run.step(each) / step - 1) / 0.01 for run, step in zip(runs, base, strict=True)]
        for each in (Calibration(compute=1.01), Calibration(communication=1.01))
    ]
    known, left = _identified(shares, ("compute", "communication"), "of a step")

    def residuals(logs: Sequence[float]) -> list[float]:
        factors: dict[str, Any] = dict(zip(known, map(math.exp, logs), strict=True))
        fitted = Calibration(**factors)
        return [math.log(run.step(fitted) / run.seconds) for run in runs if run.seconds]

    logs = _least_squares(residuals, len(known))
    return {name: round(math.exp(log), 4) for name, log in zip(known, logs, strict=True)}, left


def _fit_memory(runs: Sequence[_Run]) -> tuple[dict[str, Any], dict[str, str]]:
    """Fit the factor of activations, and the bytes beside tensors where those were measured."""
    neutral = Calibration()
    base = [size for run in runs for size in run.stages(neutral)]
    double = [size for run in runs for size in run.stages(replace(neutral, activations=2.0))]
    beside = [float(run.counted == "resident") for run in runs for _ in run.memory]
    measured = [float(size) for run in runs for _, size in run.memory]
    kept = [after - before for before, after in zip(base, double, strict=True)]
    if not measured:
        return {}, dict.fromkeys(("activations", "framework"), "no memory was measured")
    # What is beside tensors is fitted first: every run of a CPU has it. It is a sum, not a factor.
    scale = min(measured)
    shares = [
        [scale * each / size for each, size in zip(beside, measured, strict=True)],
        [each / size for each, size in zip(kept, measured, strict=True)],
    ]
    known, left = _identified(shares, ("framework", "activations"), "of a rank's memory")
    if not any(beside):
        left["framework"] = "an allocator that counts tensors does not see it"

    def residuals(unknowns: Sequence[float]) -> list[float]:
        values = dict(zip(known, unknowns, strict=True))
        factor, extra = math.exp(values.get("activations", 0.0)), scale * values.get("framework", 0.0)
        return [
            math.log(max(before + (factor - 1) * act + extra * has, 0.01 * size) / size)
            for before, act, has, size in zip(base, kept, beside, measured, strict=True)
        ]

    values = dict(zip(known, _least_squares(residuals, len(known)), strict=True))
    factor = round(math.exp(values.get("activations", 0.0)), 4)
    return {"activations": factor, "framework": int(scale * values.get("framework", 0.0))}, left


def _identified(shares: list[list[float]], names: tuple[str, str], what: str) -> tuple[list[str], dict[str, str]]:
    """Return which of two unknowns the runs determine, the first one by preference, and why not the others, by how much
    each moves each run's measurement, relative."""
    known, left = [], {}
    for name, share in zip(names, shares, strict=True):
        if not share or max(share) < _SEEN:
            left[name] = f"it is less than {_SEEN:.0%} {what} in all of these runs"
        else:
            known.append(name)
    if len(known) == 2:
        first, second = shares
        ratio = sum(a * b for a, b in zip(first, second, strict=True)) / sum(a * a for a in first)
        apart = math.sqrt(sum((b - ratio * a) ** 2 for a, b in zip(first, second, strict=True)) / len(first))
        if apart < _APART:
            left[known.pop()] = f"these runs cannot tell it from {names[0]}: give some where its share differs"
    return known, left


def _least_squares(residuals: Callable[[Sequence[float]], list[float]], count: int) -> list[float]:
    """Solve for at most two unknowns, from 0: Gauss-Newton with Huber's weights and a pull towards 0."""
    unknowns = [0.0] * count
    if not count:
        return unknowns
    low, high = map(math.log, _RANGE)
    for _ in range(30):
        now = residuals(unknowns)
        weights = [min(1.0, _HUBER / abs(each)) if each else 1.0 for each in now]
        slopes = []
        for index in range(count):
            moved = [each + 1e-3 * (index == other) for other, each in enumerate(unknowns)]
            slopes.append([(after - before) / 1e-3 for before, after in zip(now, residuals(moved), strict=True)])
        normal = [
            [
                sum(w * a * b for w, a, b in zip(weights, one, other, strict=True)) + _PULL * (i == j)
                for j, other in enumerate(slopes)
            ]
            for i, one in enumerate(slopes)
        ]
        right = [
            -sum(w * a * r for w, a, r in zip(weights, slope, now, strict=True)) - _PULL * unknown
            for slope, unknown in zip(slopes, unknowns, strict=True)
        ]
        step = _solve(normal, right)
        unknowns = [
            min(high, max(low, each + max(-1.0, min(1.0, move)))) for each, move in zip(unknowns, step, strict=True)
        ]
        if max(map(abs, step)) < 1e-5:
            break
    return unknowns


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve one or two linear equations."""
    if len(right) == 1:
        return [right[0] / matrix[0][0]]
    (a, b), (c, d) = matrix
    determinant = a * d - b * c
    return [(right[0] * d - b * right[1]) / determinant, (a * right[1] - right[0] * c) / determinant]
