"""Builds the roles that run on Megatron-Core: their settings, and how their samples are split into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from megatune.architecture import Architecture
from megatune.config.derived import with_model_defaults
from megatune.config.dialects.dialect import Dialect, rows_below, table
from megatune.config.dialects.roll_reader import Part, Section, part_of
from megatune.config.dialects.roll_run import environment, profiled, reported
from megatune.config.entry import SettingEntry
from megatune.config.load import Loaded, load_entries
from megatune.config.rl.algorithm import AlgorithmSettings
from megatune.config.rl.role import RoleSettings
from megatune.config.rl.rollout import RolloutSettings
from megatune.config.rl.run import RLRunSettings
from megatune.config.rl.settings import ModelRole
from megatune.config.rules import finetuning, layout, memory, pipeline, run, trained
from megatune.config.settings import GROUPS, Settings, all_settings, with_settings
from megatune.config.values import Value
from megatune.errors import Finding
from megatune.families.scores import SCORER, STAGE

# (settings of a role, stage of its model) -> architecture; None if it cannot be read.
ModelOf = Callable[[Settings, str], Architecture | None]

_ACTORS = ("ActorWorker", "ActorPGWorker", "InferWorker", "CriticWorker", "BaseWorker")
_MODEL, STRATEGY = "model_args", "strategy_args.strategy_config"
_OF_STRATEGY = ("parallel", "experts", "recompute", "performance", "precision", "optimizer")
_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
LORA_KEYS = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "additional_target")
QUANTIZATION_KEYS = ("quantization_bit", "quantization_type", "double_quantization")
# Refused and ignored keys have been reported before, with their places in the file.
_ROWS = {key: replace(row, unsupported="", ignored="") for key, row in table("roll").items() if row.paths}
ROLL = Dialect(name="ROLL", rows={key.rpartition(".")[2]: row for key, row in _ROWS.items()})

RULES = (
    *(*finetuning.RULES, *trained.RULES),
    *(rule for rule in layout.RULES if rule is not layout.world),
    *(*pipeline.RULES, *layout.EXPERT_RULES, *memory.RULES),
    *(run.scheduler_kwargs, run.scheduler_needs, run.warmup),
)


@dataclass(slots=True)
class Roles:
    """Common inputs for building roles.

    Attributes:
        run, lengths: the valid keys of the top level.
        parts: the parts of roles with devices, by role name.
    """

    top: Part
    run: RLRunSettings
    lengths: RolloutSettings
    model_of: ModelOf | None = None
    parts: dict[str, Part] = field(default_factory=dict)

    def begin(self, part: Part, name: str, valid: tuple[str, ...]) -> str | None:
        """Check the strategy of a role, and note its keys that are not read.

        Args:
            valid: names of valid strategies.

        Returns:
            The strategy; None, with a finding, if it is invalid.
        """
        keys, self.parts[name] = part.of(RoleSettings), part
        strategy, path = keys.strategy_args.strategy_name, keys.worker_cls or ""
        part.check(
            "role",
            role=name,
            valid=valid,
            is_valid=strategy in valid,
            samples="vllm" in valid,
            expected=" or ".join(valid),
            does="trains" if valid == ("megatron_train",) else "does not train",
            is_own=not part.name.startswith("rewards.") and path.rpartition(".")[2] not in _ACTORS,
        )
        return strategy if strategy in valid else None

    def environment_of(self, part: Part) -> dict[str, str]:
        return {**environment(self.top), **environment(part)}


def no_model(part: Part, name: str) -> None:
    keys = {**dict.fromkeys(("actor_train", "actor_infer", "reference"), "pretrain"), "critic": "reward_pretrain"}
    fix = f"write model_args: {{model_name_or_path: MODEL}} in {part.name}"
    fix += f", or {keys[name]}: MODEL at the top level" if name in keys else ""
    part.report(f"{part.name} has no model", fix=fix)


@cache
def engine_sections() -> dict[str, Section]:
    """Return the mappings of a role whose keys are our settings, by their names."""
    names = {
        section: [key for key, row in rows_below(f"ROLE.{section}").items() if row.paths]
        for section in ("model_args", "training_args", STRATEGY)
    }
    names[STRATEGY] += [*(info.name for info in all_settings().values() if info.group in _OF_STRATEGY), *_BATCH]
    return {section: Section((), (f"ROLE.{section}",), settings=keys) for section, keys in names.items()}


def read_engine(part: Part, *, trains: bool = False, samples: bool = False) -> Loaded:
    """Read model_args, training_args and strategy_config of a role; later ones win, as in ROLL.

    Args:
        trains: whether the role trains; otherwise training_args and adapters have no effect.
        samples: whether it samples; then only its model and dtype are read, and the rest belongs to its engine.
    """
    of_sections = {
        each: _entries(part, each) for each in ([_MODEL] if samples else [_MODEL, "training_args", STRATEGY])
    }
    target = next((entry for entry in of_sections[_MODEL] if entry.key == "lora_target" and trains), None)
    found: list[SettingEntry] = []
    for section, entries in of_sections.items():
        for entry in entries:
            why = ""
            if samples and entry.key not in ("model_name_or_path", "dtype"):
                why = "engines sample with full weights, with adapters merged"
            elif section == "training_args" and not trains:
                why = f"{part.name} does not train"
            elif section == _MODEL and entry.key in LORA_KEYS and target is None:
                off = f"{part.name} has no adapters"
                why = "lora_target turns adapters on, as in ROLL" if trains else off
            elif entry.key == "save_merged_model" and target is None:
                why = "there is no adapter to merge"
            elif entry.key in QUANTIZATION_KEYS and target is None:
                key, fix = f"{section}.{entry.key}", "write lora_target: all-linear" if trains else "remove it"
                why = "only the base model of adapters can be quantized"
                part.report(f"{part.key(key)} without lora_target", key, why=why, fix=fix)
                continue
            if why:
                part.ignore(f"{section}.{entry.key}", why)
            else:
                found.append(entry)
    if target is not None:
        found.append(replace(target, key="finetuning_type", value=Value("lora", "lora")))
    defaults = {"expert_tensor_parallel_size": Value(1, "1")}
    if not any(entry.key in ("dtype", "bf16", "fp16") for entry in found):
        defaults["dtype"] = Value("bf16", "bf16")
    own = [SettingEntry(key, value, part.at, "default") for key, value in defaults.items()]
    loaded = load_entries([own, found], ROLL)
    part.reader.findings += [each for each in loaded.findings if each not in part.reader.findings]
    return loaded


def _entries(part: Part, section: str) -> list[SettingEntry]:
    """Return the entries of a mapping that are settings, by their last name; report or note the others."""
    found: list[SettingEntry] = []
    for above in (section, *([f"{section}.additional_configs"] if section == STRATEGY else [])):
        tree = part.mapping(*above.split("."))
        written = {key: node for key, node in tree.items() if node is not None}
        if isinstance(written.get("additional_configs"), dict):
            del written["additional_configs"]
        found += part_of(part.reader, written, engine_sections()[section], part.key(above)).entries
    return found


def model_role(
    roles: Roles, part: Part, name: str, default_model: str | None, *, trains: bool, teacher: Part | None = None
) -> ModelRole | None:
    """Build a role that runs on Megatron-Core; None if its strategy is invalid.

    Args:
        teacher: the part of a teacher that runs in the role's processes.
    """
    valid = ("megatron_train",) if trains else ("megatron_infer", "hf_infer")
    strategy = roles.begin(part, name, valid)
    if strategy is None:
        return None
    if strategy == "hf_infer":  # its strategy_config belongs to another engine
        part = replace(part, tree={key: node for key, node in part.tree.items() if key != "strategy_args"})
    loaded, keys = read_engine(part, trains=trains), part.of(RoleSettings)
    devices = keys.devices
    settings = _settings(roles, loaded.settings, part, name, default_model, len(devices), trains)
    loaded, architecture = replace(loaded, settings=settings), None
    if roles.model_of is not None and settings.model.model_name_or_path:
        architecture = roles.model_of(settings, SCORER if name.startswith("rewards.") else settings.run.stage)
    if trains and architecture is not None:
        loaded, lines = with_model_defaults(_with_encoder(loaded, architecture), architecture)
        part.reader.lines += lines
    settings, loaded = loaded.settings, replace(loaded, dialect=part.reader.dialect or ROLL)
    found = loaded.check_rules(architecture, len(devices), rules=RULES)
    part.reader.findings += [each for each in found if each not in part.reader.findings]
    longest, parallel = roles.lengths.longest_sequence, settings.parallel
    if architecture is not None:
        roles.top.check("positions", longest=longest, positions=architecture.max_position_embeddings)
    part.check(
        "layout",
        devices=len(devices),
        model_size=parallel.model_parallel_size,
        expert_size=parallel.expert_parallel_size,
        smallest=parallel.smallest_world,
        dense_family=architecture.model_type if trains and architecture is not None and not architecture.moe else None,
    )
    role = ModelRole(
        **{
            **dict(keys),
            "system_envs": roles.environment_of(part),
            "pg_variant": _variant(part, name, roles.lengths.max_sequence_length),
        },
        name=name,
        settings=settings,
        training=trains,
        teacher=None if teacher is None else _teacher(roles, teacher, loaded, found, len(devices)),
    )
    return role.model_copy(update=_micro_batches(roles.lengths.max_sequence_length, role, part))


def _teacher(roles: Roles, part: Part, student: Loaded, found: Sequence[Finding], devices: int) -> Settings:
    """Return the settings of a teacher: the student's layout, precision and kernels, without training.

    Args:
        found: findings of the student, which are not reported again.
    """
    own = {name: GROUPS[name]() for name in ("finetuning", "experts", "recompute", "optimizer")}
    read = read_engine(replace(part, tree={_MODEL: part.mapping(_MODEL)})).settings
    if read.model.model_name_or_path is None:
        no_model(part, "teacher")
    key, precision = f"{_MODEL}.dtype", student.settings.precision
    if part.has(key) and (read.precision.bf16, read.precision.fp16) != (precision.bf16, precision.fp16):
        what = f"{part.key(key)} is not that of actor_train"
        part.report(what, key, why="the teacher runs in its processes", fix="remove dtype")
    settings = student.settings.model_copy(update={**own, "model": read.model})
    architecture = None
    if roles.model_of is not None and read.model.model_name_or_path:
        architecture = roles.model_of(settings, settings.run.stage)
    for each in replace(student, settings=settings).check_rules(architecture, devices, rules=RULES):
        if each.what not in [other.what for other in found]:
            part.reader.add(replace(each, what=f"{part.name}, in the layout of actor_train: {each.what}"))
    if architecture is not None:
        longest, positions = roles.lengths.longest_sequence, architecture.max_position_embeddings
        roles.top.check("positions", longest=longest, positions=positions)
    return settings


def _settings(
    roles: Roles, settings: Settings, part: Part, name: str, default_model: str | None, world_size: int, trains: bool
) -> Settings:
    """Return the settings of a role, completed from other keys of the file."""
    keys, top, parallel, optimizer = part.of(RoleSettings), roles.run, settings.parallel, settings.optimizer
    changes: dict[str, Any] = {
        "run.stage": STAGE if name.startswith(("critic", "rewards.")) else "sft",
        "run.output_dir": top.output_dir,
        "run.seed": top.seed,
        "run.run_name": top.tracker_kwargs.name or top.exp_name,
        "run.num_processes": max(1, world_size),
        "run.ddp_timeout": max(1, round(keys.backend_timeout * 60)),
        "batch.per_device_eval_batch_size": keys.infer_batch_size,
        "data.cutoff_len": max(2, roles.lengths.max_sequence_length),
        "data.packing": keys.use_sequence_packing,
    }
    if settings.model.model_name_or_path is None:
        if default_model is None:
            no_model(part, name)
        changes["model.model_name_or_path"] = default_model
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        part.ignore("sequence_parallel", "tensor_model_parallel_size is 1")
        changes["parallel.sequence_parallel"] = False
    if trains:
        changes |= reported(top) | {"optimizer.max_grad_norm": roles.top.of(AlgorithmSettings).max_grad_norm}
        changes |= profiled(top) if name == "actor_train" else {}
    else:
        changes["batch.per_device_train_batch_size"] = keys.infer_batch_size
        changes["batch.gradient_accumulation_steps"] = parallel.pipeline_model_parallel_size
    if optimizer.lr_scheduler_type == "constant" and (optimizer.warmup_steps or optimizer.warmup_ratio):
        line = "lr_scheduler_type constant with a warm-up becomes constant_with_warmup, as in ROLL's Megatron strategy"
        part.reader.lines.append(f"{part.name}: {line}")
        changes["optimizer.lr_scheduler_type"] = "constant_with_warmup"
    return with_settings(settings, changes)


def _with_encoder(loaded: Loaded, architecture: Architecture) -> Loaded:
    """Also train the vision encoder if no key freezes it, as in ROLL; adapters are on the language model only."""
    frozen = ("finetuning.freeze_vision_tower", "finetuning.freeze_multi_modal_projector")
    is_lora = loaded.settings.finetuning.finetuning_type == "lora"
    if architecture.vision is None or is_lora or not loaded.entries.keys().isdisjoint(frozen):
        return loaded
    return replace(loaded, settings=with_settings(loaded.settings, dict.fromkeys(frozen, False)))


def _micro_batches(longest: int, role: ModelRole, part: Part) -> dict[str, int | None]:
    """Return the tokens per micro-batch of a role, with sequence packing or dynamic batching.

    Args:
        longest: maximum tokens of a sample.
    """
    found: dict[str, int | None] = {}
    switches = {"train": "use_dynamic_batching_in_train", "forward": "use_dynamic_batching_in_infer"}
    if role.use_sequence_packing:
        rows = {"train": role.settings.batch.per_device_train_batch_size, "forward": role.infer_batch_size}
        for phase, count in rows.items():
            key = f"max_packed_sequence_length_{phase}"
            tokens = getattr(role.sequence_packing_args, key) or max(1, count) * longest
            _check_fits(longest, part, f"sequence_packing_args.{key}", tokens)
            found[f"packed_tokens_{phase}"] = tokens
        return found
    for phase, switch in switches.items():
        key = switch.replace("use_dynamic_batching", "max_tokens_per_microbatch")
        if getattr(role, switch) and getattr(role, key):
            _check_fits(longest, part, key, getattr(role, key))
            found[f"dynamic_tokens_{phase}"] = getattr(role, key)
    return found


def _check_fits(longest: int, part: Part, key: str, tokens: int) -> None:
    if tokens < longest:
        what, fix = f"{part.key(key)} {tokens} is less than sequence_length {longest}", key.rpartition(".")[2]
        part.report(what, key, why="the longest sample would not fit", fix=f"write {fix}: {longest}")


def _variant(part: Part, name: str, longest: int) -> str | None:
    """Return the loss variant of ActorPGWorker; None for other workers."""
    keys = part.of(RoleSettings)
    is_pg = (keys.worker_cls or "").endswith("ActorPGWorker")
    variant = (keys.pg_variant or "vanilla") if is_pg else None
    part.check("engine", role=name, is_pg=is_pg, policy_variant=variant, room=2 * longest)
    return variant
