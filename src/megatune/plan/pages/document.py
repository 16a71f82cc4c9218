"""A plan as one JSON document, and what every plan takes for granted."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

from megatune.config.dialects.llamafactory import LLAMAFACTORY
from megatune.plan.answer import Answer
from megatune.plan.changes.variation import with_settings
from megatune.plan.estimate import Estimate
from megatune.plan.flops import num_parameters
from megatune.plan.memory.estimate import MEMORY_PARTS
from megatune.plan.memory.workspace import COMMUNICATOR, CONTEXT, CPU_PROCESS
from megatune.plan.pages.words import bytes_unit, count, layout_words
from megatune.plan.question import Question
from megatune.plan.routing import BALANCED_VARIATION, FREE_VARIATION, expert_imbalance, is_balanced
from megatune.plan.schedule import bubble_share
from megatune.plan.search import SearchResult
from megatune.plan.time.estimate import TIME_PARTS


def standing_notes(question: Question) -> Iterator[str]:
    """What every plan takes for granted, and what this one cannot be trained with."""
    machine = question.machine
    device, dtype = machine.device, question.settings.precision.params_dtype
    unit = bytes_unit(device.memory)
    yield (
        f"{device.name}: {unit.with_name(device.memory)} can be used, {device.flops[dtype] / 1e12:,.4g} TFLOP/s in "
        f"{dtype}, {device.bandwidth / 1e9:,.4g} GB/s of memory bandwidth"
    )
    yield "memory is that of a step whose rows all have the longest length; shorter rows take less"
    yield from _beside_tensors(question)
    yield from _uneven_experts(question)
    runs = machine.calibration.num_runs
    fitted = (
        f"fitted to {count(runs, 'run')} on this device" if runs else "of this kind of device, not of your machines"
    )
    yield f"efficiencies are {fitted}" + ("" if runs else "; megatune plan --calibrate RUN fits them")
    if question.trainable.kind == "lora":
        yield "LoRA can be planned, and not trained yet"
    if question.model.architecture.vision is not None:
        yield "vision-language models can be planned, and not trained yet"


def _beside_tensors(question: Question) -> Iterator[str]:
    """Of memory that is no tensor."""
    if question.machine.device.generation == "cpu":
        yield f"framework: a process takes {_mib(CPU_PROCESS)} before it makes a model"
    else:
        yield (
            f"framework: a CUDA context with its libraries takes {_mib(CONTEXT)}; communication buffers: NCCL takes "
            f"{_mib(COMMUNICATOR)} for each group of more than one rank; neither was measured"
        )
    yield "fragments of freed memory are not counted"


def _uneven_experts(question: Question) -> Iterator[str]:
    """The law of expert imbalance by an example: of the settings' own expert-parallel ranks, or of eight."""
    settings, moe = question.settings, question.model.architecture.moe
    if moe is None:
        return
    own = settings.parallel.expert_model_parallel_size
    ranks = own if own > 1 else math.gcd(8, moe.num_experts)
    factor = expert_imbalance(with_settings(settings, {"parallel.expert_model_parallel_size": ranks}), moe)
    variations = {True: BALANCED_VARIATION, False: FREE_VARIATION}
    balanced = is_balanced(settings)
    other = f"{variations[not balanced]:.0%} where {'nothing' if balanced else 'something'} balances them"
    yield (
        f"expert imbalance: an expert's tokens vary by {variations[balanced]:.0%} of their mean ({other}), so the "
        f"fullest of {ranks} expert-parallel ranks has {factor:.2f} times an even share"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"


_GROUPS = ("parallel", "batch", "recompute")


def estimate_document(estimate: Estimate) -> dict[str, Any]:
    """One plan: memory in bytes by stage and part, seconds by part."""
    case, time = estimate.case, estimate.time
    settings = {
        LLAMAFACTORY.key_of(f"{group}.{name}"): getattr(getattr(case.settings, group), name)
        for group in _GROUPS
        for name in type(getattr(case.settings, group)).model_fields
    }
    return {
        "layout": layout_words(case),
        "settings": settings,
        "world_size": case.world_size,
        "data_parallel_size": case.dp_size,
        "global_batch_size": case.global_batch_size,
        "sequence_length": case.sequence_length,
        "fits": estimate.fits,
        "memory_limit": case.machine.device.memory,
        "fullest_stage": estimate.fullest.stage,
        "fullest_bytes": estimate.fullest.total,
        "stages": [
            {
                "stage": stage.stage,
                "num_layers": stage.num_layers,
                **{part: getattr(stage, part) for part in MEMORY_PARTS},
                "total": stage.total,
            }
            for stage in estimate.stages
        ],
        "seconds": {**{part: getattr(time, part) for part in TIME_PARTS}, "total": time.total},
        "uncertainty": time.uncertainty,
        "bubble_share": bubble_share(time.chunks, case.num_micro_batches),
        "tokens": time.tokens,
        "tokens_per_second": time.tokens_per_second,
        "tokens_per_second_per_gpu": time.tokens_per_second_per_gpu,
        "tflops_per_gpu": time.model_tflops,
        "mfu": time.mfu,
    }


def search_document(result: SearchResult, top: int) -> dict[str, Any]:
    """What a search found."""
    return {
        "num_considered": result.num_considered,
        "ranked": [estimate_document(estimate) for estimate in result.ranked[:top]],
        "frontier": [estimate_document(estimate) for estimate in result.frontier],
        "too_large": [estimate_document(estimate) for estimate in result.too_large[:top]],
        "refused": [dataclasses.asdict(refusal) for refusal in result.refused],
        "policy": list(result.policy),
    }


def document(question: Question, found: Answer, top: int) -> str:
    """The whole answer; numbers in bytes and seconds."""
    machine = question.machine
    content = {
        "model": {
            "name": question.model.name,
            "num_parameters": num_parameters(question.model.architecture),
            "trainable": dataclasses.asdict(question.trainable),
        },
        "machine": {
            "device": machine.device.name,
            "memory": machine.device.memory,
            "gpus_per_node": machine.gpus_per_node,
            "link": dataclasses.asdict(machine.link),
            "network": dataclasses.asdict(machine.network),
            "calibration": dataclasses.asdict(machine.calibration),
        },
        "world_size": question.world_size,
        "global_batch_size": question.global_batch_size,
        "fits": found.fits,
        "plan": None if found.own is None else estimate_document(found.own),
        "fixes": [
            {
                "changes": dict(fix.changes),
                "fullest_bytes": fix.after.fullest.total,
                "seconds": fix.after.time.total,
                "fits": fix.after.fits,
            }
            for fix in found.fixes
        ],
        "enough": None if found.enough is None else estimate_document(found.enough),
        "better": found.is_better,
        "search": search_document(found.result, top),
        "assumptions": [*question.notes, *standing_notes(question), *found.result.policy],
    }
    # Numbers that are not finite would be no JSON.
    return json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False)
