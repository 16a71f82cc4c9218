"""ROLL's files of reinforcement learning with verifiable rewards: read, checked and made into `RLSettings`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatune.config.dialects.dialect import read_part
from megatune.config.dialects.roll_reader import ROLE, TOP, Part, part_of
from megatune.config.dialects.roll_rewards import read_rewards, reward_model
from megatune.config.dialects.roll_roles import ModelOf, Roles, infer_role, model_role, sampling_of
from megatune.config.dialects.roll_run import algorithm_settings, rollout_settings, run_settings, tracker_variables
from megatune.config.dialects.roll_tree import Reading, read_tree
from megatune.config.entry import RL_ROLES
from megatune.config.rl.algorithm import AlgorithmSettings
from megatune.config.rl.role import RoleSettings, Validation
from megatune.config.rl.settings import UNSCORED, ModelRole, RewardRole, RLSettings
from megatune.config.rules.rule import either, multiples_around
from megatune.config.settings import with_settings
from megatune.config.values import shown
from megatune.errors import ExitCode, Finding, MegatuneError, in_order

_ORIGIN_COLUMN = 64
_SECRET = re.compile(r"(_|^)(key|token|password|secret)$", re.IGNORECASE)  # api_key, HF_TOKEN; not max_new_tokens
_BATCH = ("rollout_batch_size", "num_return_sequences_in_group")
_UPDATE = ("per_device_train_batch_size", "gradient_accumulation_steps")


@dataclass(frozen=True, slots=True)
class ReadRL:
    """A file that was read.

    Attributes:
        settings: None where findings leave nothing that could be built.
        findings: all that is wrong, in the order of the file's lines.
        lines: what the user is told first: what does nothing, and what is computed otherwise than in ROLL.
        reading: what was read, references resolved, with what a preset sets.
        variables: of the environment, for trackers: keys of accounts are nowhere else.
    """

    settings: RLSettings | None
    findings: tuple[Finding, ...] = ()
    lines: tuple[str, ...] = ()
    reading: Reading = field(default_factory=Reading, repr=False)
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def places(self) -> dict[str, str]:
        """Dotted key as it was written, "actor_train.training_args.learning_rate" -> "run.yaml:7", or the word of the
        command line."""
        return {key: entry.where for key, entry in self.reading.entries.items()}

    def require_valid(self) -> RLSettings:
        """Return the settings if nothing is wrong with them.

        Raises:
            MegatuneError: with all findings (exit 64).
        """
        if self.findings or self.settings is None:
            raise MegatuneError(self.findings, ExitCode.SETTINGS)
        return self.settings


def read_roll(source: str | Path, overrides: Sequence[str] = (), model_of: ModelOf | None = None) -> ReadRL:
    """Read ROLL's YAML: Hydra's defaults, `${key}`, device mappings, then `a.b.c=value` words.

    Nothing of this machine is looked at: neither devices nor engines nor files of data.

    Args:
        model_of: reads what models are, for the rules that need their numbers; None leaves those out.

    Raises:
        MegatuneError: the file is missing or unreadable (exit 66). Everything else is a finding.
    """
    return read_keys(read_tree(source, overrides), source, model_of)


def read_keys(reading: Reading, source: str | Path, model_of: ModelOf | None = None) -> ReadRL:
    """Check the keys of a file, or of what was written as one, and make the settings; see `read_roll`."""
    if other := _other_file(reading.data, str(source)):
        return ReadRL(None, (other,), reading=reading)
    reading = replace(deepcopy(reading), refused=set(), ignored={})
    _understand(reading)
    _preset(reading)
    top = part_of(reading, reading.data, TOP)
    settings = _settings(top, model_of) if top.tree or not reading.findings else None
    variables = tracker_variables(top)
    if not top.tree and not reading.findings:
        reading.find("the file has no settings", str(source), fix="docs/rl.md begins with a whole file")
    findings = tuple(in_order(reading.findings))
    ignored = (f"{', '.join(_few(keys))}: {why}" for why, keys in reading.ignored.items())
    return ReadRL(None if findings else settings, findings, (*reading.lines, *ignored), reading, variables)


def _other_file(data: Mapping[str, Any], source: str) -> Finding | None:
    """Say what a file of another pipeline, or of training, is: its keys one by one would tell nobody."""
    for other in read_part("roll", "pipelines"):
        if any(key in data for key in other["keys"]):
            return Finding(f"this is a file of ROLL's {other['what']}", source, other["why"], other["fix"])
    if {"dataset", "model_name_or_path"} & data.keys() and not set(RL_ROLES) & data.keys():
        return Finding(f"{source} has no roles: it is a file of training", fix=f"megatune train {source}")
    return None


def _understand(reading: Reading) -> None:
    """Replace a tracker that only ROLL's own machines have, and set the switch of ROLL's launcher of distillation."""
    data, tracker = reading.data, reading.entry("track_with", None)
    if data.get("track_with") == "ml_tracker":
        reading.lines.append("track_with ml_tracker is a tracker inside Alibaba: tensorboard is used")
        reading.put(["track_with"], "tensorboard", tracker.where, tracker.origin)
    if isinstance(data.get("student_train"), dict) and not {"actor_train", "is_pure_opd"} & data.keys():
        reading.lines.append("is_pure_opd is true: ROLL runs a file with student_train in place of actor_train so")
        reading.put(["is_pure_opd"], True, reading.entry("student_train", None).where, "student_train")


def _preset(reading: Reading) -> None:
    """Set what algorithm_preset sets, and say what that is. A key that was written with another value is a finding; a
    filter of a reward that was written stays."""
    data, presets = reading.data, read_part("roll", "presets")
    if data.get("algorithm_preset") not in [*presets]:
        return
    name, preset = f"algorithm_preset {data['algorithm_preset']}", presets[data["algorithm_preset"]]
    where = reading.entries["algorithm_preset"].where
    said = ", ".join(f"{key} {shown(value)}" for key, value in preset["keys"].items())
    reading.lines.append(f"{name} sets {said}, and query_filter_config std_filter above 0 for rewards without one")
    rewards = data.get("rewards")
    for domain, reward in rewards.items() if isinstance(rewards, dict) else ():
        if isinstance(reward, dict) and "query_filter_config" not in reward:
            reading.put(["rewards", domain, "query_filter_config"], preset["filter"], where, name)
    for key, value in preset["keys"].items():
        if key not in data:
            reading.put([key], value, where, name)
        elif data[key] != value and not isinstance(data[key], dict):
            what = f"{key} is {shown(data[key])}, and {name} sets {shown(value)}"
            why, fix = "the preset would not be what was published", f"remove {key}, or the preset"
            reading.find(what, reading.entries[key].where, why, fix)


def _settings(top: Part, model_of: ModelOf | None) -> RLSettings | None:
    """Make the settings of the parts; None where a role could not be made."""
    top.check("top")
    lengths, run, asked = rollout_settings(top), run_settings(top), top.of(AlgorithmSettings)
    roles = Roles(top, run, lengths, model_of)
    who = "student" if asked.is_pure_opd else "actor"
    trained, sampled = top.parts[f"{who}_train"], top.parts[f"{who}_infer"]
    for part in (trained, sampled):
        if not part.at:
            fix = f"write {part.name}: with device_mapping and strategy_args"
            part.find(f"the role {part.name} is missing", fix=fix)
    rewards = read_rewards(roles)
    if asked.is_pure_opd and not top.mapping("rewards"):
        rewards = {UNSCORED: RewardRole(UNSCORED, UNSCORED)}
    if not trained.at or not sampled.at:
        return None
    group = lengths.num_return_sequences_in_group
    samples = lengths.rollout_batch_size * group
    actor_train = model_role(roles, trained, "actor_train", run.pretrain, trains=True)
    generating = sampling_of(sampled.of(RoleSettings).generating_args, lengths.max_response_length, group)
    actor_infer = infer_role(roles, sampled, "actor_infer", run.pretrain, generating)
    updates = 1 if actor_train is None else samples * asked.ppo_epochs // actor_train.samples_per_update
    algorithm = algorithm_settings(top, updates)
    adapters = actor_train is not None and actor_train.settings.finetuning.finetuning_type == "lora"
    top.check("policy", **dict(algorithm), teacher=top.mapping("teacher"), critic=top.mapping("critic"))
    reference = _reference(top, roles, algorithm, has_adapters=adapters)
    critic = _critic(top, roles, algorithm.adv_estimator)
    judge = reward_model(top.parts["reward_model"], roles) if top.parts["reward_model"].at else None
    teachers = _teachers(top, roles)
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
        actor_train=_scheduled(actor_train, run.max_steps * samples * asked.ppo_epochs),
        actor_infer=actor_infer.model_copy(update={"return_routing": actor_train.replays_routing}),
        rewards=rewards,
        reference=reference,
        critic=None if critic is None else _scheduled(critic, run.max_steps * samples),
        reward_model=judge,
        teachers=teachers,
        validation=validation,
    )
    check_roles(settings, trained, sampled, roles)
    return settings


def _reference(top: Part, roles: Roles, algorithm: AlgorithmSettings, *, has_adapters: bool) -> ModelRole | None:
    """Make the reference, and leave it out where nothing needs it."""
    part, needed = top.parts["reference"], algorithm.enable_reference
    if not part.at:
        if needed and not has_adapters:
            uses = [name for name in ("use_kl_loss", "add_token_level_kl") if getattr(algorithm, name)]
            name = (*uses, "enable_reference")[0]
            what, why = f"{name} without the role reference", "the divergence is from it"
            top.find(what, name, why=why, fix="add the role reference")
        return None
    role = model_role(roles, part, "reference", roles.run.pretrain, trains=False)
    if has_adapters:
        top.reader.lines.append("reference is not loaded: it is the model without its adapters, as in ROLL")
        return None
    if not needed:
        why = "neither use_kl_loss nor add_token_level_kl is on; enable_reference: true runs it for its metric"
        top.reader.lines.append(f"reference is not loaded: {why}")
        return None
    return role


def _critic(top: Part, roles: Roles, estimator: str) -> ModelRole | None:
    part = top.parts["critic"]
    if not part.at or estimator != "gae":
        return None
    return model_role(roles, part, "critic", roles.run.reward_pretrain, trains=True)


def _teachers(top: Part, roles: Roles) -> dict[str, ModelRole]:
    tree, algorithm = top.mapping("teacher"), top.of(AlgorithmSettings)
    trees = {"default": tree} if set(tree) & set(ROLE.names) else tree
    found: dict[str, ModelRole] = {}
    if not (algorithm.use_opd or algorithm.is_pure_opd):
        return found
    for name, node in trees.items():
        if isinstance(node, dict):
            part = part_of(top.reader, node, ROLE, "teacher" if trees is not tree else f"teacher.{name}")
            role = model_role(roles, part, f"teacher.{name}", None, trains=False)
            if role is not None:
                coef = 1.0 if role.opd_kl_coef is None else role.opd_kl_coef
                found[name] = role.model_copy(update={"opd_kl_coef": coef})
    return found


def _scheduled(role: ModelRole, samples: int) -> ModelRole:
    """Return the role with a schedule as long as its updates on all samples of the run."""
    updates = max(1, samples // role.samples_per_update)
    return role.model_copy(update={"settings": with_settings(role.settings, {"optimizer.max_steps": updates})})


def _few(keys: list[str]) -> list[str]:
    """Shorten a list of dotted keys: the last part once, with the number of roles that have it."""
    found: dict[str, list[str]] = {}
    for key in keys:
        found.setdefault(key.rpartition(".")[2], []).append(key)
    return [places[0] if len(places) == 1 else f"{name} ({len(places)} times)" for name, places in found.items()]


def run_yaml(read: ReadRL) -> str:
    """Write the keys of a run as one file that says the same, references resolved, each with where it came from, and
    the defaults of the top level; `megatune rl run.yaml` repeats it.

    Secrets are left out.
    """
    written = list(_lines(read.reading, read.reading.data, ()))
    infos = [info for info in TOP.infos.values() if info.name not in read.reading.data and info.default is not None]
    written += [_line(f"{info.name}: {shown(info.default, quoted=True)}", "default") for info in infos]
    return "\n".join(written) + "\n"


def _lines(reading: Reading, data: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[str]:
    for key, value in data.items():
        name, dotted = "  " * len(above) + shown(key, quoted=True), (*above, key)
        if _SECRET.search(key):
            continue
        if isinstance(value, dict):
            yield f"{name}:" if value else f"{name}: {{}}"
            yield from _lines(reading, value, dotted)
        else:
            yield _line(f"{name}: {shown(value, quoted=True)}", reading.entry(".".join(dotted), value).origin)


def _line(text: str, origin: str) -> str:
    return f"{text:<{_ORIGIN_COLUMN}}  # {' '.join(origin.split())}"


def check_roles(settings: RLSettings, trained: Part, sampled: Part, roles: Roles) -> None:
    """Report everything that is wrong between roles, and say how responses are sampled."""
    rollout, algorithm = settings.rollout, settings.algorithm
    spare = rollout.is_use_additional_prompts and rollout.max_additional_running_prompts > 0
    more = {"has_spare_prompts": spare, "domains": settings.rewards, "policy_variant": settings.actor_train.pg_variant}
    roles.top.check("steps", **{**dict(algorithm), **more})
    playing = [name for name, role in settings.rewards.items() if "environment" in role.arguments]
    trained.check("trained", data_args=settings.data, playing=playing)
    actor, infer = settings.actor_train, settings.actor_infer
    sampled.check(
        "sampled",
        generating_args=infer.generating_args,
        responses=rollout.num_return_sequences_in_group,
        model=infer.model_name_or_path,
        trained_model=actor.settings.model.model_name_or_path,
        is_trained=infer.model_name_or_path == actor.settings.model.model_name_or_path,
        replays_with=infer.engine if actor.replays_routing else None,
        pipeline=infer.config.get("pipeline_parallel_size", 1),
        caches_prefixes=infer.config.get("enable_prefix_caching", True),
    )
    if settings.validation:
        roles.top.parts["validation"].check("validation")
    _batches(settings, roles.top)
    _devices(settings, roles)
    _domains(settings, roles.top, trained)
    _sampling(settings, sampled)


def _batches(settings: RLSettings, top: Part) -> None:
    """Updates are of whole mini-batches, and every replica has as many samples."""
    refused = top.reader.refused
    if not refused.isdisjoint(_BATCH):
        return
    samples = settings.samples_per_step
    said = (
        f"rollout_batch_size {settings.rollout.rollout_batch_size} × num_return_sequences_in_group "
        f"{settings.rollout.num_return_sequences_in_group} is {samples} samples"
    )
    for role in (settings.actor_train, settings.critic, settings.reference, *settings.teachers.values()):
        if role is None or not role.devices:
            continue
        if role.training and not refused.isdisjoint(f"{role.name}.training_args.{key}" for key in _UPDATE):
            continue
        size, parts = _whole(role)
        group = settings.rollout.num_return_sequences_in_group
        if samples % size:
            fix = f"write rollout_batch_size: {either(_prompts(samples, size, group))}"
            if role.training:
                fix += ", or another gradient_accumulation_steps"
            top.find(f"{said}, not a multiple of {size}", *_BATCH, why=f"{role.name} takes {parts}", fix=fix)


def _whole(role: ModelRole) -> tuple[int, str]:
    """Return the number that samples of a step must be a multiple of, and why."""
    batch, parallel = role.settings.batch, role.settings.parallel
    replicas = max(1, len(role.devices) // parallel.model_parallel_size)
    if not role.training:
        return replicas, f"{replicas} replicas, with as many samples each"
    micro, steps = batch.per_device_train_batch_size, batch.gradient_accumulation_steps
    why = f"per_device_train_batch_size {micro} × gradient_accumulation_steps {steps} × {replicas} replicas an update"
    return micro * steps * replicas, why


def _prompts(samples: int, size: int, group: int) -> list[int]:
    """Return the numbers of prompts next to those asked for whose samples are a multiple."""
    step = next(count for count in range(1, size + 1) if count * group % size == 0)
    return list(multiples_around(samples // group, step))


def _devices(settings: RLSettings, roles: Roles) -> None:
    """Roles that work at the same time have devices of their own."""
    infer, ratio = set(settings.actor_infer.devices), "async_generation_ratio"
    ahead = settings.rollout.async_generation_ratio > 0
    others = {role.name: role.devices for role in (settings.actor_train, settings.reference, settings.critic) if role}
    for name, devices in others.items():
        if ahead and (shared := infer & set(devices)):
            why = f"{_numbers(shared)}: what runs at the same time cannot take turns on a device"
            fix = f"write {ratio}: 0, or a device_mapping of actor_infer of its own"
            roles.top.find(f"{ratio} above 0, and actor_infer shares devices with {name}", ratio, why=why, fix=fix)
    judges = [role.judge for role in settings.rewards.values()]
    for judge in filter(None, (*judges, settings.reward_model)):
        own, part = f"a device_mapping of {judge.name} of its own", roles.parts[judge.name]
        if shared := infer & set(judge.devices):
            what = f"{judge.name} shares devices with actor_infer"
            why = f"{_numbers(shared)}: responses are judged while others are still sampled"
            part.find(what, "device_mapping", why=why, fix=f"write {own}")
        for name, devices in others.items():
            if ahead and (shared := {*judge.devices} & {*devices}):
                what = f"{ratio} above 0, and {judge.name} shares devices with {name}"
                why = f"{_numbers(shared)}: responses are judged beside training, and could not take turns with it"
                part.find(what, "device_mapping", why=why, fix=f"write {ratio}: 0, or {own}")


def _domains(settings: RLSettings, top: Part, trained: Part) -> None:
    """Every domain that is trained has a reward, files and a share."""
    key = "data_args.domain_interleave_probs"
    shares, dotted = settings.data.domain_interleave_probs, trained.key(key)
    if not shares and len(settings.rewards) > 1:
        equal = ", ".join(f"{name}: {1 / len(settings.rewards):.2g}" for name in settings.rewards)
        why, fix = "it says which rewards are trained on, and how much", f"write domain_interleave_probs: {{{equal}}}"
        trained.find(f"{dotted} is missing", key, "data_args", why=why, fix=fix)
    for domain, share in shares.items():
        if domain not in settings.rewards and settings.rewards:
            fix = f"add rewards.{domain}, or take one of: {', '.join(settings.rewards)}"
            trained.find(f"domain_interleave_probs has {domain}, and rewards has not", key, "data_args", fix=fix)
        if share < 0:
            what = f"the share of {domain} is {share:g}"
            trained.find(what, key, "data_args", why="expected a number from 0 to 1")
    prompts = settings.rollout.rollout_batch_size
    counts = settings.data.prompts_of_domains(prompts) if shares and min(shares.values()) >= 0 else {}
    if empty := [domain for domain, count in counts.items() if count < 1]:
        what = f"domain_interleave_probs: {', '.join(empty)} would get no prompt of rollout_batch_size"
        why = f"of {prompts} prompts a step each share is rounded down, and {[*shares][-1]} takes the rest"
        fix = "raise its share or rollout_batch_size, or leave the domain out"
        trained.find(what, key, "data_args", why=why, fix=fix)
    if settings.validation and UNSCORED in settings.rewards:
        what, why = "validation without rewards", "nothing scores its responses"
        top.parts["validation"].find(what, why=why, fix="add rewards, or remove validation")


def _sampling(settings: RLSettings, sampled: Part) -> None:
    """Say which limit of tokens counts."""
    generating, keys = settings.actor_infer.generating_args, "generating_args"
    if not generating.do_sample and settings.rollout.num_return_sequences_in_group > 1:
        return
    tokens = sampled.of(RoleSettings).generating_args.max_new_tokens
    if tokens is not None and tokens != generating.max_new_tokens:
        left = f"{generating.max_new_tokens}, which sequence_length leaves, as in ROLL"
        sampled.reader.lines.append(f"{sampled.key(keys)}.max_new_tokens {tokens}: {left}")


def _numbers(devices: set[int]) -> str:
    listed = sorted(devices)
    if len(listed) > 4 and listed[-1] - listed[0] == len(listed) - 1:
        return f"devices {listed[0]} to {listed[-1]}"
    return f"device{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed[:8]))}" + (
        ", ..." if len(listed) > 8 else ""
    )
