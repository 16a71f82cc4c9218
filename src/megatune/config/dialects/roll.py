"""ROLL's files of reinforcement learning with verifiable rewards: read, checked and made into `RLSettings`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from megatune.config.dialects.roll_checks import check_roles
from megatune.config.dialects.roll_parts import algorithm_part, prompt_data, rollout_part, run_part
from megatune.config.dialects.roll_reader import Part, Reader, place_of
from megatune.config.dialects.roll_rewards import read_rewards, reward_model
from megatune.config.dialects.roll_roles import ModelOf, Roles
from megatune.config.dialects.roll_samplers import infer_role, read_generating
from megatune.config.dialects.roll_schema import ROLE, TOP
from megatune.config.dialects.roll_trackers import tracker_variables
from megatune.config.dialects.roll_trainers import model_role
from megatune.config.dialects.roll_tree import Tree, entries_of, read_tree
from megatune.config.entry import SettingEntry
from megatune.config.rl.settings import ModelRole, RLSettings, Validation
from megatune.config.settings import Settings
from megatune.config.values import Value, compose, read_text
from megatune.errors import ExitCode, Finding, MegatuneError, in_order


@dataclass(frozen=True, slots=True)
class ReadRL:
    """A file that was read.

    Attributes:
        settings: None where findings leave nothing that could be built.
        findings: all that is wrong, in the order of the file's lines.
        lines: what the user is told first: what does nothing, and what is computed otherwise than in ROLL.
        origins: dotted key as it was written, "actor_train.training_args.learning_rate" -> "run.yaml:7" or "override".
        tree: what was read, references resolved.
        variables: of the environment, for trackers: keys of accounts are nowhere else.
    """

    settings: RLSettings | None
    findings: tuple[Finding, ...] = ()
    lines: tuple[str, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)
    tree: Tree = field(default_factory=dict, repr=False)
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)

    def require_valid(self) -> RLSettings:
        """Return the settings if nothing is wrong with them.

        Raises:
            MegatuneError: with all findings (exit 64).
        """
        if self.findings or self.settings is None:
            raise MegatuneError(self.findings, ExitCode.SETTINGS)
        return self.settings


def is_rl_file(source: str | Path) -> bool:
    """Tell whether a YAML file describes reinforcement learning: it has roles, or names a file that
    may have them. False for what cannot be read."""
    try:
        node = compose(read_text(Path(source)))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return False
    keys = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []  # some may be lists
    return any(key in keys for key in ("actor_train", "student_train", "actor_infer", "defaults"))


def read_roll(source: str | Path, overrides: Sequence[str] = (), model_of: ModelOf | None = None) -> ReadRL:
    """Read ROLL's YAML: Hydra's defaults, `${key}`, device mappings, then `a.b.c=value` words.

    Nothing of this machine is looked at: neither devices nor engines nor files of data.

    Args:
        model_of: reads what models are, for the rules that need their numbers; None leaves those out.

    Raises:
        MegatuneError: the file is missing or unreadable (exit 66). Everything else is a finding.
    """
    reading = read_tree(source, overrides)
    reader = Reader(reading.findings, lines=reading.lines)
    origins = {entry.key: entry.origin for entry in entries_of(reading.tree)}
    top = reader.read(_understood(reading.tree, reader), TOP)
    settings = _settings(top, reader, model_of) if top.places or not reader.findings else None
    variables = tracker_variables(top, reader)
    if not top.places and not reader.findings:
        reader.find("the file has no settings", str(source), fix="docs/rl.md begins with a whole file")
    findings = tuple(in_order(reader.findings))
    lines = (*reader.lines, *_ignored_lines(reader))
    return ReadRL(None if findings else settings, findings, lines, origins, reading.tree, variables)


def _understood(tree: Tree, reader: Reader) -> Tree:
    """Return the tree without what is no key, a tracker that only ROLL's own machines have, and with the switch that
    ROLL's launcher of distillation sets."""
    tracker = tree.get("track_with")
    if isinstance(tracker, SettingEntry) and tracker.value.data == "ml_tracker":
        reader.lines.append("track_with ml_tracker is a tracker inside Alibaba: tensorboard is used")
        tree = {**tree, "track_with": replace(tracker, value=Value("tensorboard", "tensorboard"))}
    student = tree.get("student_train")
    if isinstance(student, dict) and not {"actor_train", "is_pure_opd"} & tree.keys():
        reader.lines.append("is_pure_opd is true: ROLL runs a file with student_train in place of actor_train so")
        switch = SettingEntry("is_pure_opd", Value(True, "true"), place_of(student), "student_train")
        tree = {**tree, "is_pure_opd": switch}
    return tree


