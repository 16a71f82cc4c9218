"""What roles have in common: strategy, devices, and what they say of a model and its engine, as settings of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache

from megatune.architecture import Architecture
from megatune.config.dialects.dialect import Dialect
from megatune.config.dialects.roll_reader import Part, Section, part_of
from megatune.config.dialects.roll_run import environment
from megatune.config.dialects.table import rows_below, table
from megatune.config.entry import SettingEntry
from megatune.config.load import Loaded, load_entries
from megatune.config.rl.role import RoleSettings
from megatune.config.rl.rollout import RolloutSettings
from megatune.config.rl.run import RLRunSettings
from megatune.config.rules import experts, finetuning, layout, memory, pipeline, run
from megatune.config.settings import Settings, all_settings
from megatune.config.values import Value

# Settings of a role's engine -> the model's numbers; None where they cannot be read.
ModelOf = Callable[[Settings], Architecture | None]

_ACTORS = ("ActorWorker", "ActorPGWorker", "InferWorker", "CriticWorker", "BaseWorker")
STRATEGY = "strategy_args.strategy_config"
_OF_STRATEGY = ("parallel", "experts", "recompute", "performance", "precision", "optimizer")
_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
_LORA = ("lora_rank", "lora_alpha", "lora_dropout", "additional_target")
# What is refused or does nothing is found with its place in the file, before.
_SETS = {key: replace(row, unsupported="", ignored="") for key, row in table("roll").items() if row.paths}
ROLL = Dialect(name="ROLL", rows={key.rpartition(".")[2]: row for key, row in _SETS.items()})

RULES = (
    *finetuning.RULES,
    *(rule for rule in layout.RULES if rule is not layout.world),
    *(*pipeline.RULES, *experts.RULES, *memory.RULES),
    *(run.scheduler_kwargs, run.scheduler_needs, run.warmup),
)


@dataclass(slots=True)
class Roles:
    """What roles are made with.

    Attributes:
        run, lengths: keys of the top level, as far as they are valid.
        parts: of the roles that have devices, by the names of the roles.
    """

    top: Part
    run: RLRunSettings
    lengths: RolloutSettings
    model_of: ModelOf | None = None
    parts: dict[str, Part] = field(default_factory=dict)

    def begin(
        self, part: Part, name: str, valid: tuple[str, ...], unread: dict[str, str], *, trains: bool
    ) -> str | None:
        """Check what computes a role, and note what of it is not read.

        Args:
            valid: names of strategies.
            unread: mappings of the role, and why nobody reads them.

        Returns:
            The strategy; None, and a finding, where it is none of the valid ones.
        """
        keys, key, self.parts[name] = part.of(RoleSettings), "strategy_args.strategy_name", part
        strategy, path = keys.strategy_args.strategy_name, keys.worker_cls
        if strategy is None and part.key(key) not in part.reader.refused:
            fix = f"write strategy_args: {{strategy_name: {valid[0]}}}"
            part.find(f"{part.name} has no {key}", why=f"it says what computes {part.name}", fix=fix)
        elif strategy is not None and strategy not in valid:
            why = f"{part.name} {'trains' if trains else 'does not train'}: expected {' or '.join(valid)}"
            part.find(f"{part.key(key)} is {strategy}", key, why=why, fix=f"write strategy_name: {valid[0]}")
        if path and not part.name.startswith("rewards.") and path.rpartition(".")[2] not in _ACTORS:
            what, fix = f"{part.name}.worker_cls is {path}", "remove worker_cls"
            part.find(what, "worker_cls", why="roles are built in", fix=fix)
        for section, why in unread.items():
            if part.has(section):
                part.ignore(section, why)
        return strategy if strategy in valid else None

    def devices(self, part: Part) -> tuple[int, ...]:
        devices = part.of(RoleSettings).devices
        if not devices and part.key("device_mapping") not in part.reader.refused:
            fix = "write device_mapping: list(range(0,8))"
            part.find(f"{part.name} has no device_mapping", why="a model needs devices", fix=fix)
        return devices

    def environment_of(self, part: Part) -> dict[str, str]:
        return {**environment(self.top), **environment(part)}


NO_PROMPTS = {"data_args": "prompts are made with actor_train's"}


def no_model(part: Part, name: str) -> None:
    keys = {**dict.fromkeys(("actor_train", "actor_infer", "reference"), "pretrain"), "critic": "reward_pretrain"}
    fix = f"write model_args: {{model_name_or_path: MODEL}} in {part.name}"
    fix += f", or {keys[name]}: MODEL at the top level" if name in keys else ""
    part.find(f"{part.name} has no model", fix=fix)


@cache
def sections() -> dict[str, Section]:
    """Return the mappings of a role whose keys are settings here, by where they stand."""
    names = {
        section: [key for key, row in rows_below(f"ROLE.{section}").items() if row.paths]
        for section in ("model_args", "training_args", STRATEGY)
    }
    names[STRATEGY] += [*(info.name for info in all_settings().values() if info.group in _OF_STRATEGY), *_BATCH]
    return {section: Section((), (f"ROLE.{section}",), settings=keys) for section, keys in names.items()}


def read_engine(part: Part, *, trains: bool) -> Loaded:
    """Read model_args, training_args and strategy_config of a role; later ones win, as in ROLL.

    Args:
        trains: whether the role trains: training_args and adapters do nothing otherwise.
    """
    model, training = (_entries(part, section) for section in ("model_args", "training_args"))
    if not trains:
        for entry in training:
            part.ignore(f"training_args.{entry.key}", f"{part.name} does not train")
        training = []
    strategy = _entries(part, STRATEGY)
    if not trains or all(entry.key != "lora_target" for entry in model):
        for entry in [each for each in strategy if each.key == "save_merged_model"]:
            part.ignore(f"{STRATEGY}.{entry.key}", "there is no adapter to merge")
            strategy.remove(entry)
    model = [*_adapters(model, part, trains=trains)]
    if not any(entry.key in ("dtype", "bf16", "fp16") for entry in (*model, *training, *strategy)):
        model.append(_default_dtype(part))
    whole_experts = SettingEntry("expert_tensor_parallel_size", Value(1, "1"), part.at, "default")
    return _loaded(part, [whole_experts], model, training, strategy)


def sampled_model(part: Part) -> Loaded:
    """Read model_args of a role that samples: which model, and its dtype."""
    model = []
    for entry in _entries(part, "model_args"):
        if entry.key in ("model_name_or_path", "dtype"):
            model.append(entry)
        else:
            part.ignore(f"model_args.{entry.key}", "engines sample with whole weights, adapters merged into them")
    if not any(entry.key == "dtype" for entry in model):
        model.append(_default_dtype(part))
    return _loaded(part, model)


def _default_dtype(part: Part) -> SettingEntry:
    return SettingEntry("dtype", Value("bf16", "bf16"), part.at, "default")


def _loaded(part: Part, *layers: list[SettingEntry]) -> Loaded:
    loaded = load_entries(layers, ROLL)
    part.reader.findings += [each for each in loaded.findings if each not in part.reader.findings]
    return loaded


def _entries(part: Part, section: str) -> list[SettingEntry]:
    """Return the entries of a mapping that are settings, by their own names; report or note the others."""
    found: list[SettingEntry] = []
    for above in (section, *([f"{section}.additional_configs"] if section == STRATEGY else [])):
        tree = part.mapping(*above.split("."))
        written = {key: node for key, node in tree.items() if node is not None}
        if isinstance(written.get("additional_configs"), dict):
            del written["additional_configs"]
        found += part_of(part.reader, written, sections()[section], part.key(above)).entries
    return found


def _adapters(entries: list[SettingEntry], part: Part, *, trains: bool) -> Iterator[SettingEntry]:
    """Turn adapters on where lora_target is written; without it the other keys of LoRA do nothing, as in ROLL."""
    target = next((entry for entry in entries if entry.key == "lora_target"), None)
    for entry in entries:
        if entry.key in (*_LORA, "lora_target") and (target is None or not trains):
            on = "adapters are on with lora_target, as in ROLL"
            part.ignore(f"model_args.{entry.key}", on if trains else f"{part.name} has no adapters of its own")
        elif entry is target and entry.value.text == "all-linear":
            yield replace(entry, value=Value("all", "all"))
        else:
            yield entry
    if target is not None and trains:
        yield replace(target, key="finetuning_type", value=Value("lora", "lora"))
