"""Checks a run before any process is started: settings, model, world, memory, and possible improvements."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatune.architecture import Architecture
from megatune.config.derived import with_adapter_settings, with_model_defaults
from megatune.config.load import Loaded
from megatune.config.rules.finetuning import warnings
from megatune.config.rules.rule import unused
from megatune.config.settings import Settings, with_settings
from megatune.config.values import counted
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import load_architecture
from megatune.plan.case import Case, PlannedModel
from megatune.plan.estimate import Estimate, estimate
from megatune.plan.fixes import Fix, fastest_layout, savings, try_change, warnings_of
from megatune.plan.machine import Machine
from megatune.plan.pages.words import (
    describe_generation,
    describe_host_memory,
    describe_layout,
    describe_lengths,
    describe_media,
    describe_reference_passes,
    describe_row_length,
    fullest,
    largest_part,
    parts,
    percent,
    seconds,
    size,
)
from megatune.plan.rows import RowLengths
from megatune.plan.uncertainty import memory_range
from megatune.references import assign, ref, spell

_SEARCHED = 256  # processes up to which the search for another layout is fast
_ROW_STEP = 64  # tokens; the resolution of row lengths
PLAN = "plan  "  # the beginning of a plan's lines


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """A run that may start: valid settings with their origins by "group.name"; its model, None if another process
    downloads it; its plan, None if the machine is unknown or memory_check is off; and lines to print at the start."""

    settings: Settings
    architecture: Architecture | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    planned: Estimate | None = None
    lines: tuple[str, ...] = ()


def preflight(
    loaded: Loaded,
    world_size: int | None,
    extra: tuple[Finding, ...] = (),
    machine: Machine | None = None,
    *,
    idle_gpus: int = 0,
    rows_follow: bool = False,
    model_dir: Callable[[str], Path | None] = Path,
) -> Preflight:
    """Check the settings for the model, the world and the machine.

    Args:
        world_size: processes of the whole run; None if undecided.
        extra: findings from earlier checks, to report together.
        machine: the machine of the run; None if unknown, and then nothing is planned.
        idle_gpus: number of GPUs that the run does not use.
        rows_follow: whether `with_rows` decides after the rows are read, except for streams; otherwise the longest
            possible rows are assumed.
        model_dir: returns the folder with config.json for a model_name_or_path; None to not read it here.

    Raises:
        MegatuneError: SETTINGS, with everything that is wrong or does not fit; or the error of the model if there is no
            other.
    """
    architecture, refusal, of_config = None, None, list[str]()
    path = loaded.settings.model.model_name_or_path
    if path is not None:
        try:
            folder = model_dir(path)
            architecture = load_architecture(folder, *loaded.settings.task) if folder is not None else None
            if architecture is not None:
                loaded, of_config = with_model_defaults(with_adapter_settings(loaded, architecture), architecture)
        except MegatuneError as error:
            refusal = error
    findings = [*loaded.check(architecture, world_size), *extra]
    if findings:
        raise MegatuneError([*findings, *(refusal.findings if refusal else ())], ExitCode.SETTINGS)
    if refusal is not None:
        raise refusal
    settings = loaded.settings
    accepted = (f"accepted   {note}" for note in loaded.accepted_notes())
    lines = (
        *accepted,
        *(f"experts    {line}" for line in of_config),
        *_unsaid(loaded),
        *_unused(loaded, architecture),
        *(f"warning    {loaded.advice(each)}" for each in warnings(settings)),
    )
    if machine is None or architecture is None or world_size is None or settings.run.memory_check == "off":
        return Preflight(settings=settings, architecture=architecture, origins=loaded.origins, lines=lines)
    model = PlannedModel(name=str(path), architecture=architecture)
    planned = estimate(Case(model=model, settings=settings, world_size=world_size, machine=machine))
    lines = (*lines, *_plan_lines(planned))
    data = settings.data
    if (rows_follow and not data.streaming) or (data.streaming and not settings.packing and not planned.fits):
        lines = (*lines, *map(loaded.advice, _awaited(planned, loaded.phrased)))
        messages = []
    else:
        messages = warnings_of(planned) if planned.fits else [allowed(planned, loaded.phrased)]
    messages += describe_idle_gpus(planned, idle_gpus) if planned.fits else ()
    lines = (*lines, *(f"warning    {loaded.advice(each)}" for each in messages))
    return Preflight(settings=settings, architecture=architecture, origins=loaded.origins, planned=planned, lines=lines)


def describe_idle_gpus(planned: Estimate, idle_gpus: int) -> Iterator[str]:
    """Yield a line on GPUs of this machine that the run does not use."""
    if idle_gpus and not planned.case.machine.device.on_cpu:
        more = assign("num_processes", planned.case.world_size + idle_gpus)
        yield (
            f"{idle_gpus} GPUs of this machine are idle: {more} would train on all of them, with more rows in a step or"
            f" fewer {ref('gradient_accumulation_steps')}"
        )


def _unsaid(loaded: Loaded) -> Iterator[str]:
    """Yield a line on a default that differs from LLaMA-Factory's."""
    is_file = any(":" in entry.origin for entry in loaded.entries.values())  # has a line number
    if is_file and "finetuning.finetuning_type" not in loaded.entries:
        yield "trained    every parameter: finetuning_type is not set; its default is full here, lora in LLaMA-Factory"


