"""The case that costs are computed for: a model, its settings and its machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal, TypeAlias

from megatune.architecture import Architecture
from megatune.config.derived import of_device, of_model
from megatune.config.load import Loaded
from megatune.config.rules import finetuning, layout, memory, pipeline, run, trained
from megatune.config.rules.rule import Context, Problem, Rule
from megatune.config.settings import Settings, plain, with_settings
from megatune.errors import MegatuneError
from megatune.plan.case import Case, PlannedModel
from megatune.plan.catalogue import find_machine, find_model
from megatune.plan.estimate import Estimate, estimate
from megatune.plan.machine import Machine

DEFAULT_MODEL, DEFAULT_GPUS, DEFAULT_GPU = "Qwen3-8B", 8, "h100-80g"
# For settings of experts, of shared ones, and of a bias on them; and of a vision encoder.
_OTHERS = ("Qwen3-30B-A3B", "Qwen1.5-MoE-A2.7B", "DeepSeek-V3", "Qwen3-VL-8B")
# What keeps a case from being planned; the other rules are about data, schedules and folders.
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
# How such a model is usually trained, so that a setting is impact against a sensible run.
_USUAL: Mapping[str, Any] = {
    "precision.bf16": True,
    "batch.per_device_train_batch_size": 1,
    "batch.gradient_accumulation_steps": 8,
    "parallel.overlap_grad_reduce": True,
    "parallel.overlap_param_gather": True,
}
_LENGTH = 4096
_DOUBLINGS = 7  # of the fewest GPUs, until a model fits
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


@dataclass(frozen=True)
class BaseCase:
    """A case, and how much of it the user asked for.

    Attributes:
        assumed: what nobody named, the model and all else or the machines; said with every number.
        why_not: what keeps the case from being planned; there are no costs then.
        architecture, world_size: as far as they are known all the same, for the rules.
    """

    case: Case | None
    assumed: Assumed = ""
    why_not: str = ""
    architecture: Architecture | None = None
    world_size: int | None = None


def default_cases(model: str | None = None, gpus: int | None = None, gpu: str | None = None) -> list[BaseCase]:
    """Return the cases that a setting is impact in where no file says more, the first one first.

    Without a model there are several: a dense one, and for what needs experts or an encoder some that have them.

    Raises:
        MegatuneError: INPUT, where model or device are not known.
    """
    machine = find_machine(gpu or DEFAULT_GPU)
    names = [model] if model else [DEFAULT_MODEL, *_OTHERS]
    assumed: Assumed = "case" if model is None else "" if gpus and gpu else "machines"
    return [_plannable(_usual(find_model(name), gpus, machine), assumed) for name in names]


def _usual(model: PlannedModel, world_size: int | None, machine: Machine) -> Case:
    """Return a model as it is usually trained, on the GPUs named or on as few as it fits on in a usual layout; where
    none fits, in the layout that takes least memory."""
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
    """Return the usual layouts, the simplest first, and last the defaults."""
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
        world_size: processes of the whole run; None takes num_processes, or as many as one usual machine has, made
            up to whole copies of the model.
        is_assumed: nobody asked for these machines.
    """
    settings, name = loaded.settings, loaded.settings.model.model_name_or_path
    size = settings.parallel.smallest_world
    asked = world_size or settings.run.num_processes
    assumed: Assumed = "machines" if is_assumed or asked is None else ""
    if name is None:
        return BaseCase(None, assumed, "model_name_or_path is missing")
    try:
        model = find_model(name, settings.model.model_revision, settings.model.cache_dir, stage=settings.run.stage)
    except MegatuneError as error:
        return BaseCase(None, assumed, error.findings[0].what)
    world = asked or size * -(-DEFAULT_GPUS // size)
    loaded = of_model(loaded, model.architecture)[0].for_world(world)
    if not machine.device.on_cpu:
        loaded, _ = of_device(loaded, machine.device.gpu, world)
    settings = loaded.settings
    return _plannable(Case(model=model, settings=settings, world_size=world, machine=machine), assumed)


def _plannable(case: Case, assumed: Assumed) -> BaseCase:
    found = problems(case)
    known = (case.model.architecture, case.world_size)
    return BaseCase(None, assumed, found[0].what, *known) if found else BaseCase(case, assumed, "", *known)


def problems(case: Case) -> list[Problem]:
    """Return what the rules have against a case, as far as it is planned, with our own names of settings."""
    context = Context(case.settings, case.model.architecture, case.world_size)
    return [replace(problem, what=plain(problem.what)) for rule in PLANNED_RULES for problem in rule(context)]
