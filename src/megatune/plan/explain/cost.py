"""What another value of a setting would change in memory and time, by the planner's own answers."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatune.config.pipeline import pipeline_chunks
from megatune.config.setting import SettingInfo
from megatune.config.settings import Settings, all_settings, setting_value, with_settings
from megatune.plan.case import Case
from megatune.plan.changes.variation import differences
from megatune.plan.estimate import Estimate, estimate
from megatune.plan.explain.base_case import COMPANIONS, COMPANIONS_OF_PREFERENCE, BaseCase, problems
from megatune.plan.memory.estimate import MEMORY_PARTS

_ACCUMULATION = "batch.gradient_accumulation_steps"
_PROCESSES = "run.num_processes"
_RESET_GROUPS = ("parallel", "recompute", "optimizer", "precision")
_MOST_REPAIRS = 4


@dataclass(frozen=True)
class Effect:
    """Another value of a setting, what else had to change beside it, by "group.name", and the plans of both."""

    value: Any
    beside: Mapping[str, Any]
    before: Estimate
    after: Estimate

    @property
    def memory(self) -> int:
        """Bytes more on the fullest stage."""
        return self.after.fullest.total - self.before.fullest.total

    @property
    def part(self) -> tuple[str, int]:
        """The part of memory that changes most, and by how many bytes; of each one's fullest stage."""
        before, after = self.before.fullest, self.after.fullest
        changes = ((part, getattr(after, part) - getattr(before, part)) for part in MEMORY_PARTS)
        return max(changes, key=lambda change: abs(change[1]))

    @property
    def same_rows(self) -> bool:
        """Whether a step trains as many tokens; otherwise times are compared by the token."""
        return self.before.time.tokens == self.after.time.tokens

    @property
    def time(self) -> float:
        """Change of the time for as many tokens: 0.12 is 12 % more."""
        return self.before.time.tokens_per_second / self.after.time.tokens_per_second - 1

    @property
    def is_none(self) -> bool:
        """Whether the planner says the same."""
        return self.before.stages == self.after.stages and self.before.time == self.after.time


# What lists of a model's modules, and of losses, are compared with.
_NAMES: Mapping[str, list[list[str]]] = {
    "freeze_trainable_modules": [["mlp"], ["self_attn"]],
    "freeze_extra_modules": [["embed_tokens"], ["lm_head"]],
    "lora_target": [["q_proj", "v_proj"], ["linear_qkv", "linear_proj"]],
    "additional_target": [["embed_tokens"], ["lm_head"]],
    "pref_loss": [["orpo"], ["ipo"]],
}


@dataclass(frozen=True)
class SettingImpact:
    """A setting's value now in a case, and the effects of others; () where the setting has none.

    Attributes:
        companions: settings changed in the case so that the setting has an effect.
        refused: why a value was not compared, where none could be.
    """

    base: BaseCase
    companions: Mapping[str, Any]
    now: Any
    effects: tuple[Effect, ...]
    refused: str = ""


def impact_of(info: SettingInfo, cases: Iterable[BaseCase]) -> SettingImpact | None:
    """Find the first case in which the setting changes memory or time; where it never does, one without effects; None
    where no case could be planned."""
    compared, refused, found = False, "", None
    for base in cases:
        if base.case is None:
            continue
        for companions in COMPANIONS_OF_PREFERENCE if info.group == "preference" else COMPANIONS:
            same = all(value_of(base.case, path) == value for path, value in companions.items())
            if companions and (same or info.path in companions):
                continue
            if (case := _changed(base.case, companions)) is None:
                continue
            effects, why = _effects(info, case)
            now = value_of(case, info.path)
            if not all(effect.is_none for effect in effects):
                return SettingImpact(base, companions, now, tuple(effects))
            compared = compared or bool(effects)
            if not companions and (found is None or info.group == "experts"):
                refused, found = why, SettingImpact(base, {}, now, ())
    if found is None or compared or _unread(info, found.base.case):
        return found
    return replace(found, refused=refused or info.expected)


def against(case: Case, path: str, value: Any) -> Effect | None:
    """Compare the case as it is with the same with `value`, whose `Effect.beside` is; None where that cannot be."""
    found = _effect(case, path, value)
    return found and replace(found, value=value_of(case, path), before=found.after, after=found.before)


def _effect(case: Case, path: str, value: Any) -> Effect | None:
    """Return what another value changes; None where it cannot be."""
    if (other := _changed(case, {path: value})) is None:
        return None
    beside = differences(case.settings, other.settings)
    beside.pop(path, None)
    return Effect(value, beside, estimate(case), estimate(other))


