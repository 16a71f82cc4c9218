"""A plan as one JSON document: bytes, seconds, and the settings as a file has them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from megatune.config.dialects.llamafactory import LLAMAFACTORY
from megatune.plan.answer import Answer
from megatune.plan.estimate import Estimate
from megatune.plan.flops import num_parameters
from megatune.plan.memory.estimate import MEMORY_PARTS
from megatune.plan.pages.assumptions import standing_notes
from megatune.plan.pages.words import layout_words
from megatune.plan.question import Question
from megatune.plan.schedule import bubble_share
from megatune.plan.search import SearchResult
from megatune.plan.time.estimate import TIME_PARTS

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
    machine, trainable = question.machine, question.settings.finetuning
    content = {
        "model": {
            "name": question.model.name,
            "num_parameters": num_parameters(question.model.architecture),
            "trainable": {
                "kind": trainable.finetuning_type,
                "lora_rank": trainable.lora_rank,
                "lora_target": trainable.lora_layers,
                "freeze_vision_tower": trainable.freeze_vision_tower,
                "freeze_multi_modal_projector": trainable.freeze_multi_modal_projector,
                "freeze_language_model": trainable.freeze_language_model,
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
