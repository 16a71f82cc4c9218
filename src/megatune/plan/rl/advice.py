"""Changes of the file after which what does not fit does, each computed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatune.config.rl.settings import ModelRole
from megatune.plan.changes.fixes import savings
from megatune.plan.changes.variation import written
from megatune.plan.estimate import estimate
from megatune.plan.pages.words import change, size
from megatune.plan.rl.answer import DeviceGroup, RLAnswer, plan_rl
from megatune.plan.rl.held import SAMPLE, SYNC, TRAIN, TRAIN_CRITIC
from megatune.plan.rl.passes import training_case
from megatune.plan.rl.question import ACTOR, CRITIC, REFERENCE

_SHARES = {"vllm": "gpu_memory_utilization", "sglang": "mem_fraction_static"}
# Changes that are asked for, and that are said; those of the length of samples are not a role's own.
_TRIED, _SAID, _NOT_A_ROLE_S = 8, 3, ("data.", "optimizer.exp_avg")
_ACCUMULATION = "batch.gradient_accumulation_steps"
_LESS = "more devices, a larger tensor_model_parallel_size, a shorter response_length, lora_target"


def advice(found: RLAnswer) -> list[str]:
    """Return sentences: what to write, and what a device then holds."""
    group, phase = found.fullest
    limit = found.question.machine.device.memory
    texts: list[str] = []
    if not found.has_cache:
        texts += _room_for_cache(found)
    if group.total(phase) > limit:
        role = found.question.settings.critic if phase == TRAIN_CRITIC else found.question.settings.actor_train
        if phase in (TRAIN, TRAIN_CRITIC) and role is not None:
            texts += _of_training(found, group, phase, role)
        elif phase in (SAMPLE, SYNC):
            texts += _smaller_share(found, group, phase)
        else:
            texts += _smaller_batch(found, group, phase)
    return texts or [f"No single change that was tried is enough; what needs less: {_LESS}."]


def _of_training(found: RLAnswer, group: DeviceGroup, phase: str, role: ModelRole) -> Iterator[str]:
    """Ask the planner of training, with the room that the other roles leave."""
    name = CRITIC if phase == TRAIN_CRITIC else ACTOR
    others = sum(each.total(phase) for each in group.held if each.role != name)
    room = found.question.machine.device.memory - others
    tried = savings(estimate(training_case(found.question, role, longest=True)), _TRIED, room)
    for fix in [each for each in tried if not any(path.startswith(_NOT_A_ROLE_S) for path in each.changes)][:_SAID]:
        held, pace = fix.after.fullest.total, change(1 - fix.gain, "slower", "faster", "as fast")
        enough = "" if held <= room else ", which is not enough alone"
        changes = dict(fix.changes)
        if _ACCUMULATION in changes:  # of packed rows a case has others than the file
            ratio = fix.after.case.num_micro_batches / fix.before.case.num_micro_batches
            changes[_ACCUMULATION] = round(role.settings.batch.gradient_accumulation_steps * ratio)
        yield f"{name}: {written(changes)}: {size(held + others)} in {phase}{enough}; training {pace}"


def _smaller_share(found: RLAnswer, group: DeviceGroup, phase: str) -> Iterator[str]:
    """Lower the share of the device that the engine takes, if that leaves room for a cache."""
    infer, limit = found.question.settings.actor_infer, found.question.machine.device.memory
    if (key := _SHARES.get(infer.engine)) is None:
        return
    over = group.total(phase) - limit
    share = math.floor(100 * (float(infer.config.get(key, 0.9)) - over / limit) - 1) / 100
    after = _with_share(found, key, share) if share > 0 else None
    if after is not None and after.has_cache:
        held = size(max(each.total(phase) for each in after.groups))
        yield f"actor_infer: {key}: {share}: {held} in {phase}, {after.seconds.rollout.at_once:.0f} sequences at once"


def _smaller_batch(found: RLAnswer, group: DeviceGroup, phase: str) -> Iterator[str]:
    """Halve the rows that pass forward together until they fit."""
    limit, settings = found.question.machine.device.memory, found.question.settings
    busy = max(group.held, key=lambda held: held.parts[phase].get("activations", 0)).role
    role = next((each for each in found.question.model_roles if each.name == busy), None)
    while role is not None and busy in (ACTOR, REFERENCE, CRITIC) and role.infer_batch_size > 1:
        role = role.model_copy(update={"infer_batch_size": role.infer_batch_size // 2})
        changes: dict[str, Any] = {busy: role}
        after = plan_rl(replace(found.question, settings=replace(settings, **changes)))
        held = max(each.total(phase) for each in after.groups)
        if held <= limit:
            yield f"{busy}: infer_batch_size: {role.infer_batch_size}: {size(held)} in {phase}"
            return


def _room_for_cache(found: RLAnswer) -> Iterator[str]:
    """Raise the share, or spread an engine over more devices."""
    infer = found.question.settings.actor_infer
    key = _SHARES.get(infer.engine)
    for share in (0.7, 0.8, 0.85, 0.9):
        after = _with_share(found, key, share) if key is not None else None
        if after is not None and after.fits:
            yield f"actor_infer: {key}: {share}: {after.seconds.rollout.at_once:.0f} sequences at once"
            return
    more = 2 * infer.devices_per_engine
    if key is not None and len(infer.devices) % more == 0:
        yield f"actor_infer: tensor_parallel_size: {more}, so that {more} devices hold the weights of an engine"


def _with_share(found: RLAnswer, key: str, share: float) -> RLAnswer:
    settings = found.question.settings
    infer = settings.actor_infer.model_copy(update={"config": {**settings.actor_infer.config, key: share}})
    return plan_rl(replace(found.question, settings=replace(settings, actor_infer=infer)))