def _unused(loaded: Loaded, architecture: Architecture | None) -> Iterator[str]:
    """Yield lines on settings without an effect."""
    for without, keys in unused(loaded.settings, loaded.written, architecture).items():
        yield f"accepted   {', '.join(keys)}: no effect {without}"


def with_rows(
    case: Case,
    lengths: RowLengths,
    media: tuple[int, int] | None = None,
    *,
    loaded: Loaded | None = None,
) -> Preflight:
    """Plan a run again after its rows are read, and decide whether it may start.

    Args:
        media: the most image and video tokens in a row, and those of the largest image or video; None for a language
            model.
        loaded: the settings' source, whose dialect is used for advice; None for our own.

    Raises:
        MegatuneError: SETTINGS if it cannot fit.
    """
    of_row, largest = media if media is not None else (case.image_tokens, case.largest_picture)
    planned = estimate(replace(case, lengths=lengths, image_tokens=of_row, largest_picture=largest))
    shown = [describe_lengths(planned.case), *([describe_media(planned.case)] if media is not None else [])]
    lines = [f"plan       {'; '.join(shown)}: {fullest(planned)}; about {seconds(planned.time.total)} a step"]
    phrased, advice = (loaded.phrased, loaded.advice) if loaded is not None else (Finding.spelled, spell)
    messages = warnings_of(planned) if planned.fits else [allowed(planned, phrased)]
    lines += [f"warning    {advice(each)}" for each in messages]
    return Preflight(settings=case.settings, planned=planned, lines=tuple(lines))


def _awaited(planned: Estimate, phrased: Callable[[Finding], Finding]) -> Iterator[str]:
    """Yield lines on a run whose rows are not read yet.

    Raises:
        MegatuneError: SETTINGS if it cannot fit even with the shortest rows.
    """
    if planned.fits:
        return
    shortest = with_settings(planned.case.settings, {"data.cutoff_len": 2})
    if not may_fit(estimate(replace(planned.case, settings=shortest, image_tokens=0))):
        yield f"warning    {allowed(planned, phrased)}"
        return
    fitting = longest_row(planned)
    those = f", those of {fitting:,} do" if fitting else ""
    text = f"rows of {describe_row_length(planned.case)} would not fit{those}"
    if planned.case.settings.data.streaming:
        yield f"warning    {text}, and the lengths of a stream are known only while it is read"
    else:
        yield f"plan       {text}: the lengths of the data are used once they are read"


def _plan_lines(planned: Estimate) -> Iterator[str]:
    """Yield lines with layout and batch, memory and time, and the assumptions about images."""
    case, time = planned.case, planned.time
    calibration = case.machine.calibration
    runs = counted(calibration.num_runs, "run")
    fitted = f", fitted to {runs}" if calibration.of_time else ""
    factors = f"{case.micro_batch_size} × {case.num_micro_batches} × dp {case.dp_size}"
    rows = f"{factors} = {counted(case.global_batch_size, 'row')}"
    yield (
        f"plan       {describe_layout(case)} on {case.world_size} × {case.machine.device.name}; {rows} a step, of up to"
        f" {describe_row_length(case)}"
    )
    yield (
        f"plan       {fullest(planned)} ({parts(planned.fullest)}); about {seconds(time.total)} a step"
        f" ±{percent(time.uncertainty)}{fitted}"
    )
    if calibration.framework:
        yield f"plan       memory beyond tensors was measured in {runs} on this device"
    if host := describe_host_memory(planned):
        yield f"plan       {host}"
    if reference := describe_reference_passes(planned):
        yield f"plan       {reference}"
    if written := describe_generation(planned):
        yield f"plan       {written}"
    if media := describe_media(case):
        yield f"plan       {media}"


