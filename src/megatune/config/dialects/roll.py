"""Reads and checks ROLL's RLVR files, and builds `RLSettings` from them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatune.config.dialects.dialect import read_part, table
from megatune.config.dialects.roll_reader import ROLE, TOP, Part, part_of
from megatune.config.dialects.roll_rewards import read_rewards, reward_model
from megatune.config.dialects.roll_role_checks import check_roles
from megatune.config.dialects.roll_roles import ModelOf, Roles, model_role
from megatune.config.dialects.roll_run import algorithm_settings, rollout_settings, run_settings, tracker_variables
from megatune.config.dialects.roll_samplers import infer_role, sampling_of
from megatune.config.dialects.roll_tree import Reading, read_tree
from megatune.config.entry import RL_ROLES
from megatune.config.rl.algorithm import AlgorithmSettings
from megatune.config.rl.role import RoleSettings, Validation
from megatune.config.rl.settings import UNSCORED, ModelRole, RewardRole, RLSettings
from megatune.config.settings import with_settings
from megatune.config.values import shown
from megatune.errors import ExitCode, Finding, MegatuneError, in_order

_ORIGIN_COLUMN = 64
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
        return Finding(f"{source} has no roles: it is a training file", fix=f"megatune train {source}")
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
    critic = _critic(top, roles, algorithm.adv_estimator)
    judge = reward_model(top.parts["reward_model"], roles) if top.parts["reward_model"].at else None
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
    check_roles(settings, trained, sampled, roles)
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


def _critic(top: Part, roles: Roles, estimator: str) -> ModelRole | None:
    part = top.parts["critic"]
    if not part.at or estimator != "gae":
        return None
    return model_role(roles, part, "critic", roles.run.reward_pretrain, trains=True)


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


def run_yaml(read: ReadRL) -> str:
    """Write the keys of a run, and the defaults of the top level, as one file for `megatune rl`.

    References are resolved, each key has a comment with its origin, and secrets are omitted.
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
