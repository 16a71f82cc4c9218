"""Changes settings of a case within the rules; with a table of changes that may save memory or time, and one of
warnings for runs that fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megatune.config.rules import RULES
from megatune.config.rules.rule import Context, Problem, Rule
from megatune.config.settings import GROUPS, Settings, all_settings, is_default, setting_value, with_settings
from megatune.config.values import shown
from megatune.errors import MegatuneError
from megatune.families import as_trained
from megatune.plan.case import Case
from megatune.plan.estimate import Estimate
from megatune.plan.pages.words import percent, seconds, size
from megatune.references import assign, ref, spell

Changes = Mapping[str, Any]

MICRO_BATCH = "batch.per_device_train_batch_size"
ACCUMULATION = "batch.gradient_accumulation_steps"
PROCESSES = "run.num_processes"
_MOST_REPAIRS = 4
_REPAIRED = ("parallel", "recompute", "optimizer", "precision")  # groups of settings that a repair may reset
# Fused kernels: results differ in the last bits at most.
FREE: Changes = {
    "performance.bias_activation_fusion": True,
    "performance.apply_rope_fusion": True,
    "performance.cross_entropy_loss_fusion": True,
    "performance.rms_norm_fusion": True,
    "performance.gradient_accumulation_fusion": True,
    "experts.moe_grouped_gemm": True,
}
_GRADIENTS: Changes = {"precision.accumulate_allreduce_grads_in_fp32": False}
_AVERAGES: Changes = {"optimizer.exp_avg_dtype": "bf16", "optimizer.exp_avg_sq_dtype": "bf16"}
# Trade-offs that are faster or smaller with larger rounding errors, by name.
LOSSY: Mapping[str, Changes] = {
    "gradients in bf16": _GRADIENTS,
    "gradients and Adam's averages in bf16": {**_GRADIENTS, **_AVERAGES},
}
# Settings that change the numerics or the data of a run.
CHANGES_NUMBERS = {"data.cutoff_len", *_AVERAGES, "precision.bf16", "finetuning.finetuning_type"}
_TP, _PP = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"
_CP, _EP = "parallel.context_parallel_size", "parallel.expert_model_parallel_size"
_SEQUENCE, _VIRTUAL = "parallel.sequence_parallel", "parallel.virtual_pipeline_model_parallel_size"
_METHODS = ("recompute.recompute_granularity", "recompute.recompute_method", "recompute.recompute_num_layers")
_FULL: Changes = dict(zip(_METHODS, ("full", "uniform", 1), strict=True))
_NO_RECOMPUTE: Changes = {**dict.fromkeys(_METHODS), "recompute.moe_layer_recompute": False}
_SHORTEST = 512  # tokens of the shortest row that is proposed
_TIME, _MEMORY = 0.05, 0.01  # least share of a step's time, or of the device's memory, that a warning must save
_BUBBLE, _STATE = 0.15, 0.1  # of a step; of the device's memory


def change_case(
    case: Case, changes: Changes, *, rules: Sequence[Rule] = RULES, repair: bool = False
) -> tuple[dict[str, Any], Case] | None:
    """Change settings of a case, by "group.name", and keep the rows of a step by gradient_accumulation_steps.

    Args:
        rules: rules that the changes must meet, except where the case itself already breaks them (a plan of a bare
            model has no data set).
        repair: reset up to a few other settings that conflict with the new values to their defaults, and let a step
            have other rows if the same ones cannot be split.

    Returns:
        All changes, including the accumulation, and the new case; None if nothing changes, or if a rule, the world or
        the number of rows does not allow it.
    """
    changes = {path: value for path, value in changes.items() if value_of(case, path) != value}
    found = _with_rows(case, changes, any_rows=repair) if changes else None
    for _ in range(_MOST_REPAIRS if repair else 1):
        if found is None or not (problems := _problems(found[1], case, rules)):
            return found
        resets = {
            path: all_settings()[path].default
            for path in problems[0].paths
            if path not in changes and not is_default(found[1].settings, path)
        }
        if not repair or not resets or any(path.partition(".")[0] not in _REPAIRED for path in resets):
            return None
        changes = {**changes, **resets}
        found = _with_rows(case, changes, any_rows=True)
    return None


def _with_rows(case: Case, changes: Changes, *, any_rows: bool) -> tuple[dict[str, Any], Case] | None:
    """Return the changes and the changed case, with the accumulation that keeps the rows of a step; None if the world
    has no whole copies of the model in this layout, or the stage cannot train the model."""
    settings, world = with_settings(case.settings, changes), changes.get(PROCESSES, case.world_size)
    try:
        architecture = as_trained(case.model.architecture, case.model.name, *settings.task)
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
    """Return the problems of a case that the one before does not have."""

    def found(case: Case) -> list[Problem]:
        context = Context(case.settings, case.model.architecture, case.world_size)
        return [problem for rule in rules for problem in rule(context)]

    problems = found(case)
    known = found(before) if problems else []
    return [each for each in problems if each not in known]


def value_of(case: Case, path: str) -> Any:
    """Return the value of a setting; num_processes is the world size of the case."""
    return case.world_size if path == PROCESSES else setting_value(case.settings, path)


def differences(before: Settings, after: Settings, groups: Iterable[str] = GROUPS) -> dict[str, Any]:
    """Return the settings that differ, by "group.name", with their values after."""
    return {
        f"{group}.{name}": value
        for group in groups
        if (other := getattr(before, group)) != (own := getattr(after, group))
        for name, value in own
        if value != getattr(other, name)
    }


def smaller_micro_batch(case: Case) -> dict[str, Any]:
    """Return half the micro-batch size, or the next smaller one that divides the rows of a step; {} if it is 1."""
    rows = case.micro_batch_size * case.num_micro_batches
    sizes = [size for size in range(1, case.micro_batch_size // 2 + 1) if rows % size == 0]
    return {MICRO_BATCH: sizes[-1]} if sizes else {}


def written(changes: Mapping[str, Any]) -> str:
    """Format changes as in a settings file: recompute_granularity: full, recompute_method: uniform."""
    return spell(named(changes))


def named(changes: Mapping[str, Any]) -> str:
    """Format changes for a message whose dialect writes the names (`references`)."""
    return ", ".join(assign(path.partition(".")[2], shown(value)) for path, value in changes.items())


# --- changes that may save memory or time -----------------------------------------------------------------------------


def changes_of(case: Case) -> Iterator[tuple[str, Changes]]:
    """Yield changes that may save "memory", "time" or "memory, time"; {} for those that do not apply."""
    settings, parallel, recompute = case.settings, case.settings.parallel, case.settings.recompute
    tp, pp, cp = (setting_value(settings, path) for path in (_TP, _PP, _CP))
    moe, on_gpu = case.model.architecture.moe, not case.machine.device.on_cpu
    yield "memory, time", smaller_micro_batch(case)
    yield "memory", {MICRO_BATCH: 1}
    yield "time", {MICRO_BATCH: 2 * case.micro_batch_size}
    yield "memory, time", {"performance.cross_entropy_loss_fusion": True}
    yield "memory, time", {_SEQUENCE: True} if tp > 1 else {}
    yield "memory", {"parallel.use_distributed_optimizer": True} if case.shard_size > 1 else {}
    yield "time", overlaps(case)
    if recompute.recompute_granularity != "full":
        modules = set(recompute.recompute_modules if recompute.recompute_granularity else ())
        for each in _selective(case):
            yield "memory", each if set(each["recompute.recompute_modules"]) - modules else {}
        yield "memory", _FULL
    yield from (("time", changes) for changes in less_recompute(case))
    for larger in (2, 4):
        yield "memory", {_TP: larger * tp, _SEQUENCE: True} if larger * tp <= case.machine.gpus_per_node else {}
        yield "memory", {_PP: larger * pp}
        yield "time", {_VIRTUAL: larger} if pp > 1 else {}
    yield "memory", {_CP: 2 * cp} if case.sequence_length >= 4096 * 2 * cp else {}
    yield "memory", {_EP: 2 * parallel.expert_model_parallel_size} if moe is not None else {}
    for path, now in ((_TP, tp), (_PP, pp), (_CP, cp)):
        yield "time", {path: now // 2} if now > 1 else {}
    yield "time", {_TP: tp // 2, _SEQUENCE: tp > 2} if tp > 1 else {}
    yield "time", {"experts.moe_grouped_gemm": True} if moe is not None else {}
    yield "time", {"precision.bf16": True} if on_gpu and settings.precision.params_dtype == "float32" else {}
    yield "memory" if on_gpu else "", {"optimizer.optimizer_cpu_offload": True}
    yield "time", {"optimizer.optimizer_cpu_offload": False}
    yield "memory", _AVERAGES
    longest = min(settings.data.cutoff_len, case.sequence_length)
    yield "memory", {"data.cutoff_len": longest // 2} if longest >= 1024 else {}


def smaller_runs(settings: Settings) -> tuple[list[Changes], ...]:
    """Return kinds of changes that need less memory, to search with if no layout fits; the smallest of each first."""
    cutoff = settings.data.cutoff_len
    shorter = [cutoff // 2**power for power in range(1, cutoff.bit_length()) if cutoff // 2**power >= _SHORTEST]
    return (
        [{"optimizer.optimizer_cpu_offload": True}],
        [{"finetuning.finetuning_type": "lora"}],
        [{"data.cutoff_len": length} for length in shorter],
    )


def overlaps(case: Case) -> Changes:
    gather = {"parallel.overlap_param_gather": True} if case.settings.parallel.use_distributed_optimizer else {}
    return {"parallel.overlap_grad_reduce": True, **gather} if case.shard_size > 1 else {}


def _selective(case: Case) -> Iterator[dict[str, Any]]:
    """Yield selective recomputation of modules, the cheapest first."""
    moe = case.model.architecture.moe
    feed_forward = ["mlp"] if moe is None else ["moe"] if all(moe.layers) else ["mlp", "moe"]
    for modules in (["core_attn"], ["layernorm"], ["layernorm", *feed_forward]):
        yield {"recompute.recompute_granularity": "selective", "recompute.recompute_modules": modules}


def less_recompute(case: Case) -> Iterator[Changes]:
    """Yield changes to no recomputation, and from full to selective recomputation."""
    recompute = case.settings.recompute
    if recompute.recompute_granularity or recompute.moe_layer_recompute:
        yield _NO_RECOMPUTE
    if recompute.recompute_granularity == "full":
        yield from ({**_NO_RECOMPUTE, **each} for each in _selective(case))


# --- warnings of a run that fits --------------------------------------------------------------------------------------


class Advice(NamedTuple):
    """A warning, given with the fastest change that gains enough and fits with some margin.

    Attributes:
        why: returns the sentence, in the user's dialect; "" for no warning.
        changes: yields changes that may help.
        gain: the share of a step's time that a change must save.
        saving: or the share of the device's memory that it must save.
        otherwise: returns the end of the sentence if no change gains enough; None for no warning then.
        more_rows: whether to propose more rows in a step in that case.
    """

    why: Callable[[Estimate], str]
    changes: Callable[[Case], Iterable[Changes]]
    gain: float = _TIME
    saving: float = math.inf
    otherwise: Callable[[Estimate], str] | None = None
    more_rows: bool = False


def _in_fp32(planned: Estimate) -> str:
    return "this run computes in fp32" if planned.case.settings.precision.params_dtype == "float32" else ""


def _across_machines(planned: Estimate) -> str:
    case, time = planned.case, planned.time
    tp, inside = case.settings.parallel.tensor_model_parallel_size, case.machine.gpus_per_node
    if tp == 1 or case.world_size <= inside or inside % tp == 0 or time.tensor_parallel < _TIME * time.total:
        return ""
    waits = f"its communication waits for the network, {seconds(time.tensor_parallel)} of {seconds(time.total)} a step"
    return f"{ref('tensor_model_parallel_size', tp)} goes across machines of {inside}: {waits}"


def _inside_machines(case: Case) -> Iterator[Changes]:
    tp, pp, inside = setting_value(case.settings, _TP), setting_value(case.settings, _PP), case.machine.gpus_per_node
    for smaller in range(inside, 0, -1):
        if inside % smaller == 0 and tp % smaller == 0:
            yield {_TP: smaller, _PP: pp * tp // smaller, _SEQUENCE: smaller > 1}


def _whole_activations(planned: Estimate) -> str:
    parallel = planned.case.settings.parallel
    kept = "tensor parallelism without sequence parallelism keeps activations that could be split"
    return "" if parallel.tensor_model_parallel_size == 1 or parallel.sequence_parallel else kept


def _waiting_stages(planned: Estimate) -> str:
    count, share = planned.case.num_micro_batches, planned.time.pipeline / planned.time.total
    stages = planned.case.settings.parallel.pipeline_model_parallel_size
    few = f"{count} micro-batches for {stages} stages" if count < stages else f"{stages} stages"
    return f"{few} wait for each other {percent(share)} of a step" if stages > 1 and share >= _BUBBLE else ""


def _fewer_bubbles(case: Case) -> Iterator[Changes]:
    yield smaller_micro_batch(case)
    if case.settings.parallel.virtual_stages is None:
        yield from ({_VIRTUAL: stages} for stages in (2, 3, 4))


def _whole_optimizer(planned: Estimate) -> str:
    case, stage = planned.case, planned.fullest
    whole = stage.master_weights + stage.optimizer_state
    if case.shard_size > 1 or case.world_size == 1 or whole < _STATE * case.machine.device.memory:
        return ""
    one = "there is one replica of the model, so each rank keeps its whole optimizer state"
    return f"{one}, {size(whole)}; two replicas would shard it"


def _two_replicas(case: Case) -> Iterator[Changes]:
    sizes = {path: setting_value(case.settings, path) for path in (_TP, _PP)}
    yield from ({path: size // 2} for path, size in sizes.items() if size % 2 == 0)


def _recomputes(planned: Estimate) -> str:
    return "not all recomputation is needed" if [*less_recompute(planned.case)] else ""


def _exchanges_alone(planned: Estimate) -> str:
    return "gradient reduction is not overlapped with compute" if overlaps(planned.case) else ""


ACROSS_MACHINES = Advice(
    _across_machines,
    _inside_machines,
    gain=1e-9,
    otherwise=lambda planned: f"sizes that divide {planned.case.machine.gpus_per_node} stay inside",
)
ADVICE = (
    Advice(_in_fp32, lambda case: [{"precision.bf16": True}]),
    ACROSS_MACHINES,
    Advice(_whole_activations, lambda case: [{_SEQUENCE: True}], saving=_MEMORY),
    Advice(_waiting_stages, _fewer_bubbles, more_rows=True),
    Advice(_whole_optimizer, _two_replicas),
    Advice(_recomputes, less_recompute),
    Advice(_exchanges_alone, lambda case: [overlaps(case)]),
)
