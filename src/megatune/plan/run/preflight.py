"""Checks a run before any process is started: settings, model, world, whether it fits, and what it could do better."""

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
from megatune.config.settings import Settings, plain, plain_finding, with_settings
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

_SEARCHED = 256  # processes up to which a search for another layout takes no time to speak of
_ROW_STEP = 64  # tokens; lengths between are not worth telling apart
PLAN = "plan  "  # how the lines of a plan begin, among those for the user


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """A run that may start: valid settings, and where each came from, by "group.name"; its model, None where another
    process asks a hub for it; its plan, None where nobody knows the machine or memory_check is off; and lines for the
    user, under the same names as the lines that a run begins with."""

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
    """Hold the settings against the model, the world and the machine.

    Args:
        world_size: processes of the whole run; None where they could not be decided.
        extra: what was found wrong on the way here, reported along.
        machine: what the run is started on; None where that is not known, so that nothing is planned.
        idle_gpus: GPUs that the run leaves alone.
        rows_follow: `with_rows` decides, once they are read, but for those of a stream; otherwise they are taken to be
            as long as they may be.
        model_dir: the folder with config.json of a model_name_or_path; None where it is not to be read here.

    Raises:
        MegatuneError: SETTINGS with everything that is wrong, or with what cannot fit; what the model is refused with
            where nothing else is wrong.
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
        said = []
    else:
        said = warnings_of(planned) if planned.fits else [allowed(planned, loaded.phrased)]
    said += idle_words(planned, idle_gpus) if planned.fits else ()
    lines = (*lines, *(f"warning    {loaded.advice(each)}" for each in said))
    return Preflight(settings=settings, architecture=architecture, origins=loaded.origins, planned=planned, lines=lines)


def idle_words(planned: Estimate, idle_gpus: int) -> Iterator[str]:
    """Name GPUs of this machine that the run leaves alone."""
    if idle_gpus and not planned.case.machine.device.on_cpu:
        yield (
            f"{idle_gpus} GPUs of this machine are idle: `num_processes: {planned.case.world_size + idle_gpus}` would"
            " train on all of them, with more rows in a step or fewer `gradient_accumulation_steps`"
        )


def _unsaid(loaded: Loaded) -> Iterator[str]:
    """Yield what a file leaves unsaid that another program understands otherwise."""
    is_file = any(":" in entry.origin for entry in loaded.entries.values())  # a line of one
    if is_file and "finetuning.finetuning_type" not in loaded.entries:
        yield "trained    every parameter: without finetuning_type, which means full here, lora in LLaMA-Factory"


def _unused(loaded: Loaded, architecture: Architecture | None) -> Iterator[str]:
    """Yield the settings that change nothing."""
    for without, keys in unused(loaded.settings, loaded.written, architecture).items():
        yield f"accepted   {', '.join(keys)}: no effect {without}"


def with_rows(
    case: Case,
    lengths: RowLengths,
    pictures: tuple[int, int] | None = None,
    *,
    loaded: Loaded | None = None,
) -> Preflight:
    """Plan a run again when its rows are there, and decide whether it may start.

    Args:
        pictures: tokens of pictures in the row that has most of them, and tokens of the largest picture; None for a
            language model.
        loaded: where the settings came from, in whose words advice is given; None for our own.

    Raises:
        MegatuneError: SETTINGS, where it cannot fit with them.
    """
    of_row, largest = pictures if pictures is not None else (case.image_tokens, case.largest_picture)
    planned = estimate(replace(case, lengths=lengths, image_tokens=of_row, largest_picture=largest))
    shown = [describe_lengths(planned.case), *([describe_media(planned.case)] if pictures is not None else [])]
    lines = [f"plan       {'; '.join(shown)}: {fullest(planned)}; about {seconds(planned.time.total)} a step"]
    phrased, advice = (loaded.phrased, loaded.advice) if loaded is not None else (plain_finding, plain)
    said = warnings_of(planned) if planned.fits else [allowed(planned, phrased)]
    lines += [f"warning    {advice(each)}" for each in said]
    return Preflight(settings=case.settings, planned=planned, lines=tuple(lines))


def _awaited(planned: Estimate, phrased: Callable[[Finding], Finding]) -> Iterator[str]:
    """Yield what is said of a run whose rows are still to be read.

    Raises:
        MegatuneError: SETTINGS, where it cannot fit however short they are.
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
        yield f"warning    {text}, and the lengths of a stream are known only as it is read"
    else:
        yield f"plan       {text}: the lengths of the data are used once they are read"


def _plan_lines(planned: Estimate) -> Iterator[str]:
    """Yield layout and batch, below them memory and time, and what was assumed of pictures."""
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
    if pictures := describe_media(case):
        yield f"plan       {pictures}"


# --- a run that does not fit: why, and what would help ----------------------------------------------------------------


def allowed(planned: Estimate, phrased: Callable[[Finding], Finding] = plain_finding) -> str:
    """Return what is said of a run that may not fit, or that memory_check lets start all the same.

    Raises:
        MegatuneError: SETTINGS, where it may not start.
    """
    finding = _too_large(planned)
    if may_fit(planned):
        return str(finding)
    if planned.case.settings.run.memory_check == "error":
        raise MegatuneError(phrased(finding), ExitCode.SETTINGS)
    return f"{finding.what}; `memory_check: warn` lets it start"


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
    return memory_range(planned.case, planned.stages)[0] <= planned.case.machine.device.memory


def _too_large(planned: Estimate) -> Finding:
    """Say why a planned run cannot fit, or may not: its largest part, and the cheapest changes with what they do."""
    stage, device = planned.fullest, planned.case.machine.device
    name, held = largest_part(stage)
    which = f"stage {stage.stage} of {len(planned.stages)}" if len(planned.stages) > 1 else "each rank"
    fixes = savings(planned)
    why = f"the largest part is {name}, {size(held)}; all: {parts(stage)}; for rows of"
    why += f" {describe_row_length(planned.case)}"
    if stage.exact > device.memory:
        why += f"; weights, gradients and optimizer alone take {size(stage.exact)}, whatever the batch"
    head = "one of"
    if not any(fix.after.fits for fix in fixes):
        head = "no one or two changes are enough; what helps most"
        if planned.case.world_size <= _SEARCHED and (layout := fastest_layout(planned)) is not None:
            head, fixes = "the layout that fits and is fastest", [layout]
    lines = [f"{head}:", *(f"        {each.text}" for each in fixes)] if fixes else []
    if longest := longest_row(planned):
        rows = "the longest rows that fit: memory is planned for rows of that length"
        lines.append(f"        `cutoff_len: {longest}`, {rows}")
    if (adapters := _adapters(planned)) is not None:
        lines.append(f"        {adapters.text}: trains adapters instead of the model")
    lines.append("        megatune plan searches all layouts for this machine, or for another one")
    least, most = map(size, memory_range(planned.case, planned.stages))
    if may_fit(planned):
        what = f"this run may not fit: {which} is planned to hold {size(stage.total)}, between {least} and {most}"
    else:
        what = f"this run cannot fit: {which} would hold {size(stage.total)}, {least} at least"
        lines.append("        `memory_check: warn` starts it anyway")
    return Finding(f"{what}, and {device.name} has {size(device.memory)}", why=why, fix="\n".join(lines).strip())


def _adapters(planned: Estimate) -> Fix | None:
    """Return what adapters in place of full training do, where the run then fits."""
    if planned.case.settings.finetuning.finetuning_type != "full":
        return None
    found = try_change(planned, {"finetuning.finetuning_type": "lora"})
    return found if found is not None and found.after.fits else None
