"""What ROLL's files say of a model and its engine, role by role, as the settings of every other run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from megatune.architecture import Architecture
from megatune.config.dialects.dialect import Dialect, Meaning, Refused, ValueMap
from megatune.config.dialects.roll_ignored import (
    MODEL_IGNORED,
    MODEL_REFUSED,
    STRATEGY_IGNORED,
    STRATEGY_REFUSED,
    TRAINING_IGNORED,
)
from megatune.config.dialects.roll_reader import Part, Reader, place_of
from megatune.config.dialects.roll_tree import Tree, data_of
from megatune.config.entry import SettingEntry
from megatune.config.load import Loaded, load_entries
from megatune.config.rules import experts, finetuning, layout, memory, pipeline, run
from megatune.config.settings import Settings, all_settings
from megatune.config.values import Value

KEYS: dict[str, Meaning] = {
    "dtype": ValueMap(
        {"bf16": {"precision.bf16": True}, "fp16": {"precision.fp16": True}, "fp32": {"precision.bf16": False}}
    ),
    "moe_aux_loss_coef": "experts.moe_aux_loss_coeff",
}
ROLL = Dialect(name="ROLL", keys=KEYS, not_built={})

_MODEL = (
    *("model_name_or_path", "dtype", "lora_rank", "lora_alpha", "lora_dropout", "lora_target", "additional_target"),
    "moe_aux_loss_coef",
)
_LORA = ("lora_rank", "lora_alpha", "lora_dropout", "additional_target")
_TRAINING = (
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "weight_decay", "adam_beta1", "adam_beta2"),
    *("adam_epsilon", "per_device_train_batch_size", "gradient_accumulation_steps", "warmup_ratio", "warmup_steps"),
    *("bf16", "fp16", "optimizer"),
)
_OF_STRATEGY = ("parallel", "experts", "recompute", "performance", "precision", "optimizer")
_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")

RULES = (
    *finetuning.RULES,
    *(rule for rule in layout.RULES if rule is not layout.world),
    *(*pipeline.RULES, *experts.RULES, *memory.RULES),
    *(run.scheduler_kwargs, run.scheduler_needs, run.warmup),
)


def strategy_names() -> list[str]:
    """List the keys of strategy_config of megatron_train and megatron_infer that are settings here."""
    return [*(info.name for info in all_settings().values() if info.group in _OF_STRATEGY), *_BATCH]


def section_names() -> dict[str, list[str]]:
    """List the keys that are settings here, by the mapping of a role that they stand in."""
    return {"model_args": [*_MODEL], "training_args": [*_TRAINING], "strategy_config": strategy_names()}


def read_engine(part: Part, reader: Reader, *, trains: bool) -> Loaded:
    """Read model_args, training_args and strategy_config of a role; later ones win, as in ROLL.

    Args:
        trains: whether the role trains: training_args and adapters do nothing otherwise.
    """
    strategy_tree = part.inner["strategy_args"].trees.get("strategy_config", {})
    additional = strategy_tree.get("additional_configs")
    if isinstance(additional, dict):
        strategy_tree = {**strategy_tree, **additional}
    strategy_tree = {key: node for key, node in strategy_tree.items() if key != "additional_configs"}
    model = [*_entries(part, reader, "model_args", _MODEL, MODEL_IGNORED, MODEL_REFUSED)]
    training = [*_entries(part, reader, "training_args", _TRAINING, TRAINING_IGNORED, {})]
    if not trains:
        for entry in training:
            reader.ignore(f"{part.name}.training_args.{entry.key}", f"{part.name} does not train")
        training = []
    strategy = [
        *_section(
            strategy_tree,
            reader,
            f"{part.name}.strategy_args.strategy_config",
            strategy_names(),
            STRATEGY_IGNORED,
            STRATEGY_REFUSED,
        )
    ]
    model = [*_adapters(model, part, reader, trains=trains)]
    entries = [*model, *training, *strategy]
    if not any(entry.key in ("dtype", "bf16", "fp16") for entry in entries):
        model.append(SettingEntry("dtype", Value("bf16", "bf16"), part.at, "default"))
    if not any(entry.key == "expert_tensor_parallel_size" for entry in entries):
        model.append(SettingEntry("expert_tensor_parallel_size", Value(1, "1"), part.at, "default"))
    loaded = load_entries((model, training, strategy), ROLL)
    reader.findings += [each for each in loaded.findings if each not in reader.findings]
    return loaded


def check_engine(
    loaded: Loaded, settings: Settings, reader: Reader, architecture: Architecture | None, world_size: int
) -> None:
    """Report what is wrong between the settings of a role's engine."""
    found = replace(loaded, settings=settings).check_rules(architecture, world_size, rules=RULES)
    reader.findings += [each for each in found if each not in reader.findings]


