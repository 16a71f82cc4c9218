"""Reads and checks ROLL's RLVR files, and builds `RLSettings` from them."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from megatune.config.dialects.dialect import read_part, table
from megatune.config.dialects.roll_reader import ROLE, TOP, Part, part_of
from megatune.config.dialects.roll_rewards import infer_role, judge_role, read_rewards, sampling_of
from megatune.config.dialects.roll_roles import STRATEGY, ModelOf, Roles, model_role
from megatune.config.dialects.roll_run import algorithm_settings, rollout_settings, run_settings, tracker_variables
from megatune.config.dialects.roll_tree import Reading, read_tree
from megatune.config.entry import RL_ROLES
from megatune.config.rl.algorithm import AlgorithmSettings
from megatune.config.rl.role import RoleSettings, Validation
from megatune.config.rl.settings import (
    SHARE_KEYS,
    UNSCORED,
    USUAL_SHARE,
    InferRole,
    ModelRole,
    RewardRole,
    RLSettings,
    rl_keys,
)
from megatune.config.rules.rule import multiples_around
from megatune.config.settings import all_settings, with_settings
from megatune.config.values import shown
from megatune.errors import ExitCode, Finding, MegatuneError, in_order
from megatune.references import either

_ORIGIN_COLUMN = 64
_BATCH = ("rollout_batch_size", "num_return_sequences_in_group")
_UPDATE = ("per_device_train_batch_size", "gradient_accumulation_steps")
_SECRET = re.compile(r"(_|^)(key|token|password|secret)$", re.IGNORECASE)  # api_key, HF_TOKEN; not max_new_tokens


@dataclass(frozen=True, slots=True)
class ReadRL:
    """The result of reading a file.

    Attributes:
        settings: None if they cannot be built.
        findings: everything that is wrong, in the order of the file's lines.
        lines: notes for the user: keys without effect, and differences from ROLL.
        reading: the keys, with resolved references and the keys that a preset sets.
        variables: environment variables for trackers; account keys are stored only here.
    """

    settings: RLSettings | None
    findings: tuple[Finding, ...] = ()
    lines: tuple[str, ...] = ()
    reading: Reading = field(default_factory=Reading, repr=False)
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def places(self) -> dict[str, str]:
        """Dotted key as written, "actor_train.training_args.learning_rate" -> "run.yaml:7" or the override."""
        return {key: entry.where for key, entry in self.reading.entries.items()}

    def require_valid(self) -> RLSettings:
        """Return the settings if they are valid.

        Raises:
            MegatuneError: with all findings (exit 64).
        """
        if self.findings or self.settings is None:
            raise MegatuneError(self.findings, ExitCode.SETTINGS)
        return self.settings


def read_roll(source: str | Path, overrides: Sequence[str] = (), model_of: ModelOf | None = None) -> ReadRL:
    """Read ROLL's YAML with Hydra's defaults, `${key}`, device mappings and `a.b.c=value` overrides.

    The result does not depend on this machine: devices, engines and data files are not checked.

    Args:
        model_of: returns the architecture of a model, for rules that need it; None skips those rules.

    Raises:
        MegatuneError: the file is missing or unreadable (exit 66). Everything else is a finding.
    """
    return read_keys(read_tree(source, overrides), source, model_of)


def read_keys(reading: Reading, source: str | Path, model_of: ModelOf | None = None) -> ReadRL:
    """Check the keys of a file, or of a translated command line, and build the settings; see `read_roll`."""
    if other := other_pipeline(reading.data, str(source)) or _training(reading.data, str(source)):
        return ReadRL(None, (other,))  # its keys would all be unknown
    reading = replace(deepcopy(reading), refused=set(), ignored={})
    _normalize(reading)
    _apply_preset(reading)
    top = part_of(reading, reading.data, TOP)
    settings = _settings(top, model_of) if top.tree or not reading.findings else None
    variables = tracker_variables(top)
    if not top.tree and not reading.findings:
        reading.report("the file has no settings", str(source), fix="docs/rl.md begins with a whole file")
    findings = tuple(in_order(reading.findings))
    ignored = (f"{', '.join(_shortened(keys))}: {why}" for why, keys in reading.ignored.items())
    return ReadRL(None if findings else settings, findings, (*reading.lines, *ignored), reading, variables)


def other_pipeline(keys: Collection[str], source: str) -> Finding | None:
    """Return a finding if the file belongs to another pipeline of ROLL: findings for each key would not help."""
    for other in read_part("roll", "pipelines"):
        if any(key in keys for key in other["keys"]):
            return Finding(f"this is a file of ROLL's {other['what']}", source, other["why"], other["fix"])
    return None


def _training(data: Mapping[str, Any], source: str) -> Finding | None:
    if {"dataset", "model_name_or_path"} & data.keys() and not set(RL_ROLES) & data.keys():
        return Finding(f"{source} has no roles: it is a training file", fix=f"megatune train {shlex.quote(source)}")
    return None


def _normalize(reading: Reading) -> None:
    """Replace ROLL's internal tracker, and set is_pure_opd for files with student_train, as ROLL's launcher does."""
    data, tracker = reading.data, reading.entry("track_with", None)
    if data.get("track_with") == "ml_tracker":
        reading.lines.append("track_with ml_tracker is Alibaba's internal tracker: tensorboard is used")
        reading.put(["track_with"], "tensorboard", tracker.where, tracker.origin)
    if isinstance(data.get("student_train"), dict) and not {"actor_train", "is_pure_opd"} & data.keys():
        reading.lines.append("is_pure_opd is true: the file has student_train instead of actor_train, as in ROLL")
        reading.put(["is_pure_opd"], True, reading.entry("student_train", None).where, "student_train")


def _apply_preset(reading: Reading) -> None:
    """Set the keys of algorithm_preset, and report them. A key that was written with another value is a finding, but
    the filter of a reward is kept."""
    data, presets = reading.data, read_part("roll", "presets")
    if data.get("algorithm_preset") not in [*presets]:
        return
    name, preset = f"algorithm_preset {data['algorithm_preset']}", presets[data["algorithm_preset"]]
    where = reading.entries["algorithm_preset"].where
    keys = ", ".join(f"{key} {shown(value)}" for key, value in preset["keys"].items())
    reading.lines.append(f"{name} sets {keys}, and query_filter_config std_filter above 0 for rewards without one")
    rewards = data.get("rewards")
    for domain, reward in rewards.items() if isinstance(rewards, dict) else ():
        if isinstance(reward, dict) and "query_filter_config" not in reward:
            reading.put(["rewards", domain, "query_filter_config"], preset["filter"], where, name)
    for key, value in preset["keys"].items():
        if key not in data:
            reading.put([key], value, where, name)
        elif data[key] != value and not isinstance(data[key], dict):
            what = f"{key} is {shown(data[key])}, and {name} sets {shown(value)}"
            why, fix = "the preset would differ from the published settings", f"remove {key}, or the preset"
            reading.report(what, reading.entries[key].where, why, fix)


def _settings(top: Part, model_of: ModelOf | None) -> RLSettings | None:
    """Build the settings; None if actor_train or actor_infer cannot be built."""
    top.check("top")
    lengths, run, asked = rollout_settings(top), run_settings(top), top.of(AlgorithmSettings)
    roles = Roles(top, run, lengths, model_of)
    top.needs(asked)
    prefix = "student" if asked.is_pure_opd and top.parts["student_train"].at else "actor"
    trained, sampled = top.parts[f"{prefix}_train"], top.parts[f"{prefix}_infer"]
    for part in (trained, sampled):
        part.check("needed", at=part.at)
    rewards = read_rewards(roles)
    if asked.is_pure_opd and not top.mapping("rewards"):
        rewards = {UNSCORED: RewardRole(UNSCORED, UNSCORED)}
    if not trained.at or not sampled.at:
        return None
    group = lengths.num_return_sequences_in_group
    samples = lengths.rollout_batch_size * group
    teachers = _teacher_parts(top)
    teacher = _colocated_teacher(top, trained, teachers) if asked.distils else None
    actor_train = model_role(roles, trained, "actor_train", run.pretrain, trains=True, teacher=teacher)
    generating = sampling_of(sampled.of(RoleSettings).generating_args, lengths.max_response_length, group)
    actor_infer = infer_role(roles, sampled, "actor_infer", run.pretrain, generating)
    updates = 1 if actor_train is None else samples * asked.ppo_epochs // actor_train.samples_per_update
    algorithm = algorithm_settings(top, updates)
    top.check("policy", **dict(algorithm), teacher=top.mapping("teacher"), critic=top.mapping("critic"))
    reference = _reference(top, roles, algorithm, actor_train)
    critic = judge = None
    if top.parts["critic"].at and algorithm.adv_estimator == "gae":
        critic = model_role(roles, top.parts["critic"], "critic", run.reward_pretrain, trains=True)
    if top.parts["reward_model"].at:
        judge = judge_role(roles, top.parts["reward_model"], "reward_model")
    validation = None
    if top.parts["validation"].at:
        validation = top.parts["validation"].of(Validation)
        generating = sampling_of(validation.generating_args, lengths.val_max_response_length)
        validation = validation.model_copy(update={"generating_args": generating})
    data = trained.of(RoleSettings).data_args
    if not data.domain_interleave_probs and len(rewards) == 1:
        data = data.model_copy(update={"domain_interleave_probs": {next(iter(rewards)): 1.0}})
    if actor_train is None or actor_infer is None:
        return None
    settings = RLSettings(
        run=run,
        rollout=lengths,
        algorithm=algorithm,
        data=data,
        actor_train=_with_max_steps(actor_train, run.max_steps * samples * asked.ppo_epochs),
        actor_infer=actor_infer.model_copy(update={"return_routing": actor_train.replays_routing}),
        rewards=rewards,
        reference=reference,
        critic=None if critic is None else _with_max_steps(critic, run.max_steps * samples),
        reward_model=judge,
        teachers={} if asked.distils else _teachers(teachers, roles),
        validation=validation,
    )
    _check_roles(settings, trained, sampled, roles)
    return settings


def _reference(top: Part, roles: Roles, algorithm: AlgorithmSettings, trained: ModelRole | None) -> ModelRole | None:
    """Build the reference; None if it is not needed or the policy has adapters, whose base model is the reference."""
    part, needed = top.parts["reference"], algorithm.enable_reference
    role = model_role(roles, part, "reference", roles.run.pretrain, trains=False) if part.at else None
    has_adapters = trained is not None and trained.settings.finetuning.finetuning_type == "lora"
    if has_adapters and role is not None and trained is not None:
        own, base = (each.settings.model.model_name_or_path for each in (role, trained))
        part.check("adapted", needed=needed, own=own, base=base)
    uses = [name for name in ("use_kl_loss", "add_token_level_kl", "enable_reference") if getattr(algorithm, name)]
    top.check("reference", at=part.at, needed=needed, has_adapters=has_adapters, uses=uses)
    return role if needed and not has_adapters else None


def _teacher_parts(top: Part) -> dict[str, Part]:
    """Read the teacher, or several by name; {} without distillation."""
    tree, algorithm = top.mapping("teacher"), top.of(AlgorithmSettings)
    if not (algorithm.use_opd or algorithm.is_pure_opd):
        return {}
    if set(tree) & set(ROLE.names):
        return {"default": part_of(top.reader, tree, ROLE, "teacher")}
    trees = {name: node for name, node in tree.items() if isinstance(node, dict)}
    return {name: part_of(top.reader, node, ROLE, f"teacher.{name}") for name, node in trees.items()}


def _teachers(parts: Mapping[str, Part], roles: Roles) -> dict[str, ModelRole]:
    found: dict[str, ModelRole] = {}
    for name, part in parts.items():
        role = model_role(roles, part, f"teacher.{name}", None, trains=False)
        if role is not None:
            coef = 1.0 if role.opd_kl_coef is None else role.opd_kl_coef
            found[name] = role.model_copy(update={"opd_kl_coef": coef})
    return found


def _colocated_teacher(top: Part, trained: Part, teachers: Mapping[str, Part]) -> Part | None:
    """Return the teacher that runs in the student's processes, and refuse keys that have no effect there."""
    rows, first = table("roll", "jsd"), next(iter(teachers.values()), None)
    top.refuse({key: row for key, row in rows.items() if not key.startswith(("ROLE.", "teacher."))})
    trained.refuse({key[5:]: row for key, row in rows.items() if key.startswith("ROLE.")})
    if first is not None:
        other = rows["teacher.OTHERS"]
        first.refuse({key: rows.get(f"teacher.{key}", other) for key in first.tree if key != "model_args"})
    if len(teachers) > 1:
        what, fix = f"opd_loss: jsd with {len(teachers)} teachers", f"keep one of {', '.join(teachers)}"
        top.report(what, "teacher", why="it runs in the processes of the student, which have room for one", fix=fix)
    return first


