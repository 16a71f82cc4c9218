"""Seconds and model FLOP of a vision tower and its projectors. The first stage has them, whole on every rank."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from megatune.plan.case import Case, VisionTower
from megatune.plan.time.compute import Operator, Seconds, add_up, linear_operator, pass_operator
from megatune.plan.time.work import Work

# Tokens of one image at most: patches attend to those of their own image. Rows with more are taken to have several.
_IMAGE_TOKENS = 1024
_LAUNCHES = 12  # of a layer, besides its products


def vision_seconds(case: Case, work: Work) -> Seconds | None:
    """Of a micro-batch; None without images."""
    vision, trainable = case.model.vision, case.settings.finetuning
    if vision is None or not case.image_tokens:
        return None
    full = trainable.finetuning_type == "full"
    return _seconds(
        work,
        vision,
        case.micro_batch_size * case.image_tokens,
        full and not trainable.freeze_vision_tower,
        full and not trainable.freeze_multi_modal_projector,
        min(case.image_tokens, _IMAGE_TOKENS),
    )


@lru_cache(maxsize=1024)
def _seconds(work: Work, vision: VisionTower, tokens: int, tower: bool, projector: bool, image: int) -> Seconds:
    merged = vision.spatial_merge_size**2
    alone = replace(work, tp=1, tokens=tokens * merged, outer_tokens=tokens * merged, lora_rank=0, lora_target=())
    layer = _layer_operators(replace(alone, trained=tower), vision, image * merged)
    operators = [
        operator if tower else operator._replace(backward=0.0, weight_gradient=0.0)
        for operator in layer * vision.num_layers
    ]
    # All projectors' matrices as one product of as many multiply-adds.
    width = vision.num_projector_parameters / work.architecture.hidden_size
    product = linear_operator(
        replace(alone, trained=projector), "projector", tokens, width, work.architecture.hidden_size
    )
    operators.append(product if projector else product._replace(backward=0.0, weight_gradient=0.0))
    return add_up(work, operators, both_ways=tower)


def _layer_operators(work: Work, vision: VisionTower, image: int) -> list[Operator]:
    width, patches, ffn = vision.hidden_size, work.tokens, vision.ffn_hidden_size
    up = 2 * ffn if vision.gated else ffn
    # Nothing is masked: 2 · 2 · n · channels multiply-adds a patch.
    forward, backward = work.rates.efficiency.packed_attention
    seconds = 4 * patches * image * width / work.rates.peak
    return [
        linear_operator(work, "vision", patches, 3 * width, width),
        Operator("vision", seconds / forward, 2.5 * seconds / backward, 0.0, 3),
        linear_operator(work, "vision", patches, width, width),
        linear_operator(work, "vision", patches, up, width),
        linear_operator(work, "vision", patches, width, ffn),
        pass_operator(work, "vision", patches * (10 * width + 3 * up), 2, 3, _LAUNCHES),
    ]


def vision_flops(case: Case) -> float:
    """Model FLOP of a step: three times the forward pass of what is trained, once that of what is frozen."""
    vision, trainable = case.model.vision, case.settings.finetuning
    if vision is None or not case.image_tokens:
        return 0.0
    full, merged = trainable.finetuning_type == "full", vision.spatial_merge_size**2
    tokens = case.global_batch_size * case.image_tokens
    attention = 4 * vision.num_layers * vision.hidden_size * min(case.image_tokens, _IMAGE_TOKENS) * merged
    tower = tokens * merged * (2 * vision.num_parameters + attention)
    projector = tokens * 2 * vision.num_projector_parameters
    return (3 if full and not trainable.freeze_vision_tower else 1) * tower + (
        3 if full and not trainable.freeze_multi_modal_projector else 1
    ) * projector
