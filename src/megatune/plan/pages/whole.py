"""Prints the answer of `megatune plan`: as pages of text, and as one JSON document."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

from megatune.config.dialects.dialect import LLAMAFACTORY
from megatune.config.settings import with_settings
from megatune.config.values import counted
from megatune.pages import Entry, Item, Page
from megatune.plan.answer import Answer, Question
from megatune.plan.case import Case
from megatune.plan.changes import ACROSS_MACHINES, LOSSY, written
from megatune.plan.estimate import Estimate
from megatune.plan.fixes import warning
from megatune.plan.flops import num_parameters
from megatune.plan.memory.estimate import (
    COMMUNICATOR,
    CONTEXT,
    CPU_PROCESS,
    MOST_FRAGMENTS,
    beyond_tensors,
    checkpoint_bytes,
)
from megatune.plan.memory.stage import MEMORY_PARTS
from megatune.plan.operators.shapes import BALANCED_VARIATION, FREE_VARIATION, expert_imbalance, is_balanced
from megatune.plan.pages.tables import (
    comparison_lines,
    distinct,
    frontier_lines,
    memory_lines,
    ranked_lines,
    refused_lines,
    time_lines,
    too_large_lines,
)
from megatune.plan.pages.words import (
    amount,
    describe_host_memory,
    describe_layout,
    describe_lengths,
    describe_machine,
    describe_media,
    describe_recompute,
    describe_row_length,
    describe_trained,
    describe_waiting,
    percent,
    size,
    slow_precision,
)
from megatune.plan.schedule import bubble_shares
from megatune.plan.search import equal_within
from megatune.plan.time.estimate import TIME_PARTS
from megatune.plan.uncertainty import memory_bound, safe_bytes
from megatune.references import spell

# Settings that decide what is trained.
_TRAINABLE = (
    "lora_rank", "lora_target", "additional_target", "use_dora", "freeze_vision_tower", "freeze_multi_modal_projector",
    "freeze_deepstack_mergers", "freeze_language_model",
)  # fmt: skip


def pages(found: Answer, top: int) -> Iterator[Page]:
    """Yield the plan that was asked for, then better layouts, then the assumptions."""
    question, result, own = found.question, found.result, found.own
    yield Page("", _head(found))
    if own is not None:
        yield from _plan(own, question)
        if slow := warning(ACROSS_MACHINES, own):
            yield Page("", [f"WARNING: {spell(slow)}"])
        if not own.fits:
            enough = any(fix.after.fits for fix in found.fixes)
            lines = [f"  {fix}" for fix in found.fixes]
            more = "; another layout fits, see below" if result.best else ""
            lines += [] if enough else [f"  No change of one or two settings is enough{more}."]
            yield Page("What would make it fit" if enough else "What helps most", lines)
        yield Page("Is there a better layout?", _better(found, own))
        if found.is_better:
            yield Page("The fastest layouts that fit", ranked_lines(distinct(result.ranked, min(top, 5))))
    else:
        yield Page("", _searched(found, top))
        if (best := found.best) is not None:
            yield Page("", [_recommended(found, best)])
            yield from _plan(best, question, f"{describe_layout(best.case)}. ")
    yield Page("", _lossy(found))
    yield Page("", frontier_lines(result))
    if result.best is None:
        yield Page("", too_large_lines(result))
    if own is None:
        yield Page("", refused_lines(result))
    yield Page("Assumed", _listed((*question.notes, *standing_notes(question.case))))
    if question.case.world_size > 1:
        sparse = question.case.model.architecture.moe is not None
        policy = (note for note in result.policy if sparse or not note.startswith("experts"))
        yield Page("Left out of the search", _listed(policy))


def _plan(estimate: Estimate, question: Question, lead: str = "") -> Iterator[Page]:
    yield Page("", memory_lines(estimate, lead))
    if host := describe_host_memory(estimate):
        yield Page("", [f"{host}."])
    yield Page("", time_lines(estimate, question.run_seconds(estimate)))
    if len(estimate.stages) > 1:
        yield Page("", [describe_waiting(estimate)])


def _head(found: Answer) -> Iterator[Item]:
    """Describe the model, what is trained, the devices, the layout and the batch."""
    question, model = found.question, found.question.case.model
    yield f"model    {model.name}, {amount(num_parameters(model.architecture))} parameters"
    yield Entry("trained", describe_trained(question.case))
    yield Entry("", slow_precision(question.case))
    yield Entry("devices", describe_machine(question.case.machine, question.case.world_size))
    rows = f"{counted(question.global_batch_size, 'row')} a step"
    if found.own is not None:
        case, parallel = found.own.case, found.own.case.settings.parallel
        layout = describe_layout(case) + (", sequence parallel" if parallel.sequence_parallel else "")
        layout += ", gradient reduction overlapped" if parallel.overlap_grad_reduce else ""
        yield Entry("layout", f"{layout}; recompute {describe_recompute(case.settings.recompute)}")
        rows = f"{counted(case.global_batch_size, 'row')} a step = {case.micro_batch_size} a micro-batch × "
        rows += f"{case.num_micro_batches} accumulated × {case.dp_size} data-parallel"
    if question.case.lengths is not None:
        yield Entry("batch", rows)
        yield Entry("lengths", describe_lengths(question.case if found.own is None else found.own.case))
        return
    yield Entry("batch", f"{rows}, {describe_row_length(question.case)} a row")


def _searched(found: Answer, top: int) -> Iterator[Item]:
    result, held = found.result, size(found.question.case.machine.device.memory)
    if result.best is None:
        yield f"NO LAYOUT FITS {held}: {result.num_considered:,} were evaluated."
        yield from _enough(found)
        return
    equal = frozenset(map(id, result.ranked[: result.num_equal] if result.num_equal > 1 else ()))
    yield f"The fastest layouts that fit {held}, of {result.num_considered:,} that were evaluated"
    yield from ranked_lines(distinct(result.ranked, top), equal=equal)
    said = "batch: rows of a micro-batch × micro-batches of a step; "
    if equal:
        within = equal_within(result.ranked[0].case)
        said += f"= as fast as the fastest, within the uncertainty ({within:.0%}), the simplest first; "
    if any(each.is_tight for each in result.ranked):
        bound = memory_bound(result.ranked[0].case)
        said += f"! is tight: a run may hold {bound:.0%} more than planned; "
    yield f"  {said}of each layout and micro-batch the best recomputation and virtual stages."


def _recommended(found: Answer, best: Estimate) -> str:
    """Name the recommended layout and the reason."""
    result, layout = found.result, describe_layout(best.case)
    if best.is_tight:
        sure = size(safe_bytes(best.case))
        why = f"NO LAYOUT SURELY FITS: none is planned to hold {sure} or less. {layout} leaves the most free memory"
        return f"Recommended: {layout}. {why} of those that are not much slower."
    if result.num_equal > 1:
        return f"Recommended: {layout}, the simplest of {result.num_equal} that are about equally fast."
    return f"Recommended: {layout}, the fastest."


def _lossy(found: Answer) -> Iterator[Item]:
    """Print layouts with lower precision that are faster, or fit more surely."""
    if not found.lossy:
        return
    reference = found.best
    yield "With lower precision (larger rounding errors), and the layout that it allows"
    yield from ranked_lines([*found.lossy.values()])
    for number, (name, best) in enumerate(found.lossy.items(), 1):
        gain = reference.time.total / best.time.total if reference is not None else 1.0
        faster = f", {gain - 1:.0%} faster" if gain > 1.005 else f", {1 - gain:.0%} slower" if gain < 0.995 else ""
        is_surer = reference is None or (reference.is_tight and not best.is_tight)
        yield f"  {number}: {name}{faster}{', and surely fits' if is_surer else ''}: {written(LOSSY[name])}"


def _enough(found: Answer) -> Iterator[Item]:
    """List what would fit: more devices, or settings that need less memory."""
    if (enough := found.on_more_devices) is not None:
        case, held = enough.case, size(enough.fullest.total)
        layout = f"as {describe_layout(case)}, recompute {describe_recompute(case.settings.recompute)}, {held} each"
        layout += " (tight)" if enough.is_tight else ""
        yield f"{case.world_size:,} devices are enough, {layout}: --gpus {case.world_size} finds the best layout."
    for changes, best in found.with_less_memory:
        does = "fits, but is tight" if best.is_tight else "fits"
        yield f"  {written(changes)} {does}: {describe_layout(best.case)}, {size(best.fullest.total)}"
    if found.on_more_devices is None and not found.with_less_memory:
        yield "Nor does it fit on 16 times as many devices, with the optimizer on the host, adapters or shorter rows."


def _better(found: Answer, own: Estimate) -> Iterator[Item]:
    best, evaluated = found.recommended, f"{found.result.num_considered:,} layouts were evaluated"
    if best is None:
        yield f"No layout fits; {evaluated}."
        yield from _enough(found)
        return
    gain = own.time.total / best.time.total
    if not found.is_better:
        nearly = f": the fastest would save {1 - 1 / gain:.1%} of a step" if 1 - 1 / gain > 0.001 else ""
        yield f"None that is worth a change{nearly}; {evaluated}."
        return
    faster = f"{gain - 1:.0%} faster" if gain < 2 else f"{gain:.1f} times as fast"
    does, uncertainty = f"Yes: {describe_layout(best.case)} is {faster}", best.time.uncertainty
    if not own.fits:
        does = f"Yes: {describe_layout(best.case)} is the fastest layout that fits"
    elif gain - 1 < uncertainty:
        does = (
            f"Perhaps: {describe_layout(best.case)} is predicted to be {faster}, which is less than the uncertainty of "
            f"a plan, ±{percent(uncertainty)}: measure a few steps of both"
        )
    rows = counted(found.question.global_batch_size, "row")
    yield f"{does}; {evaluated}. A step has {rows} as before. What to write:"
    yield from comparison_lines(own, best)


# --- assumptions of every plan ---------------------------------------------------------------------------------------


def standing_notes(case: Case) -> Iterator[str]:
    """List the assumptions of every plan."""
    machine, settings = case.machine, case.settings
    device, dtype = machine.device, settings.precision.params_dtype
    speed = f"{device.flops[dtype] / 1e12:,.4g} TFLOP/s in {dtype}, {device.bandwidth / 1e9:,.4g} GB/s"
    yield f"{device.name}: {size(device.memory)} of usable memory, {speed} of memory bandwidth"
    yield "memory is planned for a step whose rows all have the longest length; shorter rows need less"
    if device.on_cpu:
        yield f"framework: a process takes {CPU_PROCESS >> 20:,} MiB before it builds a model"
    else:
        yield (
            f"framework: a CUDA context with its libraries takes {CONTEXT >> 20:,} MiB; communication buffers: NCCL "
            f"takes {COMMUNICATOR >> 20:,} MiB for each group of more than one rank"
        )
        if settings.checkpoint.async_save:
            copies = sum(checkpoint_bytes(settings, case.model.architecture))
            yield f"async_save: copies of a checkpoint take {size(copies)} of main memory, over all machines"
    if machine.calibration.framework or not device.on_cpu:
        yield _describe_beyond_tensors(case)
    if media := describe_media(case):
        yield f"{media} (--image_tokens)"
    if (moe := case.model.architecture.moe) is not None:
        # An example: with the expert-parallel ranks of the settings, or with eight.
        own, balanced = settings.parallel.expert_model_parallel_size, is_balanced(settings)
        ranks = own if own > 1 else math.gcd(8, moe.num_experts)
        spread = with_settings(settings, {"parallel.expert_model_parallel_size": ranks})
        variation, other = BALANCED_VARIATION, FREE_VARIATION
        where = f"{other:.0%} without load balancing"
        if not balanced:
            variation, where = other, f"{variation:.0%} with load balancing"
        yield (
            f"expert imbalance: an expert's tokens vary by {variation:.0%} of their mean ({where}), so the fullest of "
            f"{ranks} expert-parallel ranks has {expert_imbalance(spread, moe):.2f} times an even share"
        )
    if machine.calibration.of_time:
        yield f"efficiencies are fitted to {counted(machine.calibration.num_runs, 'run')} on this device"
    else:
        yield "efficiencies are typical of this device, not measured on yours; megatune plan --calibrate RUN fits them"


def _describe_beyond_tensors(case: Case) -> str:
    if case.machine.calibration.framework:
        runs = counted(case.machine.calibration.num_runs, "run")
        return f"memory beyond tensors was measured in {runs} on this device"
    range_ = f"from half to twice as much, and fragmentation of up to {MOST_FRAGMENTS:.0%} of activations"
    return f"neither was measured; the assumed range is {range_}; the first run on this device replaces it"


def _listed(notes: Iterable[str]) -> Iterator[str]:
    return (f"  - {note}" for note in notes)


# --- the JSON document ------------------------------------------------------------------------------------------------


def _planned(estimate: Estimate) -> dict[str, Any]:
    """Return one plan: memory in bytes by stage and part, seconds by part."""
    case, time = estimate.case, estimate.time
    settings = {
        LLAMAFACTORY.key_of(f"{group}.{name}"): value
        for group in ("parallel", "batch", "recompute", "performance", "experts")
        for name, value in getattr(case.settings, group)
    }
    return {
        "layout": describe_layout(case),
        "settings": settings,
        "world_size": case.world_size,
        "data_parallel_size": case.dp_size,
        "global_batch_size": case.global_batch_size,
        "sequence_length": case.sequence_length,
        "fits": estimate.fits,
        "tight": estimate.is_tight,
        "memory_limit": case.machine.device.memory,
        "memory_bound": memory_bound(case),
        "fullest_stage": estimate.fullest.stage,
        "fullest_bytes": estimate.fullest.total,
        "stages": [
            {name: getattr(stage, name) for name in ("stage", "num_layers", *MEMORY_PARTS, "total", "host")}
            for stage in estimate.stages
        ],
        "seconds": {name: getattr(time, name) for name in (*TIME_PARTS, "total")},
        "beyond_tensors_bytes": dict(
            zip(("least", "planned", "most"), beyond_tensors(case, estimate.fullest), strict=True)
        ),
        "uncertainty": time.uncertainty,
        "bubble_share": bubble_shares(time.chunks, case.num_micro_batches)[0],
        "tokens": time.tokens,
        "tokens_per_second": time.tokens_per_second,
        "tokens_per_second_per_gpu": time.tokens_per_second_per_gpu,
        "tflops_per_gpu": time.model_tflops,
        "mfu": time.mfu,
    }


def document(found: Answer, top: int) -> str:
    """Return the answer as JSON, in bytes and seconds."""
    question, machine, result = found.question, found.question.case.machine, found.result
    trainable = question.case.settings.finetuning
    content = {
        "model": {
            "name": question.case.model.name,
            "num_parameters": num_parameters(question.case.model.architecture),
            "checkpoint_bytes": checkpoint_bytes(question.case.settings, question.case.model.architecture)._asdict(),
            "trainable": {
                "kind": trainable.finetuning_type,
                **{name: getattr(trainable, name) for name in _TRAINABLE},
            },
        },
        "machine": {
            "device": machine.device.name,
            "memory": machine.device.memory,
            "gpus_per_node": machine.gpus_per_node,
            "link": dataclasses.asdict(machine.link),
            "network": dataclasses.asdict(machine.network),
            "calibration": dataclasses.asdict(machine.calibration),
        },
        "world_size": question.case.world_size,
        "global_batch_size": question.global_batch_size,
        "fits": found.fits,
        "plan": None if found.own is None else _planned(found.own),
        "fixes": [
            {
                "changes": dict(fix.changes),
                "fullest_bytes": fix.after.fullest.total,
                "seconds": fix.after.time.total,
                "fits": fix.after.fits,
            }
            for fix in found.fixes
        ],
        "enough": None if found.on_more_devices is None else _planned(found.on_more_devices),
        "better": found.is_better,
        "recommended": None if found.recommended is None else _planned(found.recommended),
        "priced": [
            {"name": name, "changes": dict(LOSSY[name]), "plan": _planned(best)} for name, best in found.lossy.items()
        ],
        "less": [{"changes": dict(changes), "plan": _planned(best)} for changes, best in found.with_less_memory],
        "search": {
            "num_considered": result.num_considered,
            "num_equal": result.num_equal,
            "ranked": [_planned(estimate) for estimate in result.ranked[:top]],
            "frontier": [_planned(estimate) for estimate in result.frontier],
            "too_large": [_planned(estimate) for estimate in result.too_large[:top]],
            "refused": [dataclasses.asdict(refusal) for refusal in result.refused],
            "policy": list(result.policy),
        },
        "assumptions": [*question.notes, *standing_notes(question.case), *result.policy],
    }
    return json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False)
