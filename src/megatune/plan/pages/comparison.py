"""Why one plan is faster than another, part by part."""

from __future__ import annotations

from collections.abc import Iterator

from megatune.config.dialects.llamafactory import LLAMAFACTORY
from megatune.config.groups.performance import RecomputeSettings
from megatune.config.values import shown
from megatune.plan.estimate import Estimate
from megatune.plan.memory.estimate import MEMORY_PARTS
from megatune.plan.pages.tables import wrapped
from megatune.plan.pages.words import MEMORY_WORDS, TIME_WORDS, Unit, bytes_unit, columns, seconds_unit
from megatune.plan.time.estimate import TIME_PARTS

# Settings whose difference explains a part's.
_CAUSES = {
    "compute": ("tensor_model_parallel_size", "per_device_train_batch_size", "expert_tensor_parallel_size",
                "pipeline_model_parallel_size"),
    "recompute": ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    "tensor_parallel": ("tensor_model_parallel_size", "sequence_parallel"),
    "context_parallel": ("context_parallel_size", "cp_comm_type"),
    "expert_parallel": ("expert_model_parallel_size", "expert_tensor_parallel_size"),
    "pipeline": ("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
                 "gradient_accumulation_steps"),
    "data_parallel": ("overlap_grad_reduce", "overlap_param_gather", "tensor_model_parallel_size",
                      "pipeline_model_parallel_size"),
    "optimizer": ("use_distributed_optimizer", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
}  # fmt: skip
_MOST_REASONS = 4
_WORTH_SAYING = 0.02  # of the step


def changed_settings(mine: Estimate, other: Estimate) -> dict[str, tuple[object, object]]:
    """Return the keys of layout, batch and recomputation that differ, with both values."""
    changed = {}
    for group in ("parallel", "batch", "recompute"):
        first, second = getattr(mine.case.settings, group), getattr(other.case.settings, group)
        for name in type(first).model_fields:
            if (before := getattr(first, name)) != (after := getattr(second, name)):
                changed[LLAMAFACTORY.key_of(f"{group}.{name}")] = (before, after)
    first, second = (_effective(estimate.case.settings.recompute) for estimate in (mine, other))
    return {key: values for key, values in changed.items() if key not in first or first[key] != second[key]}


def _effective(recompute: RecomputeSettings) -> dict[str, object]:
    """Return what the settings of recomputation amount to: null is one of the values."""
    full = recompute.recompute_granularity == "full"
    block = full and recompute.recompute_method == "block"
    return {
        "recompute_method": "block" if block else "uniform" if full else None,
        "recompute_num_layers": recompute.recompute_num_layers or (1 if full and not block else None),
        "recompute_modules": recompute.recompute_modules if recompute.recompute_granularity == "selective" else None,
    }


def comparison_lines(mine: Estimate, better: Estimate, width: int = 80) -> Iterator[str]:
    """Print what to write, both plans next to each other, and the largest reasons."""
    changed = changed_settings(mine, better)
    yield from (f"  {key}: {shown(after)}" for key, (_, after) in changed.items())
    yield "Why, part by part:"
    unit = seconds_unit(max(mine.time.total, better.time.total))
    memory = bytes_unit(max(mine.fullest.total, better.fullest.total))
    rows = [["", "yours", "better", "change"]]
    for part in (*TIME_PARTS, "total"):
        first, second = getattr(mine.time, part), getattr(better.time, part)
        if first or second:
            rows.append(_row(TIME_WORDS.get(part, "step"), unit, first, second))
    for part in (*MEMORY_PARTS, "total"):
        first, second = getattr(mine.fullest, part), getattr(better.fullest, part)
        if abs(second - first) >= 0.1 * memory.size or part == "total":
            rows.append(_row(MEMORY_WORDS.get(part, "fullest rank"), memory, first, second))
    yield from ("  " + line for line in columns(rows))
    for reason in _reasons(mine, better, changed):
        yield from wrapped(reason, width - 2)  # arrows are two characters in ASCII


def _reasons(mine: Estimate, better: Estimate, changed: dict[str, tuple[object, object]]) -> Iterator[str]:
    """Name the parts that change most, each with the settings behind it."""
    unit = seconds_unit(max(mine.time.total, better.time.total))
    gains = {part: getattr(mine.time, part) - getattr(better.time, part) for part in TIME_PARTS}
    for part in sorted(gains, key=lambda part: -abs(gains[part]))[:_MOST_REASONS]:
        if abs(gains[part]) < _WORTH_SAYING * mine.time.total:
            continue
        causes = [
            f"{key} {shown(before)} → {shown(after)}"
            for key, (before, after) in changed.items()
            if key in _CAUSES.get(part, ())
        ]
        does = "saves" if gains[part] > 0 else "costs"
        why = f": {', '.join(causes)}" if causes else ""
        yield f"{TIME_WORDS[part]} {does} {unit.with_name(abs(gains[part]))}{why}"


def _row(name: str, unit: Unit, first: float, second: float) -> list[str]:
    change = second - first
    text = "0.00" if abs(change) < 0.005 * unit.size else f"{'+' if change > 0 else ''}{unit.of(change)}"
    return [f"{name}, {unit.name}", unit.of(first), unit.of(second), text]
