"""What ROLL's files say of a model and its engine, role by role, as the settings of every other run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from megatune.config.dialects.dialect import Dialect
from megatune.config.dialects.roll_reader import Part, Section
from megatune.config.dialects.roll_tree import Tree, data_of
from megatune.config.dialects.table import rows_below, table
from megatune.config.entry import SettingEntry
from megatune.config.load import Loaded, load_entries
from megatune.config.rules import experts, finetuning, layout, memory, pipeline, run
from megatune.config.settings import all_settings
from megatune.config.values import Value

_STRATEGY = "strategy_args.strategy_config"
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


@cache
def sections() -> dict[str, Section]:
    """Return the mappings of a role whose keys are settings here, by where they stand."""
    names = {
        section: [key for key, row in rows_below(f"ROLE.{section}").items() if row.paths]
        for section in ("model_args", "training_args", _STRATEGY)
    }
    names[_STRATEGY] += [*(info.name for info in all_settings().values() if info.group in _OF_STRATEGY), *_BATCH]
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
    strategy = _entries(part, _STRATEGY)
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
    tree: Tree = part.mapping(*section.split("."))
    if section == _STRATEGY:
        tree = {**tree, **part.mapping(*section.split("."), "additional_configs")}
        if isinstance(tree.get("additional_configs"), dict):
            del tree["additional_configs"]
    written = {key: node for key, node in tree.items() if data_of(node) is not None}
    return part.reader.read(written, sections()[section], part.key(section)).entries


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
