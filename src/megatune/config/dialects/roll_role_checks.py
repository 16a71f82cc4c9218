"""Checks of several roles together: batches, shared devices, and domains of prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatune.config.dialects.roll_reader import Part
from megatune.config.dialects.roll_roles import STRATEGY, Roles
from megatune.config.rl.role import RoleSettings
from megatune.config.rl.settings import SHARE_KEYS, UNSCORED, USUAL_SHARE, InferRole, ModelRole, RLSettings
from megatune.config.rules.rule import either, multiples_around

_BATCH = ("rollout_batch_size", "num_return_sequences_in_group")
_UPDATE = ("per_device_train_batch_size", "gradient_accumulation_steps")


def check_roles(settings: RLSettings, trained: Part, sampled: Part, roles: Roles) -> None:
    """Report everything that is wrong between roles."""
    rollout, algorithm = settings.rollout, settings.algorithm
    spare = rollout.is_use_additional_prompts and rollout.max_additional_running_prompts > 0
    more = {"has_spare_prompts": spare, "domains": settings.rewards, "policy_variant": settings.actor_train.pg_variant}
    more |= {"distils": algorithm.distils, "conversation_rules": settings.data.conversation_rules}
    more["replays"] = settings.actor_train.replays_routing
    roles.top.check("steps", **{**dict(algorithm), **more})
    with_environment = [name for name, role in settings.rewards.items() if "environment" in role.arguments]
    trained.check("trained", data_args=settings.data, with_environment=with_environment)
    actor, infer = settings.actor_train, settings.actor_infer
    sampled.check(
        "sampled",
        generating_args=infer.generating_args,
        asked_tokens=sampled.of(RoleSettings).generating_args.max_new_tokens,
        responses=rollout.num_return_sequences_in_group,
        model=infer.model_name_or_path,
        trained_model=actor.settings.model.model_name_or_path,
        is_trained=infer.model_name_or_path == actor.settings.model.model_name_or_path,
        replays_with=infer.engine if actor.replays_routing else None,
        pipeline=infer.config.get("pipeline_parallel_size", 1),
        caches_prefixes=infer.config.get("enable_prefix_caching", True),
    )
    if settings.validation:
        roles.top.parts["validation"].check("validation", is_scored=UNSCORED not in settings.rewards)
    _batches(settings, roles.top)
    _devices(settings, roles)
    _domains(settings, roles.top, trained)


def _batches(settings: RLSettings, top: Part) -> None:
    """Check that the samples of a step are divisible into mini-batches and among replicas."""
    refused = top.reader.refused
    if not refused.isdisjoint(_BATCH):
        return
    samples = settings.samples_per_step
    product = (
        f"rollout_batch_size {settings.rollout.rollout_batch_size} × num_return_sequences_in_group "
        f"{settings.rollout.num_return_sequences_in_group} is {samples} samples"
    )
    for role in (settings.actor_train, settings.critic, settings.reference, *settings.teachers.values()):
        if role is None or not role.devices:
            continue
        if role.training and not refused.isdisjoint(f"{role.name}.training_args.{key}" for key in _UPDATE):
            continue
        size, why = _batch_multiple(role)
        group = settings.rollout.num_return_sequences_in_group
        if samples % size:
            fix = f"write rollout_batch_size: {either(_prompts(samples, size, group))}"
            if role.training:
                fix += ", or another gradient_accumulation_steps"
            top.report(f"{product}, not a multiple of {size}", *_BATCH, why=f"{role.name} has {why}", fix=fix)


def _batch_multiple(role: ModelRole) -> tuple[int, str]:
    """Return the number that must divide the samples of a step, and why."""
    batch, parallel = role.settings.batch, role.settings.parallel
    replicas = max(1, len(role.devices) // parallel.model_parallel_size)
    if not role.training:
        return replicas, f"{replicas} replicas, with the same number of samples each"
    micro, steps = batch.per_device_train_batch_size, batch.gradient_accumulation_steps
    why = f"per_device_train_batch_size {micro} × gradient_accumulation_steps {steps} × {replicas} replicas per update"
    return micro * steps * replicas, why


def _prompts(samples: int, size: int, group: int) -> list[int]:
    """Return the nearest numbers of prompts whose samples are a multiple of `size`."""
    step = next(count for count in range(1, size + 1) if count * group % size == 0)
    return list(multiples_around(samples // group, step))


def _devices(settings: RLSettings, roles: Roles) -> None:
    """Check that roles which run at the same time have different devices."""
    infer, ratio = set(settings.actor_infer.devices), "async_generation_ratio"
    ahead = settings.rollout.async_generation_ratio > 0
    models = [settings.actor_train, settings.reference, settings.critic]
    models += [*settings.teachers.values(), *settings.scorers.values()]
    others = {role.name: role.devices for role in models if role}
    for name, devices in others.items():
        if ahead and (shared := infer & set(devices)):
            why = f"{_numbers(shared)}: roles that run at the same time cannot time-share a device"
            fix = f"write {ratio}: 0, or another device_mapping for actor_infer"
            roles.top.report(f"{ratio} above 0, and actor_infer shares devices with {name}", ratio, why=why, fix=fix)
    judges = [role.judge for role in settings.rewards.values()]
    for judge in filter(None, (*judges, settings.reward_model)):
        own, part = f"another device_mapping for {judge.name}", roles.parts[judge.name]
        if shared := infer & set(judge.devices):
            what = f"{judge.name} shares devices with actor_infer"
            why = f"{_numbers(shared)}: responses are scored while others are still sampled"
            part.report(what, "device_mapping", why=why, fix=f"write {own}")
        for name, devices in others.items():
            if ahead and (shared := {*judge.devices} & {*devices}):
                what = f"{ratio} above 0, and {judge.name} shares devices with {name}"
                why = f"{_numbers(shared)}: responses are scored during training, so they cannot time-share a device"
                part.report(what, "device_mapping", why=why, fix=f"write {ratio}: 0, or {own}")
    _memory_shares([judge for judge in (*judges, settings.reward_model) if judge is not None], roles)


def _memory_shares(judges: Sequence[InferRole], roles: Roles) -> None:
    """Check that judges on one device, which run at the same time, do not use more than its memory."""
    found = set()
    for device in sorted({device for judge in judges for device in judge.devices}):
        here = [judge for judge in judges if device in judge.devices and judge.memory_share]
        names = tuple(judge.name for judge in here)
        if sum(judge.memory_share for judge in here) <= 1 or names in found:
            continue
        found.add(names)
        part, key = roles.parts[names[-1]], SHARE_KEYS[here[-1].engine]
        each = " + ".join(f"{judge.memory_share:g}" for judge in here)
        what = f"{' and '.join(names)} share device {device}, and use {each} of its memory"
        why = f"judges run at the same time; {key} is a fraction of the whole device, {USUAL_SHARE} by default"
        equal = math.floor(100 * USUAL_SHARE / len(here)) / 100
        fix = f"write {key}: {equal:g} for each of them, or different device_mappings"
        part.report(what, f"{STRATEGY}.{key}", "device_mapping", why=why, fix=fix)


def _domains(settings: RLSettings, top: Part, trained: Part) -> None:
    """Check that every domain has a reward and prompts in every step."""
    key = "data_args.domain_interleave_probs"
    shares = settings.data.domain_interleave_probs
    equal = ", ".join(f"{name}: {1 / len(settings.rewards):.2g}" for name in settings.rewards)
    trained.check("shares", data_args=settings.data, rewards=len(settings.rewards), equal=equal)
    for domain, share in shares.items():
        if domain not in settings.rewards and settings.rewards:
            fix = f"add rewards.{domain}, or use one of: {', '.join(settings.rewards)}"
            trained.report(f"domain_interleave_probs has {domain}, but rewards does not", key, "data_args", fix=fix)
        if share < 0:
            what = f"the share of {domain} is {share:g}"
            trained.report(what, key, "data_args", why="expected a number from 0 to 1")
    prompts = settings.rollout.rollout_batch_size
    counts = settings.data.prompts_of_domains(prompts) if shares and min(shares.values()) >= 0 else {}
    if empty := [domain for domain, count in counts.items() if count < 1]:
        what = f"domain_interleave_probs: {', '.join(empty)} would get no prompt of rollout_batch_size"
        why = f"each share of the {prompts} prompts per step is rounded down, and {[*shares][-1]} gets the rest"
        fix = "increase its share or rollout_batch_size, or remove the domain"
        trained.report(what, key, "data_args", why=why, fix=fix)


def _numbers(devices: set[int]) -> str:
    listed = sorted(devices)
    if len(listed) > 4 and listed[-1] - listed[0] == len(listed) - 1:
        return f"devices {listed[0]} to {listed[-1]}"
    return f"device{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed[:8]))}" + (
        ", ..." if len(listed) > 8 else ""
    )