def value_of(case: Case, path: str) -> Any:
    """Return a setting's value; the number of processes is that of the plan, and its model is the model."""
    return case.world_size if path == _PROCESSES else setting_value(case.settings, path)


def _effects(info: SettingInfo, case: Case) -> tuple[list[Effect], str]:
    """Return the effect of each value worth comparing, and why the first of those that are not valid is not."""
    effects: list[Effect] = []
    refused = ""
    for value in alternatives(info, case):
        if (effect := _effect(case, info.path, value)) is not None:
            effects.append(effect)
        elif not refused:
            found = problems(replace(case, settings=with_settings(case.settings, {info.path: value})))
            refused = found[0].what if found else ""
    return effects, refused


def alternatives(info: SettingInfo, case: Case) -> list[Any]:
    """Return values worth comparing: the other truth, each other choice, half and double of a number."""
    now = value_of(case, info.path)
    compare = {"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt}
    return [
        value
        for value in _candidates(info, now, case)
        if value != now and all(compare[bound](value, limit) for bound, limit in info.bounds.items())
    ]


def _candidates(info: SettingInfo, now: Any, case: Case) -> Iterable[Any]:
    if info.name == "pipeline_model_parallel_layout":
        return _moved_layer(case)
    if info.name in _NAMES:
        return _NAMES[info.name]
    if info.choices:
        return [[choice] for choice in info.choices] if list in info.kinds else info.choices
    if bool in info.kinds and str not in info.kinds:
        return (True, False)
    if int in info.kinds and now is None and info.unit == "layers":
        share = -(-case.model.architecture.num_layers // case.settings.parallel.pipeline_model_parallel_size)
        return (2, 4, share // 2) if info.group == "recompute" else (share - 1, share - 2)
    if int in info.kinds:
        return (1, 2, 4) if now is None else (now // 2, now * 2) if now > 0 else (1,)
    if float in info.kinds:
        return (1.0, 1.5) if now is None else (now / 2, now * 2) if now else (0.001,)
    return ()


def _moved_layer(case: Case) -> list[str]:
    """Return the layout of the case with the last stage's layer moved to the first."""
    parallel = case.settings.parallel
    if parallel.pipeline_model_parallel_size == 1:
        return []
    chunks = [chunk.num_layers for chunk in pipeline_chunks(parallel, case.model.architecture.num_layers)]
    chunks[0], chunks[-1] = chunks[0] + 1, chunks[-1] - 1
    return ["E" + "|".join(f"t*{count}" for count in chunks) + "L"]


def _changed(case: Case, changes: Mapping[str, Any]) -> Case | None:
    """Return the case with other settings, and the same rows in a step where these can be split. A few settings at most
    that a rule has against the new values go back to their defaults."""
    if not changes:
        return case
    settings = with_settings(case.settings, changes)
    for _ in range(_MOST_REPAIRS):
        new = _same_rows(case, settings, changes)
        if new is None:
            return None
        found = problems(new)
        if not found:
            return new
        infos = all_settings()
        resets = {
            path: infos[path].default
            for path in found[0].paths
            if path not in changes and path in infos and setting_value(settings, path) != infos[path].default
        }
        if not resets or any(path.partition(".")[0] not in _RESET_GROUPS for path in resets):
            return None
        settings = with_settings(settings, resets)
    return None


def _same_rows(case: Case, settings: Settings, changes: Mapping[str, Any]) -> Case | None:
    """Return the case with these settings, gradient_accumulation_steps such that a step has as many rows as before."""
    world = changes.get(_PROCESSES, case.world_size)
    if world % settings.parallel.smallest_world:
        return None
    new = replace(case, settings=settings, world_size=world)
    rows = new.micro_batch_size * new.dp_size
    if _ACCUMULATION in changes or case.global_batch_size % rows:
        return new
    return replace(new, settings=with_settings(settings, {_ACCUMULATION: case.global_batch_size // rows}))


def _unread(info: SettingInfo, case: Case | None) -> bool:
    """Return whether the planner says the same with other text, or other names, that no rule has looked at."""
    samples = {str: "text", list: [0.5] if info.items is float else ["text"], dict: {"name": 1}}
    sample = next((samples[kind] for kind in samples if kind in info.kinds), None)
    if case is None or sample is None or info.choices:
        return False
    try:
        other = estimate(replace(case, settings=with_settings(case.settings, {info.path: sample})))
    except ValueError:
        return False
    return Effect(None, {}, estimate(case), other).is_none
