"""Computes with the planner how another value of a setting changes memory and time, and the cases to compute this
for."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal, TypeAlias

from megatune.architecture import Architecture
from megatune.config.derived import with_device_defaults, with_model_defaults
from megatune.config.load import Loaded
from megatune.config.pipeline import pipeline_chunks, write_layout
from megatune.config.rules import finetuning, layout, memory, pipeline, run, trained
from megatune.config.rules.rule import Context, Problem, Rule, is_met
from megatune.config.setting import EXPERTS, SettingInfo
from megatune.config.settings import Settings, all_settings, with_settings
from megatune.errors import MegatuneError
from megatune.plan.case import Case, PlannedModel
from megatune.plan.catalogue import find_machine, find_model
from megatune.plan.changes import change_case, value_of
from megatune.plan.estimate import Estimate, estimate
from megatune.plan.fixes import Fix, try_change
from megatune.plan.machine import Machine

DEFAULT_MODEL, DEFAULT_GPUS, DEFAULT_GPU = "Qwen3-8B", 8, "h100-80g"
# Models for the settings of experts, of shared experts, of an expert bias, and of a vision encoder.
_OTHERS = ("Qwen3-30B-A3B", "Qwen1.5-MoE-A2.7B", "DeepSeek-V3", "Qwen3-VL-8B")
# Rules that a case must meet to be planned; the others are about data, schedules and folders.
PLANNED_RULES: tuple[Rule, ...] = (
    *layout.RULES,
    *pipeline.RULES,
    *layout.EXPERT_RULES,
    *memory.RULES,
    *finetuning.RULES,
    *trained.RULES,
    *finetuning.PREFERENCE_RULES,
    run.cutoff,
)
# Usual settings for such a model, so that a setting is compared with a sensible run.
_USUAL: Mapping[str, Any] = {
    "precision.bf16": True,
    "batch.per_device_train_batch_size": 1,
    "batch.gradient_accumulation_steps": 8,
    "parallel.overlap_grad_reduce": True,
    "parallel.overlap_param_gather": True,
}
_LENGTH = 4096
_DOUBLINGS = 7  # at most, of the fewest GPUs until a model fits
_TP, _SP, _PP, _EP = (
    "parallel.tensor_model_parallel_size",
    "parallel.sequence_parallel",
    "parallel.pipeline_model_parallel_size",
    "parallel.expert_model_parallel_size",
)
_EXPERTS: Mapping[str, Any] = {
    "recompute.recompute_granularity": "selective",
    "recompute.recompute_modules": ["layernorm", "moe_act"],
}
Assumed: TypeAlias = Literal["", "case", "machines"]
# Changes of a case, tried one after the other together with the needs of a setting until it has an effect.
_OVERLAYS: tuple[Mapping[str, Any], ...] = (
    {},
    {_TP: 2, _SP: True},
    {_TP: 1, _SP: False, _PP: 8},
    {"recompute.recompute_num_layers": 4},
)
# Values to compare lists of modules and losses with.
_NAMES: Mapping[str, list[list[str]]] = {
    "freeze_trainable_modules": [["mlp"], ["self_attn"]],
    "freeze_extra_modules": [["embed_tokens"], ["lm_head"]],
    "lora_target": [["q_proj", "v_proj"], ["linear_qkv", "linear_proj"]],
    "additional_target": [["embed_tokens"], ["lm_head"]],
    "pref_loss": [["orpo"], ["ipo"]],
}


@dataclass(frozen=True)
class BaseCase:
    """A case to compute costs for.

    Attributes:
        assumed: what the user did not give: the whole "case", or the "machines"; printed with the costs.
        why_not: why the case cannot be planned; there are no costs then.
        architecture, world_size: for the rules; None if unknown.
    """

    case: Case | None
    assumed: Assumed = ""
    why_not: str = ""
    architecture: Architecture | None = None
    world_size: int | None = None


def default_cases(model: str | None = None, gpus: int | None = None, gpu: str | None = None) -> list[BaseCase]:
    """Return the cases to compute costs for if there is no file, in the order in which they are tried.

    Without a model there are several: a dense one, and others with experts or a vision encoder.

    Raises:
        MegatuneError: INPUT if the model or the device is unknown.
    """
    machine = find_machine(gpu or DEFAULT_GPU)
    names = [model] if model else [DEFAULT_MODEL, *_OTHERS]
    assumed: Assumed = "case" if model is None else "" if gpus and gpu else "machines"
    return [_plannable(_usual(find_model(name), gpus, machine), assumed) for name in names]


def _usual(model: PlannedModel, world_size: int | None, machine: Machine) -> Case:
    """Return the usual case of a model, on the given or the fewest GPUs with a usual layout that fits; if none fits,
    in the layout with the least memory."""
    fewest = DEFAULT_GPUS if model.architecture.moe is None else 2 * DEFAULT_GPUS
    worlds = [world_size] if world_size else [fewest * 2**power for power in range(_DOUBLINGS + 1)]
    planned: list[Estimate] = []
    for world in worlds:
        cases = _usual_cases(model, world, machine)
        new = [estimate(case) for case in cases if not problems(case)]
        if fitting := next((each for each in new if each.fits), None):
            return fitting.case
        planned += new
    return min(planned, key=lambda each: each.fullest.total).case if planned else cases[-1]


def _usual_cases(model: PlannedModel, world: int, machine: Machine) -> list[Case]:
    """Return the usual layouts, the simplest first and the default last."""
    moe = model.architecture.moe
    usual = {**_USUAL, "data.cutoff_len": min(_LENGTH, model.architecture.max_position_embeddings)}
    if moe is None:
        layouts: list[Mapping[str, Any]] = [
            {_TP: tp, _SP: True, _PP: pp} for tp, pp in ((2, 1), (4, 1), (8, 1), (8, 2), (8, 4), (8, 8))
        ]
    else:
        ep = gcd(moe.num_experts, DEFAULT_GPUS, world)
        layouts = [{**_EXPERTS, _EP: ep, _PP: pp} for pp in (1, 2, 4, 8)]
        wide = gcd(moe.num_experts, 8 * DEFAULT_GPUS, world)
        layouts += [{"recompute.recompute_granularity": "full", _EP: wide, _PP: pp} for pp in (4, 8) if wide > ep]
    return [
        Case(model=model, settings=with_settings(Settings(), {**usual, **layout}), world_size=world, machine=machine)
        for layout in (*layouts, {})
    ]


def case_of_file(
    loaded: Loaded, machine: Machine, world_size: int | None = None, *, is_assumed: bool = False
) -> BaseCase:
    """Return the case of a settings file.

    Args:
        world_size: processes of the whole run; None for num_processes, or else those of one usual machine, rounded up
            to whole copies of the model.
        is_assumed: whether the machine is a default.
    """
    settings, name = loaded.settings, loaded.settings.model.model_name_or_path
    size = settings.parallel.smallest_world
    processes = world_size or settings.run.num_processes
    assumed: Assumed = "machines" if is_assumed or processes is None else ""
    if name is None:
        return BaseCase(None, assumed, "model_name_or_path is missing")
    try:
        model = find_model(name, settings)
    except MegatuneError as error:
        return BaseCase(None, assumed, error.findings[0].what)
    world = processes or size * -(-DEFAULT_GPUS // size)
    loaded = with_model_defaults(loaded, model.architecture)[0].for_world(world)
    if not machine.device.on_cpu:
        loaded, _ = with_device_defaults(loaded, machine.device.gpu, world)
    settings = loaded.settings
    return _plannable(Case(model=model, settings=settings, world_size=world, machine=machine), assumed)


def _plannable(case: Case, assumed: Assumed) -> BaseCase:
    found = problems(case)
    known = (case.model.architecture, case.world_size)
    return BaseCase(None, assumed, found[0].what, *known) if found else BaseCase(case, assumed, "", *known)


def problems(case: Case) -> list[Problem]:
    """Return the problems that `PLANNED_RULES` find in a case, with our own names of settings."""
    context = Context(case.settings, case.model.architecture, case.world_size)
    return [problem for rule in PLANNED_RULES for problem in rule(context)]


@dataclass(frozen=True)
class SettingImpact:
    """The present value of a setting in a case, and the effects of other values; () if they have none.

    Attributes:
        companions: settings that were changed in the case so that the setting has an effect.
        refused: why no other value could be compared.
    """

    base: BaseCase
    companions: Mapping[str, Any]
    now: Any
    effects: tuple[Fix, ...]
    refused: str = ""


def impact_of(info: SettingInfo, cases: Iterable[BaseCase]) -> SettingImpact | None:
    """Find the first case in which the setting changes memory or time. If there is none, return one without effects;
    if no case can be planned, None."""
    compared, refused, found = False, "", None
    for base in cases:
        if base.case is None:
            continue
        has_needs = needed(info, base.case)
        for companions in ({}, *({**has_needs, **overlay} for overlay in _OVERLAYS)):
            changed = change_case(base.case, companions, rules=PLANNED_RULES, repair=True)
            case = base.case if changed is None else changed[1]
            if companions and (info.path in companions or changed is None):
                continue
            effects, why = _effects(info, case)
            now = value_of(case, info.path)
            if not all(effect.has_no_effect for effect in effects):
                return SettingImpact(base, companions, now, tuple(effects))
            compared = compared or bool(effects)
            if not companions and (found is None or info.group == "experts"):
                refused, found = why, SettingImpact(base, {}, now, ())
    if found is None or compared or _unread(info, found.base.case):
        return found
    return replace(found, refused=refused or info.expected)


def needed(info: SettingInfo, case: Case) -> dict[str, Any]:
    """Return changes of a case that meet the declared needs of a setting, and recursively the needs of these."""
    changes: dict[str, Any] = {}
    for need in info.needs:
        if need.path == EXPERTS or need.of or is_met(need, case.settings, case.model.architecture):
            continue
        other = all_settings()[need.path]
        values = (need.least,) if need.least is not None else need.values or alternatives(other, case)[-1:]
        if values:
            is_list = list in other.kinds and not isinstance(values[0], list)
            changes |= {**needed(other, case), need.path: [values[0]] if is_list else values[0]}
    return changes


def compare_with(case: Case, path: str, value: Any) -> Fix | None:
    """Compare the same case with another value with this case, the other way round than `try_value`; None if that value
    is not valid."""
    found = try_value(case, path, value)
    return found and replace(found, before=found.after, after=found.before)


def try_value(case: Case, path: str, value: Any) -> Fix | None:
    """Return the effect of another value; None if it is not valid."""
    return try_change(estimate(case), {path: value}, rules=PLANNED_RULES, repair=True)


def _effects(info: SettingInfo, case: Case) -> tuple[list[Fix], str]:
    """Return the effect of each alternative, and why the first invalid one is refused."""
    effects: list[Fix] = []
    refused = ""
    for value in alternatives(info, case):
        if (effect := try_value(case, info.path, value)) is not None:
            effects.append(effect)
        elif not refused:
            found = problems(replace(case, settings=with_settings(case.settings, {info.path: value})))
            refused = found[0].what if found else ""
    return effects, refused


def alternatives(info: SettingInfo, case: Case) -> list[Any]:
    """Return the values to compare with: the other boolean, the other choices, half and double of a number."""
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
    """Return the layout of the case with one layer moved from the last stage to the first."""
    parallel = case.settings.parallel
    if parallel.pipeline_model_parallel_size == 1:
        return []
    chunks = [chunk.num_layers for chunk in pipeline_chunks(parallel, case.model.architecture.num_layers)]
    chunks[0], chunks[-1] = chunks[0] + 1, chunks[-1] - 1
    return [write_layout(chunks)]


def _unread(info: SettingInfo, case: Case | None) -> bool:
    """Return whether other text or names in place of the value leave the plan unchanged; the rules are not checked."""
    samples = {str: "text", list: [0.5] if info.items is float else ["text"], dict: {"name": 1}}
    sample = next((samples[kind] for kind in samples if kind in info.kinds), None)
    if case is None or sample is None or info.choices:
        return False
    try:
        other = estimate(replace(case, settings=with_settings(case.settings, {info.path: sample})))
    except ValueError:
        return False
    return Fix({}, estimate(case), other).has_no_effect