def _settings(top: Part, reader: Reader, model_of: ModelOf | None) -> RLSettings | None:
    """Make the settings of the parts; None where a role could not be made."""
    lengths = rollout_part(top, reader)
    roles = Roles(reader, top, lengths, model_of)
    pure = top["is_pure_opd"]
    trained, sampled = (top.inner[f"{who}_{what}"] for who, what in _actors(pure))
    for part in (trained, sampled):
        if not part.is_written:
            reader.find(
                f"the role {part.name} is missing", fix=f"write {part.name}: with device_mapping and strategy_args"
            )
    rewards = read_rewards(top.trees.get("rewards", {}), roles)
    if not trained.is_written or not sampled.is_written:
        return None
    pretrain, group = top["pretrain"], lengths.num_return_sequences_in_group
    actor_train = model_role(roles, trained, "actor_train", pretrain, trains=True)
    generating = read_generating(roles, sampled, lengths.response_length, group)
    actor_infer = infer_role(roles, sampled, "actor_infer", pretrain, generating)
    algorithm = algorithm_part(top, reader, _updates(actor_train, top, lengths.rollout_batch_size * group))
    has_adapters = actor_train is not None and actor_train.settings.finetuning.finetuning_type == "lora"
    reference = None
    if top.inner["reference"].is_written:
        reference = _reference(top, roles, needed=algorithm.enable_reference, has_adapters=has_adapters)
    elif algorithm.enable_reference and not has_adapters:
        reason = (
            "use_kl_loss" if algorithm.use_kl_loss else "add_token_level_kl" if algorithm.add_token_level_kl else ""
        )
        what = f"{reason or 'enable_reference'} without the role reference"
        reader.find(
            what, top.where(reason or "enable_reference"), "the divergence is from it", "add the role reference"
        )
    critic = _critic(top, roles, algorithm.adv_estimator)
    judge = reward_model(top.inner["reward_model"], roles) if top.inner["reward_model"].is_written else None
    teachers = _teachers(top, roles)
    validation = None
    if (part := top.inner["validation"]).is_written:
        tokens = (lengths.val_sequence_length or lengths.sequence_length) - (
            lengths.val_prompt_length or lengths.prompt_length
        )
        validation = Validation(prompt_data(part.inner["data_args"]), read_generating(roles, part, tokens))
    data = prompt_data(trained.inner["data_args"], top.inner["dataset_filter"])
    if not data.domain_shares and len(rewards) == 1:
        data = replace(data, domain_shares={next(iter(rewards)): 1.0})
    if actor_train is None or actor_infer is None:
        return None
    settings = RLSettings(
        run=run_part(top, reader),
        rollout=lengths,
        algorithm=algorithm,
        data=data,
        actor_train=_scheduled(actor_train, top, lengths.rollout_batch_size * group, top["ppo_epochs"]),
        actor_infer=replace(actor_infer, return_routing=actor_train.router_replay),
        rewards=rewards,
        reference=reference,
        critic=None if critic is None else _scheduled(critic, top, lengths.rollout_batch_size * group, 1),
        reward_model=judge,
        teachers=teachers,
        validation=validation,
    )
    check_roles(settings, top, trained, sampled, roles)
    return settings