def _with_max_steps(role: ModelRole, samples: int) -> ModelRole:
    """Return the role with max_steps set to its number of updates on all samples of the run."""
    updates = max(1, samples // role.samples_per_update)
    return role.model_copy(update={"settings": with_settings(role.settings, {"optimizer.max_steps": updates})})


def _shortened(keys: list[str]) -> list[str]:
    """Shorten a list of dotted keys: name a key that several roles have once, with their number."""
    found: dict[str, list[str]] = {}
    for key in keys:
        found.setdefault(key.rpartition(".")[2], []).append(key)
    return [places[0] if len(places) == 1 else f"{name} ({len(places)} times)" for name, places in found.items()]


def _check_roles(settings: RLSettings, trained: Part, sampled: Part, roles: Roles) -> None:
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
    others = {role.name: role.devices for role in settings.models}
    for name, devices in others.items():
        if ahead and (shared := infer & set(devices)):
            why = f"{_numbers(shared)}: roles that run at the same time cannot time-share a device"
            fix = f"write {ratio}: 0, or another device_mapping for actor_infer"
            roles.top.report(f"{ratio} above 0, and actor_infer shares devices with {name}", ratio, why=why, fix=fix)
    judges = settings.samplers[1:]
    for judge in judges:
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
    _memory_shares(judges, roles)


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


def run_yaml(read: ReadRL) -> str:
    """Write the keys of a run, and the defaults of the top level, as one file for `megatune rl`.

    References are resolved, each key has a comment with its origin, and secrets are omitted.
    """
    written = list(_lines(read.reading, read.reading.data, ()))
    infos = [info for info in TOP.infos.values() if info.name not in read.reading.data and info.default is not None]
    written += [_line(f"{info.name}: {shown(info.default, quoted=True)}", "default") for info in infos]
    return "\n".join(written) + "\n"


@cache
def _text_keys() -> set[str]:
    """Return the keys whose values are texts, also if they look like numbers: 007 or 1.10."""
    infos = (*rl_keys().values(), *all_settings().values())
    return {info.name for info in infos if str in info.kinds and info.kinds.isdisjoint((int, float))}


def _lines(reading: Reading, data: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[str]:
    for key, value in data.items():
        name, dotted = "  " * len(above) + shown(key, quoted=True), (*above, key)
        if _SECRET.search(key):
            continue
        if isinstance(value, dict):
            yield f"{name}:" if value else f"{name}: {{}}"
            yield from _lines(reading, value, dotted)
        else:
            entry = reading.entry(".".join(dotted), value)
            text = entry.value.text if key in _text_keys() and isinstance(value, int | float) else None
            yield _line(f"{name}: {text or shown(value, quoted=True)}", entry.origin)


def _line(text: str, origin: str) -> str:
    return f"{text:<{_ORIGIN_COLUMN}}  # {' '.join(origin.split())}"