# --- a run that does not fit -----------------------------------------------------------------------------------------


def allowed(planned: Estimate, phrased: Callable[[Finding], Finding] = Finding.spelled) -> str:
    """Return the warning of a run that may not fit, or that memory_check allows to start anyway.

    Raises:
        MegatuneError: SETTINGS if it must not start.
    """
    finding = _too_large(planned)
    if may_fit(planned):
        return str(phrased(finding))
    if planned.case.settings.run.memory_check == "error":
        raise MegatuneError(phrased(finding), ExitCode.SETTINGS)
    return f"{finding.what}; {assign('memory_check', 'warn')} allows it to start"


def longest_row(planned: Estimate) -> int:
    """Return the tokens of the longest rows that fit, with all other settings unchanged; 0 if none fit."""
    multiple = math.lcm(planned.case.settings.parallel.sequence_multiple, _ROW_STEP)

    def is_too_long(count: int) -> bool:
        settings = with_settings(planned.case.settings, {"data.cutoff_len": count * multiple})
        return not estimate(replace(planned.case, settings=settings)).fits

    counts = range(1, planned.case.sequence_length // multiple + 1)
    return multiple * bisect.bisect_left(counts, True, key=is_too_long)


def may_fit(planned: Estimate) -> bool:
    """Return whether every rank fits at the lower end of the plan's uncertainty."""
    return memory_range(planned.case, planned.stages)[0] <= planned.case.machine.device.memory


def _too_large(planned: Estimate) -> Finding:
    """Return the finding of a run that cannot or may not fit, with its largest part and the cheapest changes."""
    stage, device = planned.fullest, planned.case.machine.device
    name, held = largest_part(stage)
    which = f"stage {stage.stage} of {len(planned.stages)}" if len(planned.stages) > 1 else "each rank"
    fixes = savings(planned)
    why = f"the largest part is {name}, {size(held)}; all: {parts(stage)}; for rows of"
    why += f" {describe_row_length(planned.case)}"
    if stage.exact > device.memory:
        why += f"; weights, gradients and optimizer alone take {size(stage.exact)}, for any batch"
    head = "one of"
    if not any(fix.after.fits for fix in fixes):
        head = "no one or two changes are enough; these help most"
        if planned.case.world_size <= _SEARCHED and (layout := fastest_layout(planned)) is not None:
            head, fixes = "the fastest layout that fits", [layout]
    lines = [f"{head}:", *(f"        {each.text}" for each in fixes)] if fixes else []
    if longest := longest_row(planned):
        rows = "the longest rows that fit: memory is planned for rows of that length"
        lines.append(f"        {assign('cutoff_len', longest)}, {rows}")
    if (adapters := _adapters(planned)) is not None:
        lines.append(f"        {adapters.text}: trains adapters instead of the model")
    lines.append("        megatune plan searches all layouts, for this or another machine")
    least, most = map(size, memory_range(planned.case, planned.stages))
    if may_fit(planned):
        what = f"this run may not fit: {which} is planned to hold {size(stage.total)}, between {least} and {most}"
    else:
        what = f"this run cannot fit: {which} would hold {size(stage.total)}, {least} at least"
        lines.append(f"        {assign('memory_check', 'warn')} starts it anyway")
    return Finding(f"{what}, and {device.name} has {size(device.memory)}", why=why, fix="\n".join(lines).strip())


def _adapters(planned: Estimate) -> Fix | None:
    """Return the change from full training to adapters, if the run fits then."""
    if planned.case.settings.finetuning.finetuning_type != "full":
        return None
    found = try_change(planned, {"finetuning.finetuning_type": "lora"})
    return found if found is not None and found.after.fits else None