def _actors(pure: bool) -> tuple[tuple[str, str], tuple[str, str]]:
    who = "student" if pure else "actor"
    return (who, "train"), (who, "infer")


def _reference(top: Part, roles: Roles, *, needed: bool, has_adapters: bool) -> ModelRole | None:
    """Make the reference, and leave it out where nothing needs it."""
    role = model_role(roles, top.inner["reference"], "reference", top["pretrain"], trains=False)
    if has_adapters:
        roles.reader.lines.append("reference is not loaded: it is the model without its adapters, as in ROLL")
        return None
    if not needed:
        why = "neither use_kl_loss nor add_token_level_kl is on; enable_reference: true runs it for its metric"
        roles.reader.lines.append(f"reference is not loaded: {why}")
        return None
    return role


def _critic(top: Part, roles: Roles, estimator: str) -> ModelRole | None:
    part = top.inner["critic"]
    if estimator == "gae" and not part.is_written and not roles.reader.has_refused("adv_estimator"):
        why = "it subtracts the values of a critic"
        fix = "add the role critic, or write adv_estimator: grpo"
        roles.reader.find("adv_estimator gae without the role critic", top.where("adv_estimator"), why, fix)
    if not part.is_written:
        return None
    if estimator != "gae":
        roles.reader.ignore("critic", f"adv_estimator {estimator} needs none")
        return None
    return model_role(roles, part, "critic", top["reward_pretrain"], trains=True)


def _teachers(top: Part, roles: Roles) -> dict[str, ModelRole]:
    tree = top.trees.get("teacher", {})
    trees = {"default": tree} if set(tree) & set(ROLE.names) else tree
    found: dict[str, ModelRole] = {}
    if not (top["use_opd"] or top["is_pure_opd"]):
        if tree:
            roles.reader.ignore("teacher", "neither use_opd nor is_pure_opd is on")
        return found
    if not tree:
        name = "use_opd" if top["use_opd"] else "is_pure_opd"
        roles.reader.find(f"{name} without the role teacher", top.where(name), "it teaches", "add the role teacher")
    for name, node in trees.items():
        if isinstance(node, dict):
            dotted = "teacher" if trees is not tree else f"teacher.{name}"
            part = roles.reader.read(node, ROLE, dotted, place_of(node))
            role = model_role(roles, part, f"teacher.{name}", None, trains=False)
            if role is not None:
                found[name] = replace(role, opd_kl_coef=1.0 if role.opd_kl_coef is None else role.opd_kl_coef)
    return found


def _samples_of_update(settings: Settings, devices: int) -> int:
    replicas = max(1, devices // settings.parallel.model_parallel_size)
    return settings.batch.per_device_train_batch_size * settings.batch.gradient_accumulation_steps * replicas


def _updates(role: ModelRole | None, top: Part, samples: int) -> int:
    """Return the updates of the policy in one step."""
    if role is None:
        return 1
    return max(1, samples * int(top["ppo_epochs"]) // _samples_of_update(role.settings, len(role.devices)))


def _scheduled(role: ModelRole, top: Part, samples: int, epochs: int) -> ModelRole:
    """Return the role with a schedule as long as its updates of the whole run."""
    updates = max(1, top["max_steps"] * samples * epochs // _samples_of_update(role.settings, len(role.devices)))
    optimizer = role.settings.optimizer.model_copy(update={"max_steps": updates})
    return replace(role, settings=role.settings.model_copy(update={"optimizer": optimizer}))


def _ignored_lines(reader: Reader) -> list[str]:
    """Say what does nothing, one line for each reason."""
    return [f"{', '.join(_few(keys))}: {why}" for why, keys in reader.ignored.items()]


def _few(keys: list[str]) -> list[str]:
    """Shorten a list of dotted keys: the last part once, with the number of roles that have it."""
    found: dict[str, list[str]] = {}
    for key in keys:
        found.setdefault(key.rpartition(".")[2], []).append(key)
    return [places[0] if len(places) == 1 else f"{name} ({len(places)} times)" for name, places in found.items()]