def sampled_model(part: Part, reader: Reader) -> Loaded:
    """Read model_args of a role that samples: which model, and its dtype."""
    model = [*_entries(part, reader, "model_args", _MODEL, MODEL_IGNORED, MODEL_REFUSED)]
    for entry in model:
        if entry.key not in ("model_name_or_path", "dtype"):
            reader.ignore(
                f"{part.name}.model_args.{entry.key}", "engines sample with whole weights, adapters merged into them"
            )
    model = [entry for entry in model if entry.key in ("model_name_or_path", "dtype")]
    if not any(entry.key == "dtype" for entry in model):
        model.append(SettingEntry("dtype", Value("bf16", "bf16"), part.at, "default"))
    loaded = load_entries((model,), ROLL)
    reader.findings += [each for each in loaded.findings if each not in reader.findings]
    return loaded


def _entries(
    part: Part,
    reader: Reader,
    section: str,
    names: tuple[str, ...],
    ignored: Mapping[str, str],
    refused: Mapping[str, Refused],
) -> Iterator[SettingEntry]:
    yield from _section(part.trees.get(section, {}), reader, f"{part.name}.{section}", [*names], ignored, refused)


def _section(
    tree: Tree,
    reader: Reader,
    above: str,
    names: list[str],
    ignored: Mapping[str, str],
    refused: Mapping[str, Refused],
) -> Iterator[SettingEntry]:
    """Give the entries of a mapping that are settings, by their own names; report or note the others."""
    for key, node in tree.items():
        dotted, data = f"{above}.{key}", data_of(node)
        if data is None:
            continue
        if key in refused and (key not in names or refused[key].refuses(data)):
            if refused[key].refuses(data):
                what, why, fix = refused[key].texts(key, data)
                reader.find(what.replace(key, dotted, 1), place_of(node), why, fix)
        elif key in names:
            value = Value(data) if isinstance(node, dict) else node.value
            where = place_of(node)
            yield SettingEntry(key, value, where, node.origin if isinstance(node, SettingEntry) else where)
        elif key in ignored:
            reader.ignore(dotted, ignored[key])
        else:
            reader.unknown(key, [*names, *ignored], dotted, place_of(node))


def _adapters(entries: list[SettingEntry], part: Part, reader: Reader, *, trains: bool) -> Iterator[SettingEntry]:
    """Turn adapters on where lora_target is written; without it the other keys of LoRA do nothing, as in ROLL."""
    target = next((entry for entry in entries if entry.key == "lora_target"), None)
    for entry in entries:
        if entry.key in (*_LORA, "lora_target") and (target is None or not trains):
            why = (
                "adapters are on with lora_target, as in ROLL" if trains else f"{part.name} has no adapters of its own"
            )
            reader.ignore(f"{part.name}.model_args.{entry.key}", why)
        elif entry is target and entry.value.text == "all-linear":
            yield replace(entry, value=Value("all", "all"))
        else:
            yield entry
    if target is not None and trains:
        yield replace(target, key="finetuning_type", value=Value("lora", "lora"))
