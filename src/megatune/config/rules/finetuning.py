"""Rules of what is trained: the model has it, what is written takes part in it, and it is built."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from megatune.architecture import Architecture
from megatune.config.dialects.dialect import Refused
from megatune.config.entry import SettingEntry
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.rules.problem import Context, Problem, divisors, nearest
from megatune.config.settings import Settings, setting_value

NOT_BUILT: dict[str, Refused] = {
    "loraplus_lr_embedding": Refused(
        "embeddings have no adapters here: additional_target trains them whole, at learning_rate", off=(1e-6,)
    ),
}
_OF_FREEZE = ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules", "use_llama_pro")
_OF_LORA = (
    "lora_rank", "lora_alpha", "lora_dropout", "lora_target", "additional_target", "use_rslora", "use_dora",
    "loraplus_lr_ratio", "adapter_name_or_path", "create_new_adapter",
)  # fmt: skip
_LAYERS, _ADAPTERS, _METHOD = "freeze_trainable_layers", "adapter_name_or_path", "finetuning.finetuning_type"
_DEFAULTS = FinetuningSettings()


def not_built(context: Context) -> Iterator[Problem]:
    """What a user wrote is refused where it asks for something, even if that is the default."""
    for path, entry in context.written.items():
        name, value = path.partition(".")[2], setting_value(context.settings, path)
        if name in NOT_BUILT and NOT_BUILT[name].refuses(value):
            said = value if entry.value.text is None else entry.value.text
            yield Problem((name,), *NOT_BUILT[name].texts(name, said), entry.where)


def layers(context: Context) -> Iterator[Problem]:
    """Freezing trains layers that the model has."""
    architecture, finetuning = context.architecture, context.settings.finetuning
    count = finetuning.freeze_trainable_layers
    if finetuning.finetuning_type != "freeze":
        return
    if not count and not finetuning.freeze_extra_modules:
        fix = f"write {_LAYERS}: 1 for the last layer, or {_LAYERS}: -1 for the first"
        yield Problem((_LAYERS,), f"{_LAYERS} is 0", "no layer would be trained, and nothing outside of layers", fix)
    elif architecture is not None and finetuning.use_llama_pro:
        if count < 1 or architecture.num_layers % count:
            what = f"use_llama_pro with {_LAYERS} {count}: the model has {architecture.num_layers} layers"
            why = "the last layer of each of as many equal groups is trained"
            fix = f"write {_LAYERS}: {nearest(abs(count), divisors(architecture.num_layers))}"
            yield Problem((_LAYERS, "use_llama_pro"), what, why, fix)
    elif architecture is not None and abs(count) > architecture.num_layers:
        what = f"{_LAYERS} {count}: the model has {architecture.num_layers} layers"
        most = architecture.num_layers if count > 0 else -architecture.num_layers
        fix = f"write {_LAYERS}: {most}, which is all of them"
        yield Problem((_LAYERS,), what, "", fix)


def unused(settings: Settings, written: Mapping[str, SettingEntry]) -> list[str]:
    """Return the keys, as they were written, that belong to another finetuning_type than the one that is written.

    They change nothing, whatever their value, and a run prints them. Where the type is left open they ask for another
    one, and a folder of adapters would be another model: both are refused.
    """
    if _METHOD not in written:
        return []
    paths = (f"finetuning.{name}" for _, name in _of_others(settings.finetuning) if name != _ADAPTERS)
    return [written[path].key for path in paths if path in written and setting_value(settings, path)]


def _of_others(finetuning: FinetuningSettings) -> Iterator[tuple[str, str]]:
    """Yield (finetuning_type, setting) of the types that the run does not have."""
    for kind, names in (("freeze", _OF_FREEZE), ("lora", _OF_LORA)):
        if finetuning.finetuning_type != kind:
            yield from ((kind, name) for name in names)


def without_effect(context: Context) -> Iterator[Problem]:
    """What is written takes part in what is trained."""
    finetuning, architecture = context.settings.finetuning, context.architecture
    for kind, name in _of_others(finetuning):
        path, default = f"finetuning.{name}", getattr(_DEFAULTS, name)
        is_noted = name != _ADAPTERS and {_METHOD, path} <= context.written.keys()
        if not is_noted and context.asks(path, default, _METHOD):
            what = f"{name} with finetuning_type: {finetuning.finetuning_type}"
            fix = f"write finetuning_type: {kind}, or remove {name}"
            yield Problem((name, "finetuning_type"), what, f"it says what {kind} trains", fix)
    if context.settings.checkpoint.merge_lora and finetuning.finetuning_type != "lora":
        what = f"merge_lora: true with finetuning_type: {finetuning.finetuning_type}"
        fix = "write finetuning_type: lora, or remove merge_lora"
        yield Problem(("merge_lora", "finetuning_type"), what, "there is no adapter to merge", fix)
    if architecture is None:
        return
    has_vision, has_deepstack = architecture.vision is not None, bool(_num_deepstack_mergers(architecture))
    for name, part, is_there in (
        ("freeze_vision_tower", "vision encoder", has_vision),
        ("freeze_multi_modal_projector", "vision encoder", has_vision),
        ("freeze_deepstack_mergers", "deepstack mergers", has_deepstack),
    ):
        if getattr(finetuning, name) is False and not is_there:
            yield Problem((name,), f"{name}: false, and the model has no {part}", "", f"remove {name}")


def own_learning_rates(context: Context) -> Iterator[Problem]:
    """Parts with a learning rate of their own are trained."""
    optimizer, finetuning, architecture = context.settings.optimizer, context.settings.finetuning, context.architecture
    tower, deepstack = finetuning.freeze_vision_tower, finetuning.freeze_deepstack_mergers
    deepstack = tower if deepstack is None else deepstack
    if architecture is not None and not _num_deepstack_mergers(architecture):
        deepstack = True
    merger = finetuning.freeze_multi_modal_projector and deepstack
    for name, switch, is_frozen in (
        ("vision_lr", "freeze_vision_tower", tower),
        ("merger_lr", "freeze_multi_modal_projector", merger),
    ):
        if (rate := getattr(optimizer, name)) is None:
            continue
        if architecture is not None and architecture.vision is None:
            what = f"{name} {rate:g}, and the model has no vision encoder"
            yield Problem((name,), what, "", f"remove {name}")
        elif is_frozen:
            what, why = f"{name} {rate:g} with {switch}: true", "what is frozen learns at no rate"
            yield Problem((name, switch), what, why, f"write {switch}: false, or remove {name}")
        elif not optimizer.learning_rate:
            what, why = (
                f"{name} {rate:g} with learning_rate 0",
                "it rises and falls with learning_rate, at a fixed ratio",
            )
            fix = "write freeze_language_model: true and another learning_rate, to train nothing else"
            yield Problem((name, "learning_rate"), what, why, fix)


def _num_deepstack_mergers(architecture: Architecture) -> int:
    return architecture.vision.num_deepstack_mergers if architecture.vision is not None else 0


def adapters(context: Context) -> Iterator[Problem]:
    """What adapters are asked to do goes together."""
    finetuning, optimizer = context.settings.finetuning, context.settings.optimizer
    if finetuning.finetuning_type != "lora":
        return
    if not finetuning.lora_target:
        yield Problem(("lora_target",), "lora_target names nothing", "there would be no adapters", "remove lora_target")
    for target in finetuning.lora_target:
        try:
            re.compile(target)
        except re.error as error:
            what = f"lora_target {target} is no regular expression: {error}"
            yield Problem(
                ("lora_target",), what, "", "write names of linear layers, such as lora_target: q_proj,v_proj"
            )
    if finetuning.create_new_adapter and not finetuning.adapter_name_or_path:
        what = "create_new_adapter: true without adapter_name_or_path"
        why = "a run without adapters to start from trains a new one anyway"
        fix = "remove create_new_adapter, or write adapter_name_or_path: FOLDER"
        yield Problem(("create_new_adapter", "adapter_name_or_path"), what, why, fix)
    if finetuning.use_dora and finetuning.lora_dropout:
        what = f"use_dora: true with lora_dropout {finetuning.lora_dropout:g}"
        why = "rows are divided by the lengths of the whole adapted matrix, which sees all inputs"
        yield Problem(("lora_dropout", "use_dora"), what, why, "remove lora_dropout, or use_dora")
    if finetuning.loraplus_lr_ratio is not None and optimizer.optimizer != "adam":
        what = f"loraplus_lr_ratio {finetuning.loraplus_lr_ratio:g} with optimizer {optimizer.optimizer}"
        why = "the ratio is derived for Adam, whose steps do not depend on how large gradients are"
        yield Problem(
            ("loraplus_lr_ratio", "optimizer"), what, why, "write optimizer: adam, or remove loraplus_lr_ratio"
        )


RULES = (not_built, layers, without_effect, own_learning_rates, adapters)
