"""A case with some of its settings changed, where the rules allow it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatune.config.rules import RULES
from megatune.config.rules.rule import Context, Problem, Rule
from megatune.config.settings import GROUPS, Settings, all_settings, plain, setting_value, with_settings
from megatune.config.values import shown
from megatune.errors import MegatuneError
from megatune.families import as_trained
from megatune.plan.case import Case

Changes = Mapping[str, Any]

MICRO_BATCH = "batch.per_device_train_batch_size"
ACCUMULATION = "batch.gradient_accumulation_steps"
PROCESSES = "run.num_processes"
_MOST_REPAIRS = 4
_REPAIRED = ("parallel", "recompute", "optimizer", "precision")  # groups of settings that may go back to their defaults


def varied(
    case: Case, changes: Changes, *, rules: Sequence[Rule] = RULES, repair: bool = False
) -> tuple[dict[str, Any], Case] | None:
    """Change settings of a case, by "group.name", and keep the rows of a step: gradient_accumulation_steps follows.

    Args:
        rules: that the changes must not be against; what the case itself lacks, such as a data set in a plan of a
            model, is not held against them.
        repair: a few settings that a rule has against the new values go back to their defaults, and a step whose rows
            cannot be split as before has others.

    Returns:
        What differs from the case, the accumulation with it, and the new case; None where nothing does, or where a
        rule, the world or the number of rows is against it.
    """
    changes = {path: value for path, value in changes.items() if value_of(case, path) != value}
    found = _with_rows(case, changes, any_rows=repair) if changes else None
    for _ in range(_MOST_REPAIRS if repair else 1):
        if found is None or not (problems := _problems(found[1], case, rules)):
            return found
        infos = all_settings()
        resets = {
            path: infos[path].default
            for path in problems[0].paths
            if path not in changes and setting_value(found[1].settings, path) != infos[path].default
        }
        if not repair or not resets or any(path.partition(".")[0] not in _REPAIRED for path in resets):
            return None
        changes = {**changes, **resets}
        found = _with_rows(case, changes, any_rows=True)
    return None


def _with_rows(case: Case, changes: Changes, *, any_rows: bool) -> tuple[dict[str, Any], Case] | None:
    """Return the changes and the case with them, its accumulation such that a step has as many rows; None where the
    layout does not fit the world, or has no whole copies of the model as the stage trains it."""
    settings, world = with_settings(case.settings, changes), changes.get(PROCESSES, case.world_size)
    try:
        architecture = as_trained(case.model.architecture, settings.run.stage, case.model.name)
    except MegatuneError:
        return None
    if world % settings.parallel.smallest_world:
        return None
    model = replace(case.model, architecture=architecture)
    new = replace(case, settings=settings, model=model, world_size=world)
    steps, left = divmod(case.global_batch_size, new.micro_batch_size * new.dp_size)
    if left and not any_rows and ACCUMULATION not in changes:
        return None
    if ACCUMULATION in changes or left or steps == new.num_micro_batches:
        return dict(changes), new
    return {**changes, ACCUMULATION: steps}, replace(new, settings=with_settings(settings, {ACCUMULATION: steps}))


def _problems(case: Case, before: Case, rules: Sequence[Rule]) -> list[Problem]:
    """Return what rules have against a case, and not against the one before."""

    def found(case: Case) -> list[Problem]:
        context = Context(case.settings, case.model.architecture, case.world_size)
        return [problem for rule in rules for problem in rule(context)]

    problems = found(case)
    known = found(before) if problems else []
    return [each for each in problems if each not in known]


def value_of(case: Case, path: str) -> Any:
    """Return a setting's value; the number of processes is that of the plan."""
    return case.world_size if path == PROCESSES else setting_value(case.settings, path)


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
    """Write changes for a message, whose dialect writes the names (`replace_names`)."""
    return ", ".join(f"`{path.partition('.')[2]}: {shown(value)}`" for path, value in changes.items())
