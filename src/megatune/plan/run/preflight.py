"""Checks a run before any process is started: settings, model, world, whether it fits, and what it could do better."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatune.config.load import Loaded
from megatune.config.rules import RULES, preference
from megatune.config.settings import Settings
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import load_architecture
from megatune.plan import trainable
from megatune.plan.adapters import with_adapters
from megatune.plan.case import Case, PlannedModel
from megatune.plan.changes.fixes import OVERLAPS, Changes, Fix, fix, less_recompute, savings, searched
from megatune.plan.changes.variation import setting_of, smaller_micro_batch, with_settings, written
from megatune.plan.estimate import Estimate, estimate
from megatune.plan.machine import Machine
from megatune.plan.pages.words import (
    fullest,
    largest_part,
    layout_words,
    parts,
    percent,
    picture_words,
    reference_words,
    row_words,
    seconds,
    size,
)
from megatune.plan.search import TIGHT
from megatune.plan.uncertainty import least_and_most

_SEARCHED = 256  # processes up to which a search for another layout takes no time to speak of
_ROW_STEP = 64  # tokens; lengths between are not worth telling apart


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """A run that may start: valid settings, and where each came from, by "group.name"; its plan, None where nobody
    knows the machine or memory_check is off; and lines for the user, under the same names as the lines that a run
    begins with."""

    settings: Settings
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
            architecture = load_architecture(folder, loaded.settings.run.stage) if folder is not None else None
            if architecture is not None:
                loaded = with_adapters(loaded, architecture)
        except MegatuneError as error:
            refusal = error
    findings = [*loaded.check(architecture, world_size, (*RULES, *trainable.RULES)), *extra]
    if findings:
        raise MegatuneError([*findings, *(refusal.findings if refusal else ())], ExitCode.SETTINGS)
    if refusal is not None:
        raise refusal
    settings = loaded.settings
    lines = (*_unsaid(loaded), *(f"warning    {loaded.advice(each)}" for each in preference.warnings(settings)))
    if machine is None or architecture is None or world_size is None or settings.run.memory_check == "off":
        return Preflight(settings=settings, origins=loaded.origins, lines=lines)
    model = PlannedModel(name=str(path), architecture=architecture)
    planned = estimate(Case(model=model, settings=settings, world_size=world_size, machine=machine))
    said = _warnings(planned, idle_gpus) if planned.fits else [_allowed(planned, loaded.phrased)]
    lines = (*lines, *_plan_lines(planned), *(f"warning    {loaded.advice(each)}" for each in said))
    return Preflight(settings=settings, origins=loaded.origins, planned=planned, lines=lines)


def _unsaid(loaded: Loaded) -> Iterator[str]:
    """Yield what a file leaves unsaid that another program understands otherwise."""
    is_file = any(entry.origin not in ("override", "flag") for entry in loaded.entries.values())
    if is_file and "finetuning.finetuning_type" not in loaded.entries:
        yield "trained    every parameter: without finetuning_type, which means full here, lora in LLaMA-Factory"


def with_pictures(case: Case, tokens: int, largest: int) -> Preflight:
    """Plan a run again when its rows are there.

    Args:
        tokens: of pictures, in the row that has most of them.
        largest: tokens of the largest picture.

    Raises:
        MegatuneError: SETTINGS, where it cannot fit with them.
    """
    planned = estimate(replace(case, image_tokens=tokens, largest_picture=largest))
    lines = [
        f"plan       {picture_words(planned.case)}: {fullest(planned)}; about {seconds(planned.time.total)} a step"
    ]
    if not planned.fits:
        lines.append(f"warning    {_allowed(planned)}")
    return Preflight(settings=case.settings, planned=planned, lines=tuple(lines))


def _allowed(planned: Estimate, phrased: Callable[[Finding], Finding] = lambda finding: finding) -> str:
    """Return what is said of a run that may not fit, or that memory_check lets start all the same.

    Raises:
        MegatuneError: SETTINGS, where it may not start.
    """
    finding = _too_large(planned)
    if may_fit(planned):
        return str(finding)
    if planned.case.settings.run.memory_check == "error":
        raise MegatuneError(phrased(finding), ExitCode.SETTINGS)
    return f"{finding.what}; memory_check: warn lets it start"


def _plan_lines(planned: Estimate) -> Iterator[str]:
    """Yield layout and batch, below them memory and time, and what was assumed of pictures."""
    case, time = planned.case, planned.time
    runs = case.machine.calibration.num_runs
    fitted = f", fitted to {runs} run{'s' * (runs > 1)}" if runs else ""
    rows = f"{case.micro_batch_size} × {case.num_micro_batches} × dp {case.dp_size} = {case.global_batch_size} rows"
    yield (
        f"plan       {layout_words(case)} on {case.world_size} × {case.machine.device.name}; {rows} a step, of up to"
        f" {row_words(case)}"
    )
    yield (
        f"plan       {fullest(planned)} ({parts(planned.fullest)}); about {seconds(time.total)} a step"
        f" ±{percent(time.uncertainty)}{fitted}"
    )
    if reference := reference_words(planned):
        yield f"plan       {reference}"
    if pictures := picture_words(case):
        yield f"plan       {pictures}"


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


def _too_large(planned: Estimate) -> Finding:
    """Say why a planned run cannot fit, or may not: its largest part, and the cheapest changes with what they do."""
    stage, device = planned.fullest, planned.case.machine.device
    name, held = largest_part(stage)
    which = f"stage {stage.stage} of {len(planned.stages)}" if len(planned.stages) > 1 else "each rank"
    fixes = savings(planned)
    state = stage.weights + stage.gradients + stage.master_weights + stage.optimizer_state
    why = f"the largest part is {name}, {size(held)}; all: {parts(stage)}; for rows of"
    why += f" {row_words(planned.case)}"
    if state > device.memory:
        why += f"; weights, gradients and optimizer alone take {size(state)}, whatever the batch"
    head = "one of"
    if not any(fix.after.fits for fix in fixes):
        head = "no one or two changes are enough; what helps most"
        if planned.case.world_size <= _SEARCHED and (layout := searched(planned)) is not None:
            head, fixes = "the layout that fits and is fastest", [layout]
    lines = [f"{head}:", *(f"        {each}" for each in fixes)] if fixes else []
    if longest := longest_row(planned):
        rows = "the longest rows that fit: memory is planned for rows of that length"
        lines.append(f"        cutoff_len: {longest}, {rows}")
    if (adapters := _adapters(planned)) is not None:
        lines.append(f"        {adapters}: adapters learn instead of the model")
    lines.append("        megatune plan searches all layouts for this machine, or for another one")
    least, most = map(size, least_and_most(planned.case, planned.stages))
    if may_fit(planned):
        what = f"this run may not fit: {which} is planned to hold {size(stage.total)}, between {least} and {most}"
    else:
        what = f"this run cannot fit: {which} would hold {size(stage.total)}, {least} at least"
        lines.append("        memory_check: warn starts it all the same, as for rows that are shorter than cutoff_len")
    return Finding(f"{what}, and {device.name} has {size(device.memory)}", why=why, fix="\n".join(lines).strip())


def _adapters(planned: Estimate) -> Fix | None:
    """Return what adapters in place of full training do, where the run then fits."""
    if planned.case.settings.finetuning.finetuning_type != "full":
        return None
    found = fix(planned, {"finetuning.finetuning_type": "lora"})
    return found if found is not None and found.after.fits else None


# --- what a run could do better --------------------------------------------------------------------------------------
# Only what matters is said: each check states its threshold.

# The least share of a step's time, and of the device's memory, that a warning is worth.
_TIME, _MEMORY = 0.05, 0.01
_BUBBLE = 0.15  # of a step
_STATE = 0.1  # of the device's memory


def _warnings(planned: Estimate, idle_gpus: int) -> list[str]:
    """Return what is worth a word to a run that fits; on a CPU, where runs are tried and not paid for, only that memory
    is tight."""
    case = planned.case
    found, share = [], planned.fullest.total / case.machine.device.memory
    if share > TIGHT:
        planned_share = f"{percent(share)} of the device's is planned"
        found.append(f"memory is tight: {planned_share}, and the plan may be some percent off")
    if case.machine.device.generation == "cpu":
        return found
    if idle_gpus:
        found.append(
            f"{idle_gpus} GPUs of this machine are idle: num_processes: {case.world_size + idle_gpus} would train on"
            " all of them, with more rows in a step or fewer gradient_accumulation_steps"
        )
    checks = (_single_precision, tensor_parallel_across_machines, _no_sequence_parallel, _bubble, _nothing_to_share,
              _recompute_not_needed, _no_overlap)  # fmt: skip
    return [*found, *(warning for check in checks for warning in check(planned))]


def _single_precision(planned: Estimate) -> Iterator[str]:
    """fp32 on a GPU, where bf16 gains 5 % or more."""
    if planned.case.settings.precision.params_dtype != "float32":
        return
    if (better := fix(planned, {"precision.bf16": True})) is not None and better.gain >= _TIME:
        yield f"this run computes in fp32: {better}"


def tensor_parallel_across_machines(planned: Estimate) -> Iterator[str]:
    """A tensor-parallel group that is not inside one machine, where its exchanges take 5 % of a step or more."""
    case = planned.case
    tp, inside = case.settings.parallel.tensor_model_parallel_size, case.machine.gpus_per_node
    pp = case.settings.parallel.pipeline_model_parallel_size
    share = planned.time.tensor_parallel / planned.time.total
    if tp == 1 or case.world_size <= inside or inside % tp == 0 or share < _TIME:
        return
    said = (
        f"tensor_model_parallel_size {tp} goes across machines of {inside}: its exchanges wait for the network,"
        f" {seconds(planned.time.tensor_parallel)} of {seconds(planned.time.total)} a step"
    )
    candidates: Iterable[Changes] = (
        {
            "parallel.tensor_model_parallel_size": smaller,
            "parallel.pipeline_model_parallel_size": pp * tp // smaller,
            "parallel.sequence_parallel": smaller > 1,
        }
        for smaller in range(inside, 0, -1)
        if inside % smaller == 0 and tp % smaller == 0
    )
    best = _best(planned, candidates)
    yield said + (f"; {best}" if best is not None else f"; sizes that divide {inside} stay inside")


def _best(planned: Estimate, candidates: Iterable[Changes]) -> Fix | None:
    """Return the fastest of the changes that gain time and fit with something to spare."""
    limit = TIGHT * planned.case.machine.device.memory
    found = [each for changes in candidates if (each := fix(planned, changes)) is not None]
    roomy = [each for each in found if each.gain > 0 and each.after.fullest.total <= limit]
    return max(roomy, key=lambda each: each.gain, default=None)


def _no_sequence_parallel(planned: Estimate) -> Iterator[str]:
    """tp without sequence parallelism that costs 1 % of the memory, or 5 % of the time: it gives up nothing for it."""
    parallel = planned.case.settings.parallel
    if parallel.tensor_model_parallel_size == 1 or parallel.sequence_parallel:
        return
    better = fix(planned, {"parallel.sequence_parallel": True})
    if better is not None and (better.saving >= _MEMORY * planned.case.machine.device.memory or better.gain >= _TIME):
        yield f"tensor parallelism without sequence parallelism keeps whole what could be split: {better}"


def _bubble(planned: Estimate) -> Iterator[str]:
    """Stages that wait for 15 % of a step or more, and what makes them wait less by 5 % of its time."""
    case = planned.case
    stages = case.settings.parallel.pipeline_model_parallel_size
    share = planned.time.pipeline / planned.time.total
    if stages == 1 or share < _BUBBLE:
        return
    count = case.num_micro_batches
    few = f"{count} micro-batches for {stages} stages" if count < stages else f"{stages} stages"
    candidates: list[dict[str, Any]] = [smaller_micro_batch(case)]
    if case.settings.parallel.virtual_stages is None:
        candidates += [{"parallel.virtual_pipeline_model_parallel_size": size} for size in (2, 3, 4)]
    best = _best(planned, candidates)
    if best is not None and best.gain >= _TIME:
        yield f"{few} wait for each other {percent(share)} of a step: {best}"
        return
    # More rows in a step change what is trained, so this is said without a judgement of the whole.
    accumulation = "batch.gradient_accumulation_steps"
    more = fix(planned, {accumulation: max(4 * stages, 2 * count)})
    if more is not None and more.gain >= _TIME:
        rows = f"{more.after.case.global_batch_size} rows in a step instead of {case.global_batch_size}"
        gain = f"{written(more.changes)} trains {percent(1 / (1 - more.gain) - 1)} more tokens a second"
        yield f"{few} wait for each other {percent(share)} of a step; {gain}, with {rows}"


def _nothing_to_share(planned: Estimate) -> Iterator[str]:
    """One replica whose optimizer takes 10 % of the device's memory, where a smaller model-parallel size would share
    it out and gain 5 % of the time."""
    case, stage = planned.case, planned.fullest
    whole = stage.master_weights + stage.optimizer_state
    if case.shard_size > 1 or case.world_size == 1 or whole < _STATE * case.machine.device.memory:
        return
    paths = ("parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size")
    sizes = {path: setting_of(case.settings, path) for path in paths}
    best = _best(planned, ({path: size // 2} for path, size in sizes.items() if size % 2 == 0))
    if best is not None and best.gain >= _TIME:
        one = "there is one replica of the model, so each rank keeps its optimizer's state whole"
        yield f"{one}, {size(whole)}; two would share it: {best}"


def _recompute_not_needed(planned: Estimate) -> Iterator[str]:
    """It would fit without, or with less of it, and gain 5 % of the time."""
    recompute = planned.case.settings.recompute
    if not recompute.recompute_granularity and not recompute.moe_layer_recompute:
        return
    best = _best(planned, less_recompute(planned.case))
    if best is not None and best.gain >= _TIME:
        some = best.after.case.settings.recompute.recompute_granularity is not None
        yield f"{'less recomputation would do' if some else 'recomputation is not needed'}: {best}"


def _no_overlap(planned: Estimate) -> Iterator[str]:
    """Replicas that exchange gradients and parameters while nothing computes, 5 % of the time or more."""
    case = planned.case
    parallel = case.settings.parallel
    if case.shard_size == 1 or (parallel.overlap_grad_reduce and parallel.overlap_param_gather):
        return
    changes = OVERLAPS if parallel.use_distributed_optimizer else {"parallel.overlap_grad_reduce": True}
    better = fix(planned, changes)
    if better is not None and better.after.fits and better.gain >= _TIME:
        yield f"exchanges of replicas wait until computing is done: {better}"
