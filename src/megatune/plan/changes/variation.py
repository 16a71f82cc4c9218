"""A case with some of its settings changed, where the rules allow it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from megatune.config.names import plain
from megatune.config.rules import check
from megatune.config.settings import GROUPS, Settings, setting_value, with_settings
from megatune.config.values import shown
from megatune.errors import MegatuneError
from megatune.families import as_trained
from megatune.plan.case import Case

Changes = Mapping[str, Any]

MICRO_BATCH = "batch.per_device_train_batch_size"
ACCUMULATION = "batch.gradient_accumulation_steps"


def varied(case: Case, changes: Mapping[str, Any]) -> tuple[dict[str, Any], Case] | None:
    """Change settings of a case, by "group.name", and keep the rows of a step: gradient_accumulation_steps follows.

    Returns:
        What differs from the case, the accumulation with it, and the new case; None where nothing does, or where a
        rule, the world or the number of rows is against it.
    """
    changes = {path: value for path, value in changes.items() if setting_value(case.settings, path) != value}
    settings = with_settings(case.settings, changes)
    if not changes or case.world_size % settings.parallel.smallest_world:
        return None
    if ACCUMULATION not in changes:
        replicas = case.world_size // settings.parallel.model_parallel_size
        rows = settings.batch.per_device_train_batch_size * replicas
        if case.global_batch_size % rows:
            return None
        if case.global_batch_size // rows != settings.batch.gradient_accumulation_steps:
            changes[ACCUMULATION] = case.global_batch_size // rows
            settings = with_settings(settings, {ACCUMULATION: changes[ACCUMULATION]})
    try:
        architecture = as_trained(case.model.architecture, settings.run.stage, case.model.name)
    except MegatuneError:
        return None
    world = case.world_size
    # What the case itself lacks, such as a data set in a plan of a model, is not held against the change.
    problems = check(settings, architecture, world)
    if problems and set(problems) - set(check(case.settings, case.model.architecture, world)):
        return None
    return changes, replace(case, settings=settings, model=replace(case.model, architecture=architecture))


def differences(before: Settings, after: Settings, groups: Iterable[str] = GROUPS) -> dict[str, Any]:
    """Return the second's values, by "group.name", of the settings in which two differ."""
    return {
        f"{group}.{name}": value
        for group in groups
        if (other := getattr(before, group)) != (own := getattr(after, group))
        for name, value in own
        if value != getattr(other, name)
    }


def smaller_micro_batch(case: Case) -> dict[str, Any]:
    """Return half of the micro-batch, or the next size below it that makes up the rows of a step; {} where it is 1."""
    rows = case.micro_batch_size * case.num_micro_batches
    sizes = [size for size in range(1, case.micro_batch_size // 2 + 1) if rows % size == 0]
    return {MICRO_BATCH: sizes[-1]} if sizes else {}


def written(changes: Mapping[str, Any]) -> str:
    """Write changes as a user does: recompute_granularity: full, recompute_method: uniform."""
    return plain(named(changes))


def named(changes: Mapping[str, Any]) -> str:
    """Write changes for a message, whose dialect writes the names (`config.names`)."""
    return ", ".join(f"`{path.partition('.')[2]}: {shown(value)}`" for path, value in changes.items())
