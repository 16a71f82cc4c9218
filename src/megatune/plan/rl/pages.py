"""Prints a plan of reinforcement learning: as text with changes that make it fit, and as JSON in bytes and seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from megatune.config.rl.settings import SHARE_KEYS, InferRole, ModelRole, RLSettings
from megatune.config.settings import with_settings
from megatune.config.values import counted, ranges
from megatune.pages import Entry, Item, Page, Table
from megatune.plan.case import Case
from megatune.plan.changes import written
from megatune.plan.estimate import estimate
from megatune.plan.fixes import savings
from megatune.plan.flops import num_parameters
from megatune.plan.memory.estimate import COMMUNICATOR, CONTEXT
from megatune.plan.pages.tables import time_table
from megatune.plan.pages.words import (
    Unit,
    amount,
    bytes_unit,
    describe_layout,
    describe_machine,
    describe_pace,
    describe_recompute,
    duration,
    seconds,
    seconds_unit,
    size,
)
from megatune.plan.rl.answer import (
    MAPPED_BANDWIDTH,
    SYNC_BANDWIDTH,
    UNCERTAINTY,
    DeviceGroup,
    RLAnswer,
    plan_rl,
)
from megatune.plan.rl.question import RLQuestion, teacher_inside
from megatune.plan.rl.roles import (
    GRAPHS,
    OLD_PASS,
    TEACHER_STATES,
    TEACHER_WEIGHTS,
    TRAIN,
    TRAIN_CRITIC,
    forward_case,
    num_updates,
    sync_bytes,
    training_case,
)

# Changes to evaluate and to print. The length of samples is not a setting of one role.
_TRIED, _SAID, _NOT_A_ROLE_S = 8, 3, ("data.", "optimizer.exp_avg")
_TRIED_SHARES = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4)
_ACCUMULATION = "batch.gradient_accumulation_steps"
_LESS = "more devices, a larger tensor_model_parallel_size, a shorter response_length, lora_target"


def pages(found: RLAnswer) -> Iterator[Page]:
    """Yield the models and roles, memory by device and phase, seconds by phase, and the assumptions."""
    yield Page("", _head(found))
    yield Page("", _role_lines(found))
    yield Page("", _memory(found))
    if not found.fits:
        enough, texts = advice(found)
        yield Page("What would make it fit" if enough else "What helps most", (f"  {text}" for text in texts))
    yield Page("", _time(found))
    yield Page("Assumed", (f"  - {note}" for note in notes(found)))


def _head(found: RLAnswer) -> Iterator[Item]:
    question, settings, lengths = found.question, found.question.settings, found.question.lengths
    yield Entry("models", _models(question))
    yield Entry("devices", describe_machine(question.machine, question.world_size))
    prompts, group = settings.rollout.rollout_batch_size, settings.rollout.num_return_sequences_in_group
    yield Entry("samples", f"{counted(prompts, 'prompt')} × {counted(group, 'response')} a step")
    longest = f"at most {lengths.prompt:,} + {lengths.response:,} (for memory)"
    mean = f"on average {lengths.mean_prompt:,.0f} + {lengths.mean_response:,.0f} (for time)"
    yield Entry("tokens", f"of prompt and response {longest}; {mean}; {lengths.share_cut:.0%} are truncated")


def _role_lines(found: RLAnswer) -> Iterator[Item]:
    """Yield a row for each role, or a paragraph if it is too wide."""
    question = found.question
    rows = [["role", "devices", "layout", "batch"]]
    rows += [[role.name, ranges(role.devices), *_layout(question, role)] for role in question.settings.models]
    rows += [[role.name, ranges(role.devices), *_engine(found, role)] for role in question.settings.samplers]
    yield Table(rows, range(4), [f"{row[0]}: {'; '.join(row[1:])}" for row in rows[1:]])


def _models(question: RLQuestion) -> str:
    """List each model with its roles."""
    roles: dict[str, list[str]] = {}
    settings = question.settings
    models = (*settings.models, teacher_inside(settings))
    every: list[ModelRole | InferRole] = [*filter(None, models), *settings.samplers]
    for role in every:
        words = "not known"
        if model := question.models.get(role.name):
            name = model.name.rstrip("/").split("/")[-1]
            words = f"{name}, {amount(num_parameters(model.architecture))} parameters"
        roles.setdefault(words, []).append(role.name)
    return "; ".join(f"{words} ({', '.join(names)})" for words, names in roles.items())


def _layout(question: RLQuestion, role: ModelRole) -> tuple[str, str]:
    """Format layout and batch of a role: rows of a micro-batch × micro-batches × data-parallel processes."""

    def batch(case: Case) -> str:
        return f"{case.micro_batch_size}×{case.num_micro_batches}×{case.dp_size}"

    if not role.training:
        case = forward_case(question, role, longest=False)
        return describe_layout(case), batch(case)
    case, updates = training_case(question, role, longest=False), num_updates(question, role)
    again = describe_recompute(case.settings.recompute)
    layout = f"{describe_layout(case)}{f', recompute {again}' if again != 'none' else ''}"
    return layout, f"{batch(case)}, {updates:g} update{'s' * (updates != 1)}"


def _engine(found: RLAnswer, role: InferRole) -> tuple[str, str]:
    engines = f"{role.engine}, {counted(role.num_engines, 'engine')} of {role.devices_per_engine}"
    at_once = found.seconds.rollout.at_once if role.name == "actor_infer" else role.infer_batch_size
    return engines, f"{at_once:.0f} at once"


def _memory(found: RLAnswer) -> Iterator[Item]:
    """Yield a table for each group of devices, a row for each role and a column for each phase; then the verdict."""
    group, phase = found.fullest
    held, limit = group.total(phase), found.question.machine.device.memory
    unit = bytes_unit(held)
    yield f"Memory of a device, {unit.name}, phase by phase"
    for each in found.groups:
        yield _group_table(found, each, unit)
    devices = f"device{'s' * (len(group.devices) > 1)} {ranges(group.devices)}"
    said = f"The fullest: {devices} in phase {phase}, {unit.of(held)} of {unit.with_name(limit)}, {held / limit:.0%}."
    verdict = f"It fits, with {unit.with_name(limit - held)} to spare."
    if held > limit:
        verdict = f"IT DOES NOT FIT: {unit.with_name(held - limit)} too much."
    elif not found.has_cache:
        verdict = f"IT DOES NOT FIT: {_no_cache(found)}"
    yield f"{said} {verdict}"
    for role in group.held:
        biggest = sorted(role.parts[phase].items(), key=lambda part: -part[1])
        parts = ", ".join(f"{name.replace('_', ' ')} {unit.of(part)}" for name, part in biggest if part)
        yield f"  {role.role}: {parts}"
    if host := found.host_bytes:
        yield f"Offloaded roles need {size(host)} of main memory on a machine."


def _group_table(found: RLAnswer, group: DeviceGroup, unit: Unit) -> Table:
    names = found.phases
    rows = [[f"devices {ranges(group.devices)}", *names]]
    rows += [[f"  {role.role}", *(unit.of(role.total(phase)) for phase in names)] for role in group.held]
    if len(group.held) > 1:
        rows.append(["  total", *(unit.of(group.total(phase)) for phase in names)])
    turned = [[cell.strip() for cell in row] for row in zip(*rows, strict=True)]
    return Table(rows, instead=[Table(turned)])


def _no_cache(found: RLAnswer) -> str:
    engine, longest = found.engine, found.question.lengths.longest
    if engine.cache <= 0:
        missing = f"({size(-engine.cache)} too little on each device)"
        return f"an engine's weights leave no memory for the KV cache {missing}."
    return f"an engine's cache holds {engine.cached_tokens:,} tokens, the longest sample has {longest:,}."


def _time(found: RLAnswer) -> Iterator[Item]:
    """Yield a row for each phase, then tokens/s and the rollouts."""
    time, whole = found.seconds, found.seconds.total
    concurrent = "; rollouts of the next steps run concurrently" if time.overlaps else ""
    yield f"Time of a step, {seconds_unit(whole).name}{concurrent}"
    yield time_table(time.phases.items(), whole, 1 + UNCERTAINTY)
    rate = f"{found.tokens_per_second:,.0f} tokens/s, {_rate(found):,.0f} a device"
    steps = found.question.settings.run.max_steps
    yield f"{rate}; {steps:,} steps take {duration(steps * whole)}"
    yield _describe_rollouts(found)
    if time.overlaps:
        rollout, trainer = 1 - time.rollout_side / whole, 1 - time.trainer_side / whole
        yield f"Idle: devices of the rollouts {rollout:.0%} of a step, the others {trainer:.0%}."


def _rate(found: RLAnswer) -> float:
    """Return tokens/s of one device."""
    return found.tokens_per_second / found.question.world_size


def _describe_rollouts(found: RLAnswer) -> str:
    rollout, infer, engine = found.seconds.rollout, found.question.settings.actor_infer, found.engine
    engines = "the engine" if infer.num_engines == 1 else f"each of {infer.num_engines} engines"
    text = f"Rollouts: {engines} samples {counted(round(rollout.at_once), 'sequence')} at once"
    text += f" (its cache holds {engine.cached_tokens:,} tokens), {seconds(rollout.busy_step)} for a token of each"
    if found.seconds.overlaps:
        return f"{text}."
    last = f"{seconds(rollout.last_step)} if one is left"
    if not rollout.full:
        return f"{text}, {last}; no sequence waits for a slot."
    return f"{text}, {last}; other sequences wait for a slot for {rollout.full / rollout.decode:.0%} of the time."


def notes(found: RLAnswer) -> Iterator[str]:
    """List the notes on the question, then the assumptions of every plan with their numbers."""
    question, device = found.question, found.question.machine.device
    yield from question.notes
    yield f"{device.name}: {size(device.memory)} of usable memory, {device.bandwidth / 1e9:,.4g} GB/s memory bandwidth"
    yield "responses end with a constant probability at each token, and are truncated at the longest length"
    yield "no group is filtered; rewards, except of reward models, are computed during the rollouts, at no cost in time"
    if device.on_cpu:
        yield "on a CPU offloaded weights stay in the same memory"
    else:
        yield (
            f"every role on a device is a separate process: its context takes {CONTEXT >> 20:,} MiB, each NCCL group "
            f"{COMMUNICATOR >> 20:,} MiB, an engine's CUDA graphs {GRAPHS >> 20:,} MiB; all of it stays allocated "
            "while the role sleeps, and none of it was measured"
        )
    rate = MAPPED_BANDWIDTH if device.on_cpu else SYNC_BANDWIDTH
    rates = f"{rate / 1e9:g} GB/s from the trainer's processes to the engines'"
    bucket = question.settings.run.model_update_buffer_size_mb
    yield f"sync: {size(sync_bytes(question))} of weights in buckets of {bucket:,} MB, {rates}"
    if question.settings.algorithm.distils:
        yield "train: before each update the teacher computes a forward pass over its tokens"
    elif OLD_PASS not in found.phases:
        yield "old log-probabilities are those of the rollouts and are not recomputed"
    yield (
        f"two of three published runs, whose lengths are known, are within ±{UNCERTAINTY:.0%}; all took longer than "
        "planned without sync (docs/plan-rl.md)"
    )


def document(found: RLAnswer) -> dict[str, Any]:
    """Return the content of the JSON document."""
    question, time = found.question, found.seconds
    group, phase = found.fullest
    return {
        "file": question.file,
        "machine": {
            "device": question.machine.device.name,
            "memory": question.machine.device.memory,
            "gpus_per_node": question.machine.gpus_per_node,
        },
        "world_size": question.world_size,
        "samples": question.settings.samples_per_step,
        "lengths": dataclasses.asdict(question.lengths),
        "fits": found.fits,
        "fullest": {"devices": list(group.devices), "phase": phase, "bytes": group.total(phase)},
        "devices": [
            {
                "devices": list(each.devices),
                "roles": {held.role: {"phases": held.parts, "offloaded": held.offloaded} for held in each.held},
                "total": {name: each.total(name) for name in found.phases},
            }
            for each in found.groups
        ],
        "host_bytes_of_a_machine": found.host_bytes,
        "engine": dataclasses.asdict(found.engine),
        "rollout": dataclasses.asdict(time.rollout),
        "seconds": {**time.phases, "total": time.total},
        "rollouts_run_ahead": time.overlaps,
        "uncertainty": UNCERTAINTY,
        "tokens_per_second_per_gpu": _rate(found),
        "advice": [] if found.fits else advice(found)[1],
        "assumptions": list(notes(found)),
    }


# --- changes of the file that make it fit ----------------------------------------------------------------------------


_Change = tuple[str, ModelRole | InferRole]  # as text, and a new role


def advice(found: RLAnswer) -> tuple[bool, list[str]]:
    """Return whether changes of the file make it fit, and those that do; otherwise those that save most in the fullest
    phase. Of each kind of changes there is one."""
    group, phase = found.fullest
    kinds = (*_of_training(found), *_alternatives(found.question.settings))
    fixes = [_best(found, kind, phase) for kind in kinds]
    enough = [(words, after) for words, after in fixes if after.fits]
    texts = []
    for words, after in enough or [fix for fix in fixes if _held(fix[1], phase) < group.total(phase)]:
        fullest, then = after.fullest
        is_other = not after.fits and then != phase
        other = f", then {size(fullest.total(then))} in {then}" if is_other else ""
        pace = describe_pace(after.seconds.total / found.seconds.total)
        texts.append(f"{words}: {size(_held(after, phase))} in {phase}{other}; a step is {pace}")
    return bool(enough), texts or [f"No single change that was tried helps; these need less memory: {_LESS}."]


def _held(found: RLAnswer, phase: str) -> int:
    """Return the bytes of the fullest device in a phase."""
    return max(each.total(phase) for each in found.groups)


def _best(found: RLAnswer, kind: Iterable[_Change], phase: str) -> tuple[str, RLAnswer]:
    """Return the first change with which the run fits, or else the one with the least memory in a phase."""
    fixes: list[tuple[str, RLAnswer]] = []
    for words, role in kind:
        fixes.append((words, plan_rl(replace(found.question, settings=found.question.settings.with_role(role)))))
        if fixes[-1][1].fits:
            return fixes[-1]
    return min(fixes, key=lambda fix: _held(fix[1], phase))


def _of_training(found: RLAnswer) -> Iterator[list[_Change]]:
    """Yield savings by the planner of training if its phase is the fullest and too large, within the memory that the
    other roles leave."""
    group, phase = found.fullest
    role = {TRAIN: found.question.settings.actor_train, TRAIN_CRITIC: found.question.settings.critic}.get(phase)
    if role is None or group.total(phase) <= found.question.machine.device.memory:
        return
    others = sum(each.total(phase) for each in group.held if each.role != role.name)
    own = next(each.parts[phase] for each in group.held if each.role == role.name)
    others += own.get(TEACHER_WEIGHTS, 0) + own.get(TEACHER_STATES, 0)
    room = found.question.machine.device.memory - others
    tried = savings(estimate(training_case(found.question, role, longest=True)), _TRIED, room)
    for fix in [each for each in tried if not any(path.startswith(_NOT_A_ROLE_S) for path in each.changes)][:_SAID]:
        changes = dict(fix.changes)
        if _ACCUMULATION in changes:  # a case of packed rows has another number than the file
            ratio = fix.after.case.num_micro_batches / fix.before.case.num_micro_batches
            changes[_ACCUMULATION] = round(role.settings.batch.gradient_accumulation_steps * ratio)
        changed = role.model_copy(update={"settings": with_settings(role.settings, changes)})
        yield [(f"{role.name}: {written(changes)}", changed)]


def _alternatives(settings: RLSettings) -> Iterator[list[_Change]]:
    """Yield kinds of changes, the smallest of each first, as text and as a new role: a smaller share of the device for
    the engine, an engine on more devices, or fewer rows in a forward pass."""
    infer = settings.actor_infer

    if (key := SHARE_KEYS.get(infer.engine)) is not None:
        yield [
            (f"actor_infer: {key}: {share}", infer.model_copy(update={"config": {**infer.config, key: share}}))
            for share in _TRIED_SHARES
        ]
        if len(infer.devices) % (more := 2 * infer.devices_per_engine) == 0:
            spread = infer.model_copy(update={"devices_per_engine": more})
            yield [(f"actor_infer: tensor_parallel_size: {more}", spread)]
    for role in settings.models:
        sizes = [role.infer_batch_size >> power for power in range(1, role.infer_batch_size.bit_length())]
        if sizes:
            yield [
                (f"{role.name}: infer_batch_size: {rows}", role.model_copy(update={"infer_batch_size": rows}))
                for rows in sizes
            ]
