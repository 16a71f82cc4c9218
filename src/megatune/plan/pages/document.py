"""A plan as one JSON document, and what every plan takes for granted."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

from megatune.config.dialects.dialect import LLAMAFACTORY
from megatune.config.settings import with_settings
from megatune.config.values import counted
from megatune.plan.answer import Answer
from megatune.plan.case import Case
from megatune.plan.changes.table import LOSSY
from megatune.plan.checkpoint import checkpoint_bytes
from megatune.plan.estimate import Estimate
from megatune.plan.flops import num_parameters
from megatune.plan.memory.estimate import (
    COMMUNICATOR,
    CONTEXT,
    CPU_PROCESS,
    MEMORY_PARTS,
    MOST_FRAGMENTS,
    beyond_tensors,
)
from megatune.plan.operators.shapes import BALANCED_VARIATION, FREE_VARIATION, expert_imbalance, is_balanced
from megatune.plan.pages.words import layout_words, picture_words, size
from megatune.plan.schedule import bubble_shares
from megatune.plan.time.estimate import TIME_PARTS
from megatune.plan.uncertainty import memory_bound

# Settings of what is trained, as they are written.
_TRAINABLE = (
    "lora_rank", "lora_target", "additional_target", "use_dora", "freeze_vision_tower", "freeze_multi_modal_projector",
    "freeze_deepstack_mergers", "freeze_language_model",
)  # fmt: skip


def standing_notes(case: Case) -> Iterator[str]:
    """List what every plan takes for granted."""
    machine, settings = case.machine, case.settings
    device, dtype = machine.device, settings.precision.params_dtype
    speed = f"{device.flops[dtype] / 1e12:,.4g} TFLOP/s in {dtype}, {device.bandwidth / 1e9:,.4g} GB/s"
    yield f"{device.name}: {size(device.memory)} can be used, {speed} of memory bandwidth"
    yield "memory is that of a step whose rows all have the longest length; shorter rows take less"
    if device.on_cpu:
        yield f"framework: a process takes {CPU_PROCESS >> 20:,} MiB before it makes a model"
    else:
        yield (
            f"framework: a CUDA context with its libraries takes {CONTEXT >> 20:,} MiB; communication buffers: NCCL "
            f"takes {COMMUNICATOR >> 20:,} MiB for each group of more than one rank"
        )
        if settings.checkpoint.async_save:
            copies = sum(checkpoint_bytes(settings, case.model.architecture))
            yield f"async_save: copies of a checkpoint take {size(copies)} of main memory, over all machines"
    if machine.calibration.framework or not device.on_cpu:
        yield _beyond_words(case)
    if pictures := picture_words(case):
        yield f"{pictures} (--image_tokens)"
    if (moe := case.model.architecture.moe) is not None:
        # By an example: of the settings' own expert-parallel ranks, or of eight.
        own, balanced = settings.parallel.expert_model_parallel_size, is_balanced(settings)
        ranks = own if own > 1 else math.gcd(8, moe.num_experts)
        spread = with_settings(settings, {"parallel.expert_model_parallel_size": ranks})
        variation, other = BALANCED_VARIATION, FREE_VARIATION
        where = f"{other:.0%} where nothing balances them"
        if not balanced:
            variation, where = other, f"{variation:.0%} where something balances them"
        yield (
            f"expert imbalance: an expert's tokens vary by {variation:.0%} of their mean ({where}), so the fullest of "
            f"{ranks} expert-parallel ranks has {expert_imbalance(spread, moe):.2f} times an even share"
        )
    if machine.calibration.of_time:
        yield f"efficiencies are fitted to {counted(machine.calibration.num_runs, 'run')} on this device"
    else:
        yield "efficiencies are of this kind of device, not of your machines; megatune plan --calibrate RUN fits them"


def _beyond_words(case: Case) -> str:
    if case.machine.calibration.framework:
        return f"memory beyond tensors is as {counted(case.machine.calibration.num_runs, 'run')} on this device held it"
    fragments = "fragments of freed memory are not planned"
    range_ = f"half to twice as much, and fragments up to {MOST_FRAGMENTS:.0%} of activations, are assumed"
    return f"neither was measured, and {fragments}: {range_}; the first run on this device replaces them"


def _planned(estimate: Estimate) -> dict[str, Any]:
    """Return one plan: memory in bytes by stage and part, seconds by part."""
    case, time = estimate.case, estimate.time
    settings = {
        LLAMAFACTORY.key_of(f"{group}.{name}"): value
        for group in ("parallel", "batch", "recompute", "performance", "experts")
        for name, value in getattr(case.settings, group)
    }
    return {
        "layout": layout_words(case),
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
    """Return the whole answer; numbers in bytes and seconds."""
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
        "enough": None if found.enough is None else _planned(found.enough),
        "better": found.is_better,
        "recommended": None if found.recommended is None else _planned(found.recommended),
        "priced": [
            {"name": name, "changes": dict(LOSSY[name]), "plan": _planned(best)} for name, best in found.lossy.items()
        ],
        "less": [{"changes": dict(changes), "plan": _planned(best)} for changes, best in found.less],
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
    # Numbers that are not finite would be no JSON.
    return json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False)
