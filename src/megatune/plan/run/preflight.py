"""Checks a run before any process is started: settings, model, world, and whether it fits."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from megatune.config.load import Loaded
from megatune.config.settings import Settings
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import load_architecture
from megatune.plan.case import Case, PlannedModel
from megatune.plan.changes.fixes import savings, searched
from megatune.plan.changes.variation import with_settings
from megatune.plan.estimate import Estimate, estimate
from megatune.plan.machine import Machine
from megatune.plan.pages.words import fullest, largest_part, layout_words, parts, percent, seconds, size
from megatune.plan.run.warnings import warnings
from megatune.plan.uncertainty import least_and_most

_SEARCHED = 256  # processes up to which a search for another layout takes no time to speak of
_ROW_STEP = 64  # tokens; lengths between are not worth telling apart


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """A run that may start.

    Attributes:
        settings: valid ones.
        planned: None where nobody knows the machine, or memory_check is off.
        lines: what to tell the user, under the same names as the lines that a run begins with.
    """

    settings: Settings
    planned: Estimate | None = None
    lines: tuple[str, ...] = ()


def preflight(
    loaded: Loaded,
    world_size: int | None,
    extra: tuple[Finding, ...] = (),
    machine: Machine | None = None,
    *,
    idle_gpus: int = 0,
    model_dir: Callable[[str], Path | None] = Path,
) -> Preflight:
    """Hold the settings against the model, the world and the machine.

    Args:
        world_size: processes of the whole run; None where they could not be decided.
        extra: what was found wrong on the way here, reported along.
        machine: what the run is started on; None where that is not known, so that nothing is planned.
        idle_gpus: GPUs that the run leaves alone.
        model_dir: the folder with config.json of a model_name_or_path; None where it is not to be read here.

    Raises:
        MegatuneError: SETTINGS with everything that is wrong, or with what cannot fit; what the model is refused with
            where nothing else is wrong.
    """
    architecture, refusal = None, None
    path = loaded.settings.model.model_name_or_path
    if path is not None:
        try:
            folder = model_dir(path)
            architecture = load_architecture(folder) if folder is not None else None
        except MegatuneError as error:
            refusal = error
    findings = [*loaded.check(architecture, world_size), *extra]
    if findings:
        raise MegatuneError([*findings, *(refusal.findings if refusal else ())], ExitCode.SETTINGS)
    if refusal is not None:
        raise refusal
    settings = loaded.settings
    if machine is None or architecture is None or world_size is None or settings.run.memory_check == "off":
        return Preflight(settings=settings)
    model = PlannedModel(name=str(path), architecture=architecture)
    planned = estimate(Case(model=model, settings=settings, world_size=world_size, machine=machine))
    if planned.fits:
        said: Iterable[str] = warnings(planned, idle_gpus)
    else:
        finding = too_large(planned)
        if may_fit(planned):
            said = [str(finding)]
        elif settings.run.memory_check == "error":
            raise MegatuneError(loaded.phrased(finding), ExitCode.SETTINGS)
        else:
            said = [f"{finding.what}; memory_check: warn lets it start"]
    return Preflight(
        settings=settings,
        planned=planned,
        lines=(*plan_lines(planned), *(f"warning    {loaded.advice(each)}" for each in said)),
    )


def plan_lines(planned: Estimate) -> tuple[str, str]:
    """Return layout and batch, and below them memory and time."""
    case, time = planned.case, planned.time
    runs = case.machine.calibration.num_runs
    fitted = f", fitted to {runs} run{'s' * (runs > 1)}" if runs else ""
    rows = f"{case.micro_batch_size} × {case.num_micro_batches} × dp {case.dp_size} = {case.global_batch_size} rows"
    return (
        f"plan       {layout_words(case)} on {case.world_size} × {case.machine.device.name}; {rows} a step, of up to"
        f" {case.sequence_length:,} tokens",
        f"plan       {fullest(planned)} ({parts(planned.fullest)}); about {seconds(time.total)} a step"
        f" ±{percent(time.uncertainty)}{fitted}",
    )


def longest_row(planned: Estimate) -> int:
    """Return the tokens of the longest rows that fit, with everything else as it is; 0 where hardly any do."""
    multiple = math.lcm(planned.case.settings.parallel.sequence_multiple, _ROW_STEP)

    def is_too_long(count: int) -> bool:
        settings = with_settings(planned.case.settings, {"data.cutoff_len": count * multiple})
        return not estimate(replace(planned.case, settings=settings)).fits

    counts = range(1, planned.case.sequence_length // multiple + 1)
    return multiple * bisect.bisect_left(counts, True, key=is_too_long)


def may_fit(planned: Estimate) -> bool:
    """Return whether every rank's bytes are there at the lower end of the plan's uncertainty."""
    return least_and_most(planned.case, planned.stages)[0] <= planned.case.machine.device.memory


def too_large(planned: Estimate) -> Finding:
    """Say why a planned run cannot fit, or may not: its largest part, and the cheapest changes with what they do."""
    stage, device = planned.fullest, planned.case.machine.device
    name, held = largest_part(stage)
    which = f"stage {stage.stage} of {len(planned.stages)}" if len(planned.stages) > 1 else "each rank"
    fixes = savings(planned)
    state = stage.weights + stage.gradients + stage.master_weights + stage.optimizer_state
    why = f"the largest part is {name}, {size(held)}; all: {parts(stage)}; for rows of"
    why += f" {planned.case.sequence_length:,} tokens"
    if state > device.memory:
        why += f"; weights, gradients and optimizer alone take {size(state)}, whatever the batch"
    head = "one of"
    if not any(fix.after.fits for fix in fixes):
        head = "no one or two changes are enough; what helps most"
        if planned.case.world_size <= _SEARCHED and (layout := searched(planned)) is not None:
            head, fixes = "the layout that fits and is fastest", [layout]
    lines = [f"{head}:", *(f"        {each}" for each in fixes)] if fixes else []
    if longest := longest_row(planned):
        lines.append(
            f"        cutoff_len: {longest}, the longest rows that fit: memory is planned for rows of that length"
        )
    lines.append("        megatune plan searches all layouts for this machine, or for another one")
    least, most = map(size, least_and_most(planned.case, planned.stages))
    if may_fit(planned):
        what = f"this run may not fit: {which} is planned to hold {size(stage.total)}, between {least} and {most}"
    else:
        what = f"this run cannot fit: {which} would hold {size(stage.total)}, {least} at least"
        lines.append("        memory_check: warn starts it all the same, as for rows that are shorter than cutoff_len")
    return Finding(f"{what}, and {device.name} has {size(device.memory)}", why=why, fix="\n".join(lines).strip())
